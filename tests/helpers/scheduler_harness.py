"""Runs whole traffics through the oracle, alone or side by side with the tensor scheduler.

Owns the loop from the first submit to idle, its bound of steps, and what must hold at the end. One
step is `scheduler_pair.Pair`; what clients and the host do is `scheduler_traffic`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.scheduler.state import SchedulerShape
from tests.helpers.python_scheduler import PythonScheduler
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_traffic import (
    Host,
    Traffic,
    random_requests,
    some_spoilt,
    with_scores,
)


class StuckError(AssertionError):
    """A run did not end within its bound of steps."""


@dataclass
class RunResult:
    """Totals of one run."""

    steps: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    admissions: int = 0
    hit_pages: int = 0
    finished: dict[int, list[int]] = field(default_factory=dict)
    finished_step: dict[int, int] = field(default_factory=dict)


def step_bound(traffic: Traffic, shape: SchedulerShape) -> int:
    """Returns steps no run may exceed: every token alone, several times, and every mask late."""
    tokens = sum(request.max_len for request in traffic.requests)
    last = max((request.step for request in traffic.requests), default=0)
    upload = sum(len(request.prompt) for request in traffic.requests) // shape.page_size
    held = traffic.first_mask_step
    return last + held + 100 + 10 * tokens + tokens * traffic.max_mask_delay + upload


def run(
    shape: SchedulerShape,
    traffic: Traffic,
    *,
    engine: TensorEngine | None = None,
    oracle: PythonScheduler | None = None,
    watch: Callable[[Pair], None] | None = None,
    max_steps: int | None = None,
) -> RunResult:
    """Runs the traffic to its end and checks everything on the way.

    Args:
        shape: sizes of the engine.
        traffic: what clients and the host do.
        engine: the tensor scheduler, fresh; without it the oracle runs alone.
        oracle: another oracle than the right one.
        watch: called after every step.
        max_steps: replaces the bound of steps.

    Raises:
        StuckError: the run did not end within its bound of steps.
        AssertionError: anything else that is wrong.
    """
    pair = Pair(shape, engine, oracle)
    host = Host(traffic, pair.sink, shape.max_rows)
    budgets = random.Random(traffic.seed + 1)
    result = RunResult()
    bound = max_steps or step_bound(traffic, shape)
    while not (host.is_done and pair.is_idle):
        if pair.num_steps >= bound:
            raise StuckError(f"not done after {bound} steps: {pair.oracle.rows}")
        host.push(pair.num_steps, pair.oracle)
        if pair.num_steps < len(traffic.first_budgets):
            budget = traffic.first_budgets[pair.num_steps]
        else:
            budget = budgets.choice(traffic.budgets)
        planned = pair.step(
            budget,
            lambda row, position: host.request_of[row].sample(position),
            lambda row, position: host.request_of[row].stops(position),
            lambda row, position: host.request_of[row].spoils(position),
        )
        result.computed_tokens += sum(planned.give.values())
        result.admissions += len(planned.admitted)
        result.hit_pages += sum(len(planned.matched[row]) for row in planned.admitted)
        host.saw(pair.applied, pair.oracle)
        for arrival in host.finished:
            result.finished_step.setdefault(arrival, pair.num_steps)
        if watch:
            watch(pair)
    result.steps, result.retractions = pair.num_steps, pair.num_retractions
    result.finished = host.finished
    pair.check_idle()
    _check_texts(traffic, host)
    return result


def run_both(shape: SchedulerShape, traffic: Traffic, **options: Any) -> RunResult:
    """Runs the traffic through a fresh tensor scheduler and the oracle side by side."""
    return run(shape, traffic, engine=TensorEngine(shape), **options)


def _check_texts(traffic: Traffic, host: Host) -> None:
    for request in traffic.requests:
        text = host.finished.get(request.arrival)
        if request.arrival not in host.aborted:
            assert text is not None, f"request {request.arrival} never finished"
        if text is not None and request.arrival not in host.cut:
            assert text == request.text(), f"request {request.arrival} got a wrong text"


def random_case(seed: int, **changes: Any) -> tuple[SchedulerShape, Traffic]:
    """Draws a small engine and its traffic from one seed; `changes` fix fields of the shape."""
    rng = random.Random(seed)
    page_size = changes.get("page_size", rng.choice((1, 2, 4)))
    usable = rng.randint(5, rng.choice((8, 16, 39)))
    usable = changes.get("num_pages", usable + 1) - 1
    max_len = rng.choice((12, 24, 48))
    max_len = min(usable * page_size + 1, changes.get("max_model_len", max_len))
    rows = rng.randint(1, 8)
    max_tokens = rng.choice((1, 2, 3, 5, 8, 16, 32))
    values: dict[str, Any] = {
        "max_rows": rows,
        "num_pages": usable + 1,
        "page_size": page_size,
        "max_model_len": max_len,
        "max_tokens": max_tokens,
        "num_candidates": min(rows, rng.choice((1, 2, 4, 8))),
        "max_releases": min(rows, rng.choice((1, 2, 4, 8))),
        "index_buckets": rng.choice((1, 2, 4, 16)),
        "index_ways": rng.choice((2, 8, 8)),
        "key_bits": rng.choice((3, 4, 5, 6, 64, 64)),
        "max_submits": rng.choice((1, 2, 4)),
        "max_pieces": rng.choice((1, 2, 8)),
        "max_aborts": rng.choice((1, 4)),
        "max_masks": rng.choice((1, 4)),
        "prefix_caching": rng.random() < 0.9,
        "token_page_size": page_size * rng.choice((1, 2, 4)),
    }
    values |= changes
    max_tokens = values["max_tokens"]
    requests = random_requests(
        rng,
        rng.randint(3, 14),
        max_len,
        page_size=page_size,
        vocab=rng.choice((2, 3, 50)),
        priorities=rng.choice((1, 3)),
        salts=rng.choice((1, 1, 2)),
        grammar_rate=rng.choice((0.0, 0.0, 0.5)),
        gap=rng.choice((0.0, 1.0, 3.0)),
    )
    requests = with_scores(random.Random(-1 - seed), requests)
    requests = some_spoilt(random.Random(-seed), requests, 0.3 if seed % 3 == 0 else 0.0)
    forced = random.Random(seed + 0.5)
    values.setdefault("max_forced", min(values["token_page_size"], forced.choice((1, 2, 5, 9))))
    is_steady = rng.random() < 0.5
    traffic = Traffic(
        seed=seed,
        requests=requests,
        abort_rate=rng.choice((0.0, 0.05, 0.2)),
        noise_rate=rng.choice((0.0, 0.2)),
        max_mask_delay=rng.choice((0, 1, 4)),
        max_forced=forced.choice((0, values["max_forced"])),
        budgets=(max_tokens,) if is_steady else (1, max(1, max_tokens // 2), max_tokens),
    )
    return small_shape(**values), traffic
