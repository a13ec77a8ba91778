"""The CUDA kernels of match, admission, publish, advance and layout against the dense form.

They run in the emulator, in several orders of threads. Every call is checked bit for bit on a copy
of the state; random traffic is checked against the oracle on top, as the dense form is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from compiled_engine.custom_ops.scheduler_advance import RECORD_SLOTS, block_of
from compiled_engine.custom_ops.scheduler_args import STATE_SIZES
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import (
    DECODE,
    ERROR_NO_TOKEN_PAGE,
    ERROR_TOKENS_TO_IDLE_ROW,
    FREE,
    SchedulerShape,
    SchedulerState,
)
from tests.helpers.emulated_scheduler import (
    CheckedAdmit,
    CheckedAdvance,
    CheckedPublish,
    checked_layout,
)
from tests.helpers.scheduler_cuda import Guarded
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_traffic import Traffic

COLLIDING = {"key_bits": 3, "index_buckets": 1, "index_ways": 4}
CROWDED = {"max_rows": 8, "num_candidates": 8, "num_pages": 12, "page_size": 2, "max_tokens": 16}
LONG = {"page_size": 1, "num_pages": 160, "max_model_len": 120, "max_tokens": 40}
ONE_TOKEN = {"max_tokens": 1, "num_candidates": 1, "num_pages": 6}
ONE_WAY = {"index_buckets": 4, "index_ways": 1}


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(shape, state, ...)` on a state between poisoned guards, copied back after it."""

    def guarded_call(shape: SchedulerShape, state: SchedulerState, *args: Any) -> Any:
        guards = Guarded((state, args))
        mine, my_args = guards.tensors
        result = call(shape, mine, *my_args)
        guards.check()
        for target, source in zip(tree_leaves(state), tree_leaves(mine), strict=True):
            target.copy_(source)
        return result

    return guarded_call


def run_checked(shape: SchedulerShape, traffic: Traffic, block: int, order: int) -> None:
    """Runs traffic with every kernel of this file in the place of its dense form."""
    checked_admit = CheckedAdmit(shape, block, order)

    @guarded
    def admit(shape: SchedulerShape, state: SchedulerState, *args: Any) -> Any:
        return checked_admit(shape, state, state.groups[0], *args)

    engine = TensorEngine(shape, advance_fn=guarded(CheckedAdvance(shape, block, order)))
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch(
                "compiled_engine.scheduler.plan._admit",
                lambda shape, state, group, *args: admit(shape, state, *args),
            )
        )
        stack.enter_context(
            mock.patch(
                "tests.helpers.scheduler_pair.layout",
                lambda *args: checked_layout(*args, block=block),
            )
        )
        run(shape, traffic, engine=engine)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed):
    run_checked(*random_case(seed), block=(32, 64, 96)[seed % 3], order=seed % 5)


@pytest.mark.parametrize(
    "changes",
    [COLLIDING, CROWDED, CROWDED | COLLIDING, LONG, ONE_TOKEN, ONE_WAY],
    ids=["colliding", "crowded", "crowded-colliding", "long", "one-token", "one-way"],
)
def test_random_traffic_at_the_edge(changes):
    for seed in (100, 101, 102):
        run_checked(*random_case(seed, **changes), block=(32, 128, 64)[seed % 3], order=seed % 4)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_much_random_traffic(group):
    edges = ({}, COLLIDING, CROWDED, CROWDED | COLLIDING, LONG, ONE_TOKEN, ONE_WAY)
    for seed in range(50_000 + 35 * group, 50_000 + 35 * (group + 1)):
        case = random_case(seed, **edges[seed % len(edges)])
        run_checked(*case, block=(32, 64, 128)[seed % 3], order=seed % 6)


def test_publish_with_its_list_in_global_memory():
    for seed in (7, 12):
        shape, traffic = random_case(seed, prefix_caching=True)
        publish = CheckedPublish(shape, 32, seed)
        with mock.patch("compiled_engine.scheduler.advance.publish", publish):
            run(shape, traffic, engine=TensorEngine(shape))


@pytest.mark.parametrize("seed", range(6))
def test_equal_pages_completed_in_one_step(seed):
    """Without deferral, rows with equal prompts compute the same pages in the same step."""
    rng = random.Random(seed)
    shape = small_shape(
        max_rows=12,
        num_candidates=12,
        num_pages=120,
        page_size=2,
        max_tokens=64,
        max_model_len=24,
        key_bits=(64, 64, 2)[seed % 3],
        index_buckets=(64, 2, 1)[seed % 3],
        index_ways=(8, 3, 8)[seed % 3],
        max_submits=12,
        max_pieces=128,
    )
    engine = TensorEngine(shape, advance_fn=CheckedAdvance(shape, 64, seed))
    for row in range(shape.max_rows):
        prompt = [7, 7, *(rng.randrange(2) for _ in range(rng.randint(2, 15)))]
        fields = {"gen": 1, "arrival": row, "priority": 0, "salt": rng.randrange(2)}
        engine.builder.submit(row=row, prompt=prompt, max_len=len(prompt) + 4, **fields)
    num_swaps = num_private = 0
    with mock.patch(
        "compiled_engine.scheduler.plan._is_deferred",
        return_value=torch.zeros(shape.num_candidates, dtype=torch.bool),
    ):
        for _ in range(14):
            engine.take()
            planned = engine.plan(64)
            engine.advance({row: row % 2 for row in planned.emit.nonzero().flatten().tolist()}, {})
            num_swaps += int((engine.state.groups[0].ref > 1).sum())
            num_private += int((~engine.state.pub_ok & (engine.state.state == DECODE)).sum())
    assert engine.state.state[: shape.max_rows].eq(FREE).all()
    assert num_swaps > 0, "no page was shared: nothing was swapped"
    assert num_private > 0 or seed % 3 == 0, "no publication failed"


def decoding_pair(num_steps: int, **changes: int) -> Pair:
    """One row in decode after `num_steps` steps, its advance checked."""
    shape = small_shape(**changes)
    pair = Pair(shape, TensorEngine(shape, advance_fn=CheckedAdvance(shape)))
    pair.submit(1, [5, 6, 7], 31)
    for step in range(num_steps):
        pair.step(sample=lambda row, position, step=step: step)
    return pair


def test_records_go_round_the_ring():
    checked = CheckedAdvance(small_shape())
    pair = Pair(small_shape(), TensorEngine(small_shape(), advance_fn=checked))
    pair.submit(2, [1, 2, 3], 30)
    while pair.num_steps <= RECORD_SLOTS:
        if pair.num_steps == 40:
            pair.submit(1, [1, 2, 3], 20)
        pair.step()
    assert int(checked.ring[3]) == pair.num_steps


def idle_plan(shape: SchedulerShape, row: int) -> Plan:
    """A plan that gives a token to a row, whatever its state."""
    give = torch.zeros(shape.max_rows + 1, dtype=torch.int32)
    give[row] = 1
    scalar = torch.tensor(0, dtype=torch.int32)
    rank = torch.where(give > 0, 0, shape.max_rows).int()
    minus_one = torch.tensor(-1, dtype=torch.int32)
    none = torch.zeros(shape.max_rows + 1, dtype=torch.bool)
    return Plan(give, give > 0, rank, minus_one, none, scalar + 1, scalar + 1, scalar)


def advance_checked(pair: Pair, plan: Plan) -> None:
    assert pair.engine is not None
    rows = pair.shape.max_rows + 1
    tokens = torch.full((rows, 1), 9, dtype=torch.int32)
    count = torch.ones(rows, dtype=torch.int32)
    stop = torch.zeros(rows, 1, dtype=torch.bool)
    pair.engine.advance_fn(pair.shape, pair.engine.state, plan, tokens, count, stop)


def test_tokens_for_an_idle_row_are_counted():
    pair = decoding_pair(4)
    assert pair.engine is not None
    advance_checked(pair, idle_plan(pair.shape, 3))
    assert int(pair.engine.state.error[ERROR_TOKENS_TO_IDLE_ROW]) == 1


def test_missing_token_pages_are_counted():
    pair = decoding_pair(6)  # 8 tokens are known: the next one needs a token page
    assert pair.engine is not None
    state = pair.engine.state
    assert int(state.num_tokens[1]) % pair.shape.token_page_size == 1
    state.num_tokens[1] -= 1
    state.num_free_token_pages.zero_()
    advance_checked(pair, idle_plan(pair.shape, 1))
    assert int(state.error[ERROR_NO_TOKEN_PAGE]) == 1


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 200])
def test_layout_of_a_mixed_step(num_tokens):
    shape = small_shape(
        max_rows=70, max_tokens=200, num_candidates=70, num_pages=400, max_submits=70
    )
    engine = TensorEngine(shape)
    rng = random.Random(num_tokens)
    rows = rng.sample(range(70), 50)
    for arrival, row in enumerate(rows):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
        fields = {"gen": 1, "arrival": arrival, "priority": rng.randrange(3), "salt": 0}
        engine.builder.submit(row=row, prompt=prompt, max_len=30, **fields)
    for step in range(12):
        engine.take()
        planned = engine.plan(num_tokens)
        for block in (32, 96):
            checked_layout(shape, engine.state, planned, num_tokens, block=block)
        if step % 4 == 3:
            checked_layout(shape, engine.state, planned, 8)
        engine.advance(dict.fromkeys(planned.emit.nonzero().flatten().tolist(), 3), {})


def test_more_rows_than_threads():
    """Rows beyond the block's threads have their turn after the first ones."""
    sizes = {"max_rows": 100, "num_candidates": 100, "num_pages": 700, "max_submits": 100}
    shape = small_shape(max_tokens=256, max_pieces=400, max_releases=100, **sizes)
    engine = TensorEngine(shape, advance_fn=CheckedAdvance(shape, 32, 5))
    rng = random.Random(0)
    for row in range(100):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 16))]
        fields = {"gen": 1, "arrival": row, "priority": 0, "salt": 0}
        engine.builder.submit(row=row, prompt=prompt, max_len=len(prompt) + 9, **fields)
    for _ in range(16):
        engine.take()
        planned = engine.plan(256)
        checked_layout(shape, engine.state, planned, 256, block=32)
        engine.advance(dict.fromkeys(planned.emit.nonzero().flatten().tolist(), 1), {})
    assert engine.state.state[:100].eq(FREE).all()


@pytest.mark.parametrize(("max_rows", "block"), [(1, 256), (257, 512), (4096, 512)])
def test_threads_of_a_block(max_rows, block):
    sizes = [0] * len(STATE_SIZES)
    sizes[STATE_SIZES.index("max_rows")] = max_rows
    assert block_of(sizes) == block
