"""Requests that schemathesis makes from `/openapi.json`: such as fit it and such as break it.

Its checks judge the answers: no 5xx, and none that the description does not have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.helpers.hostile_attack import ANSWER_LIMIT_S, MAX_FAULTS, AttackPlan, AttackReport
from tests.helpers.hostile_bodies import MODEL_NAME, VALID
from tests.helpers.hostile_sockets import Target

KIND = "schemathesis"
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES_A_ROUND = 8
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
MAX_OUTPUT_TOKENS = 16


def attack_by_schemathesis(plan: AttackPlan) -> AttackReport:
    """Sends what schemathesis makes, one after the other, until the time is over."""
    target = Target(plan.port, plan.key, random.Random(plan.seed))
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {plan.key}"
        _Attacker(target, session).run(time.monotonic() + plan.seconds)
    return AttackReport(target.statuses, target.faults[:MAX_FAULTS])


class _Attacker:
    def __init__(self, target: Target, session: requests.Session) -> None:
        self._target, self._session = target, session
        base_url = f"http://127.0.0.1:{target.port}"
        schema = schemathesis.openapi.from_dict(session.get(f"{base_url}/openapi.json").json())
        schema.config.update(base_url=base_url)
        self._rounds = [
            (operation, mode)
            for operation in (found.ok() for found in schema.get_all_operations())
            for mode in _modes(operation)
        ]
        assert {mode for _, mode in self._rounds} == {POSITIVE, NEGATIVE}
        assert len(self._rounds) >= 30, self._rounds

    def run(self, deadline: float) -> None:
        """Goes on until `time.monotonic()` is `deadline`."""
        while time.monotonic() < deadline:
            self._round(*self._target.rng.choice(self._rounds), deadline)

    def _round(self, operation: APIOperation, mode: GenerationMode, deadline: float) -> None:
        @hypothesis.seed(self._target.rng.getrandbits(64))
        @hypothesis.settings(
            max_examples=EXAMPLES_A_ROUND,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            if time.monotonic() < deadline:
                self._adapt(case, mode == POSITIVE)
                self._send(case)

        run: Callable[[], None] = send
        run()

    def _adapt(self, case: schemathesis.Case, is_positive: bool) -> None:
        """Keeps outputs short, and lets more of the bodies that fit the description pass."""
        body, needed = case.body, VALID.get(case.path, {})
        if not isinstance(body, dict):
            return
        if is_positive and needed and self._target.rng.random() < 0.7:
            # Random messages and prompts mostly fail at the first check behind the description.
            body = {**body, **needed}
        if is_positive and "model" in body:
            body = {**body, "model": MODEL_NAME}
        case.body = _short(body, needed)

    def _send(self, case: schemathesis.Case) -> None:
        # Said once more: it makes keys of its own.
        key = {"Authorization": f"Bearer {self._target.key}"}
        sent = f"{case.query} {case.body}"[:600]
        shown = f"{KIND}: {case.method} {case.formatted_path[:80]} {sent}"
        try:
            answer = case.call(session=self._session, headers=key, timeout=ANSWER_LIMIT_S)
        except requests.ReadTimeout:
            self._target.faults.append(f"{shown} -> no answer in {ANSWER_LIMIT_S:g} s")
            return
        except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
            self._target.count(KIND, 0)
            return
        except requests.RequestException as error:
            self._target.faults.append(f"{shown} -> {type(error).__name__}: {error}")
            return
        self._target.count(KIND, answer.status_code)
        try:
            case.validate_response(answer, checks=CHECKS, excluded_checks=_excluded(answer))
        except FailureGroup as failures:
            reasons = "; ".join(f"{each.title}: {each.message}" for each in failures.exceptions)
            self._target.faults.append(f"{shown} -> {answer.status_code} {reasons[:900]}")


def _excluded(answer: schemathesis.Response) -> list[CheckFunction]:
    """The description says what the data of a stream's events holds; the check wants the events."""
    is_stream = "text/event-stream" in answer.headers.get("content-type", [""])[0]
    return [response_schema_conformance] if is_stream else []


def _modes(operation: APIOperation) -> list[GenerationMode]:
    """What can be made of an operation: without a body or a query there is nothing to break."""
    if operation.path in VALID:
        # The routes that have much to break come oftener.
        return [POSITIVE, POSITIVE, POSITIVE, NEGATIVE, NEGATIVE]
    return [POSITIVE, NEGATIVE] if len(operation.body) or len(operation.query) else [POSITIVE]


def _short(body: dict[str, Any], needed: dict[str, Any]) -> dict[str, Any]:
    """The body with a limit of few tokens where it has none or a large one, one level down too."""
    result = {
        name: _short(value, needed[name])
        if isinstance(value, dict) and isinstance(needed.get(name), dict)
        else min(value, MAX_OUTPUT_TOKENS)
        if name in LIMITS and isinstance(value, int)
        else value
        for name, value in body.items()
    }
    limits = {name: value for name, value in needed.items() if name in LIMITS}
    return {**limits, **{n: v for n, v in result.items() if n not in limits or v is not None}}
