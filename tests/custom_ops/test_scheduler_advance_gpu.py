"""The scheduler's second half on a GPU: random traffic, and records before a graph's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compiled_engine.layout import StepInputs, layout
from compiled_engine.outbox import RingOutbox, pack
from compiled_engine.scheduler.advance import StepRecord, advance
from compiled_engine.scheduler.cuda_advance import schedule_advance, schedule_layout
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState
from tests.helpers.emulated_scheduler import assert_same_state
from tests.helpers.scheduler_harness import random_case, run
from tests.helpers.scheduler_pair import TensorEngine, small_shape

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def on_cpu(tree: Any) -> Any:
    return tree_map(lambda tensor: tensor.cpu().clone(), tree)


class CheckedOnGpu:
    """`advance` and `layout` by their kernels, checked against the dense forms on the CPU."""

    def __init__(self, shape: SchedulerShape) -> None:
        self.outbox = RingOutbox(shape.max_rows + 1, GPU)

    def advance(
        self,
        shape: SchedulerShape,
        state: SchedulerState,
        plan: Plan,
        tokens: Tensor,
        count: Tensor,
        is_stop: Tensor,
    ) -> StepRecord:
        expected = on_cpu(state)
        record = advance(shape, expected, *on_cpu((plan, tokens, count, is_stop)))
        schedule_advance(shape, state, plan, tokens, is_stop, self.outbox.ring)
        self.outbox.note_launch()
        found = self.outbox.read()
        rows, counts = pack(record)
        assert (found.rows[:-1] == rows[:-1].numpy()).all()
        assert (found.counts == counts.numpy()).all()
        assert_same_state(shape, expected, on_cpu(state), "advance")
        return record

    def layout(
        self, shape: SchedulerShape, state: SchedulerState, plan: Plan, num_tokens: int
    ) -> StepInputs:
        expected = layout(shape, *on_cpu((state, plan)), num_tokens)
        found = schedule_layout(shape, state, plan, num_tokens)
        for name, want, have in zip(StepInputs._fields, expected, found, strict=True):
            assert torch.equal(want, have.cpu()), name
        return found


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed, monkeypatch):
    shape, traffic = random_case(seed)
    checked = CheckedOnGpu(shape)
    monkeypatch.setattr("tests.helpers.scheduler_pair.layout", checked.layout)
    run(shape, traffic, engine=TensorEngine(shape, advance_fn=checked.advance, device="cuda"))


def planned_engine() -> TensorEngine:
    """One row whose prompt is in this step's plan."""
    engine = TensorEngine(small_shape(), device="cuda")
    fields = {"gen": 1, "arrival": 0, "priority": 0, "salt": 0}
    engine.builder.submit(row=1, prompt=[5, 6, 7], max_len=30, **fields)
    engine.take()
    engine.plan(8)
    return engine


def sampled(shape: SchedulerShape) -> tuple[Tensor, Tensor]:
    tokens = torch.full((shape.max_rows + 1, 1), 42, dtype=torch.int32, device=GPU)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def test_a_record_is_read_before_its_graph_ends():
    engine = planned_engine()
    assert engine.last_plan is not None
    outbox = RingOutbox(engine.shape.max_rows + 1, GPU)
    tokens, is_stop = sampled(engine.shape)

    def step() -> None:
        schedule_advance(engine.shape, engine.state, engine.last_plan, tokens, is_stop, outbox.ring)

    step()
    outbox.discard()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        torch.cuda._sleep(400_000_000)  # a quarter of a second
    graph.replay()
    outbox.note_launch()
    record = outbox.read()
    assert not torch.cuda.current_stream().query(), "the graph ended before the record was read"
    assert record.rows[1].tolist() == [1, 1, 0, 42]
    torch.cuda.synchronize()
