"""Random runs of the tensor scheduler beside the oracle: same plan and same state at every step.

Runs are bounded by steps. Every run also checks the invariants of pages and index, the context of
every scheduled row in a fake KV cache, the text of every request, and that all is idle at the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_engine.scheduler.state import SchedulerShape
from tests.helpers.python_pool import PublishEntry
from tests.helpers.python_scheduler import NO_SCORES, PythonScheduler, RowState
from tests.helpers.scheduler_harness import random_case, run, run_both
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_snapshot import tensor_snapshot
from tests.helpers.scheduler_traffic import Request, Traffic

SEEDS_PER_TEST = 10


class CountingOracle(PythonScheduler):
    """The oracle, counting what it does rarely."""

    def __init__(self, shape: SchedulerShape) -> None:
        super().__init__(shape)
        self.num_swaps = 0
        self._swap = self.pool.swap
        self.pool.swap = self._counted_swap  # type: ignore[method-assign]

    def _counted_swap(self, entry: PublishEntry) -> None:
        self.num_swaps += 1
        self._swap(entry)


@pytest.mark.parametrize("group", range(10))
def test_random_seeds(group):
    for seed in range(group * SEEDS_PER_TEST, (group + 1) * SEEDS_PER_TEST):
        run_both(*random_case(seed))


def test_random_seeds_reach_every_mechanism():
    totals = {"retractions": 0, "hit_pages": 0, "admissions": 0}
    swaps = evictions = blocked = deferrals = 0
    for seed in range(300):
        shape, traffic = random_case(seed)

        def watch(pair: Pair) -> None:
            nonlocal blocked, deferrals
            blocked += sum(
                pair.state(row) is RowState.BLOCKED for row in range(pair.shape.max_rows)
            )
            deferrals += len(pair.oracle.current.deferred)

        oracle = CountingOracle(shape)
        result = run(shape, traffic, oracle=oracle, watch=watch)
        swaps += oracle.num_swaps
        evictions += len(oracle.pool.evicted)
        for name in totals:
            totals[name] += getattr(result, name)
    assert min(totals.values()) >= 30, totals
    assert min(swaps, evictions, blocked, deferrals) >= 30, (swaps, evictions, blocked, deferrals)


# One token, one candidate and one release a step, five usable pages.
NARROW = {"max_tokens": 1, "num_candidates": 1, "max_releases": 1, "num_pages": 6}
# Many rows that all want to grow in few pages.
CROWDED = {"max_rows": 8, "num_candidates": 8, "num_pages": 12, "page_size": 2, "max_tokens": 16}
COLLIDING = {"key_bits": 3, "index_buckets": 1, "index_ways": 4}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(NARROW, id="narrow"),
        pytest.param(CROWDED, id="crowded"),
        pytest.param(COLLIDING, id="colliding"),
        pytest.param(CROWDED | COLLIDING, id="crowded-colliding"),
    ],
)
def test_random_seeds_at_the_edge(changes):
    for seed in range(1000, 1000 + SEEDS_PER_TEST):
        run_both(*random_case(seed, **changes))


@st.composite
def requests(draw: st.DrawFn, max_len: int, count: int) -> tuple[Request, ...]:
    """Draws requests over an alphabet of two, so that prompts often share pages."""
    drawn: list[Request] = []
    step = 0
    for arrival in range(count):
        length = draw(st.integers(2, max_len))
        step += draw(st.integers(0, 3))
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=length - 1))
        drawn.append(
            Request(
                arrival=arrival,
                step=step,
                prompt=tuple(prompt),
                max_len=length,
                priority=draw(st.integers(-1, 1)),
                salt=draw(st.integers(0, 1)),
                grammar=draw(st.booleans()),
                score_from=draw(st.sampled_from((NO_SCORES, NO_SCORES, 0, 2))),
                vocab=2,
                stop_every=draw(st.sampled_from((0, 4))),
            )
        )
    return tuple(drawn)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SchedulerShape, Traffic]:
    """Draws an engine and its traffic."""
    page_size = draw(st.sampled_from((1, 2, 4)))
    usable = draw(st.integers(5, 39))
    max_len = min(usable * page_size + 1, 14)
    max_tokens = draw(st.integers(1, 16))
    rows = draw(st.integers(1, 5))
    shape = small_shape(
        page_size=page_size,
        num_pages=usable + 1,
        max_model_len=max_len,
        max_tokens=max_tokens,
        max_rows=rows,
        num_candidates=draw(st.integers(1, rows)),
        max_releases=draw(st.integers(1, rows)),
        key_bits=draw(st.sampled_from((3, 5, 64))),
        index_buckets=draw(st.sampled_from((1, 4, 16))),
        index_ways=draw(st.sampled_from((1, 2, 8))),
        max_pieces=draw(st.integers(1, 3)),
        max_masks=draw(st.integers(1, 3)),
        max_aborts=draw(st.integers(1, 3)),
    )
    traffic = Traffic(
        seed=draw(st.integers(0, 1000)),
        requests=draw(requests(max_len, draw(st.integers(1, 6)))),
        abort_rate=draw(st.sampled_from((0.0, 0.2))),
        noise_rate=draw(st.sampled_from((0.0, 0.3))),
        max_mask_delay=draw(st.integers(0, 3)),
        budgets=tuple(draw(st.lists(st.integers(1, max_tokens + 2), min_size=1, max_size=3))),
    )
    return shape, traffic


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases())
def test_drawn_cases(case):
    run_both(*case)


def test_two_runs_are_equal_to_the_bit():
    shape, traffic = random_case(26)
    pictures: list[Any] = []
    for _ in range(2):
        engine = TensorEngine(shape)
        run(shape, traffic, engine=engine)
        pictures.append(
            (tensor_snapshot(shape, engine.state), engine.state.groups[0].ring.tolist())
        )
    assert pictures[0] == pictures[1]


@pytest.mark.slow
@pytest.mark.parametrize("group", range(20))
def test_many_random_seeds(group):
    for seed in range(10_000 + group * 100, 10_000 + (group + 1) * 100):
        run_both(*random_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [NARROW, CROWDED, COLLIDING], ids=["narrow", "crowded", "keys"])
def test_many_random_seeds_at_the_edge(changes):
    for seed in range(20_000, 20_200):
        run_both(*random_case(seed, **changes))
