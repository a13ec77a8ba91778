"""Plan and advance compiled: one graph each, the numbers of the oracle, no copy of the state."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import run_and_get_code

from compiled_engine.scheduler.advance import advance
from compiled_engine.scheduler.plan import plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState, new_state
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_pair import TensorEngine

# Sizes that differ from each other, so that a buffer's size tells which tensor it copies.
SIZES = {
    "max_rows": 5,
    "num_pages": 13,
    "page_size": 2,
    "max_model_len": 23,
    "max_tokens": 7,
    "num_candidates": 3,
    "max_releases": 2,
    "index_buckets": 4,
    "index_ways": 8,
    "key_bits": 5,
    "max_submits": 2,
    "max_pieces": 3,
    "max_aborts": 2,
    "max_masks": 2,
    "token_page_size": 4,
    "prefix_caching": True,
}
SEED = 148  # retracts, swaps, blocks, evicts, aborts and hits within 75 steps


def compiled_engine_of(shape: SchedulerShape) -> TensorEngine:
    """Returns an engine whose two halves are compiled for this shape at their first call."""
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    plan_half = torch.compile(lambda *args: plan(shape, *args), **options)
    advance_half = torch.compile(lambda *args: advance(shape, *args), **options)
    return TensorEngine(
        shape, lambda _, *args: plan_half(*args), lambda _, *args: advance_half(*args)
    )


def copied_tensors(shape: SchedulerShape, state: SchedulerState, code: str) -> list[str]:
    """Names the tables of the state for which the code allocates a buffer of the same size."""
    names = ("token_table", "token_pages", "chain", "free_token_pages")
    tables = {name: getattr(state, name) for name in names}
    names = ("block_table", "page_tokens", "ring", "tkey", "tpage")
    tables |= {name: getattr(state.groups[0], name) for name in names}
    pattern = r"empty_strided\w*\(\(([\d, ]*)\), \([\d, ]*\), (torch\.\w+)"
    found = {
        (tuple(int(n) for n in size.split(",") if n.strip()), dtype)
        for size, dtype in re.findall(pattern, code)
    }
    assert found, "no allocation was recognised in the generated code"
    return [name for name, t in tables.items() if (tuple(t.shape), str(t.dtype)) in found]


def test_copies_are_recognised():
    shape, _ = random_case(SEED, **SIZES)
    code = "buf0 = empty_strided_cpu((6, 12), (12, 1), torch.int32)"
    assert copied_tensors(shape, new_state(shape), code) == ["block_table"]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
# Inductor's first import touches a deprecated decorator of torch itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_plan_and_advance_equal_the_oracle():
    shape, traffic = random_case(SEED, **SIZES)
    engine = compiled_engine_of(shape)
    result, codes = run_and_get_code(lambda: run(shape, traffic, engine=engine))
    assert result.steps >= 60
    assert min(result.retractions, result.hit_pages) >= 3
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert len(codes) == 2
    for code in codes:
        assert copied_tensors(shape, engine.state, code) == []
