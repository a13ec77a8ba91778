"""Forced tokens that come with a mask: appended in every state, computed like a chunk of a prompt.

Each test runs the dense form, and the CUDA kernels in the emulator beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.plan import plan
from compiled_engine.scheduler.state import (
    ERROR_FORCED_ELSEWHERE,
    ERROR_NO_TOKEN_PAGE,
    known_tokens,
)
from compiled_engine.step_choice import Seen, StepChoice
from tests.helpers.python_scheduler import RowState
from tests.helpers.scheduler_cuda import CheckedPlan, checked_advance
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_keys import chain_links, to_signed
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_snapshot import tensor_snapshot


@pytest.fixture(params=["dense", "emulated"])
def make_pair(request: pytest.FixtureRequest) -> Any:
    def made(**changes: Any) -> Pair:
        shape = small_shape(**{"max_model_len": 60, "max_tokens": 16} | changes)
        engine = TensorEngine(shape)
        if request.param == "emulated":
            engine = TensorEngine(shape, CheckedPlan(), checked_advance(shape))
        return Pair(shape, engine)

    return made


def text_of(pair: Pair, row: int) -> list[int]:
    assert pair.engine is not None
    return known_tokens(pair.shape, pair.engine.state, row)


def test_a_blocked_row_computes_them_in_one_step(make_pair):
    pair = make_pair()
    pair.submit(0, [5, 6, 7], 30, grammar=True)
    pair.step()
    pair.mask(0)
    pair.step(sample=lambda *_: 8)
    assert pair.state(0) is RowState.BLOCKED
    pair.mask(0, forced=(9, 10, 11))
    planned = pair.half_step(16)
    assert pair.state(0) is RowState.PREFILL
    assert planned.give[0] == 4  # the sampled token's own, and theirs
    pair.finish_step({0: 12}, {})
    assert text_of(pair, 0) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert pair.state(0) is RowState.BLOCKED


def test_decode_rows_go_first_and_little_budget_takes_several_steps(make_pair):
    pair = make_pair()
    pair.submit(1, [1, 2], 30, grammar=True)
    pair.submit(2, [3, 4], 30)
    pair.step()
    pair.mask(1)
    pair.step()
    pair.mask(1, forced=(20, 21, 22, 23))
    given = [pair.step(budget=2).give for _ in range(5)]
    assert [step.get(1, 0) for step in given] == [1, 1, 1, 1, 1]
    assert all(step[2] == 1 for step in given)
    assert text_of(pair, 1)[3:] == [20, 21, 22, 23, 1]


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 3, 4, 7, 8, 9, 15])
def test_chains_are_those_of_the_whole_text(make_pair, page_size, before):
    pair = make_pair(page_size=page_size, token_page_size=8, num_pages=61, max_forced=8)
    prompt = [(7 * i) % 13 for i in range(before)]
    forced = tuple(range(30, 38))
    pair.submit(0, prompt, 50, grammar=True, salt=2**61)
    pair.mask(0, before + len(forced), 0, forced)
    pair.step(0)
    assert pair.state(0) is RowState.WAITING
    assert text_of(pair, 0) == [*prompt, *forced]
    found = tensor_snapshot(pair.shape, pair.engine.state).rows[0]["links"]
    expected = chain_links(2**61, [*prompt, *forced], page_size)
    assert found == [to_signed(link) for link in expected]


def test_prompts_that_are_being_computed_and_retracted_rows_take_them(make_pair):
    pair = make_pair()
    pair.submit(0, range(20, 32), 40, grammar=True)
    pair.step(budget=5)
    assert pair.state(0) is RowState.PREFILL
    pair.mask(0, forced=(1, 2))
    pair.step(budget=5)
    assert pair.state(0) is RowState.PREFILL
    pair.step(sample=lambda *_: 3)
    assert pair.state(0) is RowState.BLOCKED
    assert pair.engine is not None
    pair.oracle.rows[0].state = RowState.RETRACTED
    pair.engine.state.state[0] = RowState.RETRACTED
    pair.mask(0, forced=(4, 5))
    for _ in range(3):
        pair.step(sample=lambda *_: 6)
    assert text_of(pair, 0) == [*range(20, 32), 1, 2, 3, 4, 5, 6]


def test_cached_tokens_are_the_prompts(make_pair):
    pair = make_pair(prefix_caching=True)
    for row in (0, 1):
        pair.submit(row, [1, 2, 3, 4, 5], 40, grammar=True, arrival=row)
        pair.mask(row, 13, 0, tuple(range(30, 38)))
        for _ in range(4):
            pair.step()
        pair.abort(row)
        pair.step()
    assert pair.oracle.rows[1].num_cached == 5


def test_tokens_for_another_position_are_counted_and_dropped(make_pair):
    pair = make_pair()
    pair.submit(0, [1, 2, 3], 30, grammar=True)
    pair.mask(0, 6, 0, (7, 8))
    pair.step(0)
    assert pair.engine is not None
    assert int(pair.engine.state.error[ERROR_FORCED_ELSEWHERE]) == 1
    assert pair.oracle.rows[0].mask_pos == -1
    assert text_of(pair, 0) == [1, 2, 3]
    # Those of an old request are none of the row's.
    pair.mask(0, 5, 99, (7, 8))
    pair.step(0)
    assert int(pair.engine.state.error[ERROR_FORCED_ELSEWHERE]) == 1


def test_missing_token_pages_are_counted():
    counts = []
    for plan_fn in (plan, CheckedPlan()):
        shape = small_shape(num_token_pages=1, max_rows=2)
        engine = TensorEngine(shape, plan_fn)
        fields = {"gen": 1, "arrival": 0, "priority": 0, "salt": 0, "max_len": 20, "grammar": True}
        engine.builder.submit(row=0, prompt=[1] * 7, **fields)
        engine.builder.mask(0, 1, 10, (4, 5, 6))
        engine.take()
        engine.plan(0)
        counts.append(int(engine.state.error[ERROR_NO_TOKEN_PAGE]))
    assert counts == [1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_with_much_forced_text(seed):
    shape, traffic = random_case(seed + 300, max_forced=4, token_page_size=8)
    requests = tuple(type(r)(**{**vars(r), "grammar": True}) for r in traffic.requests)
    traffic = type(traffic)(**{**vars(traffic), "requests": requests, "max_forced": 4})
    engine = TensorEngine(shape, CheckedPlan((32, 64)[seed % 2], seed), checked_advance(shape))
    lengths: list[int] = []

    def watch(pair: Pair) -> None:
        lengths.extend(len(getattr(entry, "forced", ())) for entry in pair.applied)

    run(shape, traffic, engine=engine, watch=watch)
    assert max(lengths) > 1


def test_more_tokens_than_a_mask_brings_are_refused():
    shape = small_shape()
    with pytest.raises(AssertionError):
        InboxBuilder(shape).mask(0, 1, 99, tuple(range(shape.max_forced + 1)))
    with pytest.raises(ValueError, match="max_forced"):
        small_shape(max_forced=9, token_page_size=8)


class _Executor:
    """Knows no steps but their sizes."""

    reads_plans = False
    buckets = (2**20,)

    def key_of(self, num_tokens: int, variant: Any, *, is_mixed: bool) -> tuple[int, bool]:
        return num_tokens, is_mixed


class _NoPrompts:
    def num_needed(self) -> int:
        return 0


def test_a_step_has_room_for_what_was_forced():
    choice = StepChoice(_Executor(), _NoPrompts(), None)  # type: ignore[arg-type]
    counts = np.zeros(16, np.int64).tolist()
    seen = Seen(3, 0, {}, counts, 0, num_forced=7)
    assert choice.choose(seen, 0) == (10, True)  # type: ignore[comparison-overlap,arg-type]
