"""Runs requests with grammars through an engine's loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.engine import Engine
from compiled_engine.request import GrammarKind, GrammarSpec, Request, SamplingParams, TokenEvent
from tests.helpers.engines import assert_idle


@dataclass
class Answer:
    """What one request gave.

    Attributes:
        steps: the loop's step in which each token came.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    reason: str | None = None
    error: TokenEvent | None = None


def spec(kind: GrammarKind, text: Any = "") -> GrammarSpec:
    """A grammar; anything but a string is written as JSON."""
    return GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))


def run_grammars(
    engine: Engine,
    params: list[SamplingParams],
    *,
    prompts: list[list[int]] | None = None,
    after_step: Callable[[int, list[Answer]], None] | None = None,
    max_steps: int = 20_000,
) -> list[Answer]:
    """Answers of one request for each of `params`; checks that the engine is idle at the end."""
    loop, answers = engine.loop, [Answer() for _ in params]
    for index, each in enumerate(params):
        prompt = prompts[index] if prompts else list(range(10, 20 + index))
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=each))
    step = 0
    while loop.has_work:
        events = [*loop.step(), *loop.take_refusals()]
        if not loop.has_work:
            events.extend(loop.drain())
        for event in events:
            answer = answers[event.request_id]
            assert answer.reason is None, f"event after the end of request {event.request_id}"
            answer.tokens.extend(event.token_ids)
            answer.steps.extend([step] * len(event.token_ids))
            answer.reason = event.finish_reason
            if event.finish_reason == "error":
                answer.error = event
        if after_step is not None:
            after_step(step, answers)
        step += 1
        assert step < max_steps, "requests do not end"
    assert_idle(engine)
    return answers
