"""The second half of the scheduler's CUDA kernels on CPU tensors, beside the dense form.

`CheckedAdvance` stands in for `advance` in a `TensorEngine`: it runs the dense form on a copy of
the state and the emulated kernel on the state itself, and fails unless both leave the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from compiled_engine.custom_ops.scheduler_advance import (
    RECORD_SLOTS,
    advance_args,
    scratch_bytes,
)
from compiled_engine.custom_ops.scheduler_args import STATE_SIZES, STATE_TENSORS
from compiled_engine.custom_ops.scheduler_layout import layout_args, new_inputs
from compiled_engine.custom_ops.scheduler_prefix import (
    admit_args,
    match_args,
    new_matches,
    publish_args,
)
from compiled_engine.layout import StepInputs, layout
from compiled_engine.outbox import pack
from compiled_engine.scheduler import plan as plan_module
from compiled_engine.scheduler import prefix as prefix_module
from compiled_engine.scheduler.advance import NUM_COUNTS, StepRecord, advance
from compiled_engine.scheduler.pages import first_rows
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.prefix import match
from compiled_engine.scheduler.state import (
    RETRACTED,
    WAITING,
    GroupState,
    SchedulerShape,
    SchedulerState,
)
from tests.helpers.cuda_emulator import Emulated

RUBBISH = -(2**31) + 12345


def sizes_of(shape: SchedulerShape) -> list[int]:
    """The sizes a kernel gets."""
    return [int(getattr(shape, name)) for name in STATE_SIZES]


def copy_of(state: Any) -> Any:
    """A copy of a state, nothing shared."""
    return tree_map(lambda tensor: tensor.clone(), state)


def real_parts(shape: SchedulerShape, state: SchedulerState) -> dict[str, Tensor]:
    """Every tensor of a state without what nobody reads: dump places, table entries not owned."""
    rows, stores = shape.max_rows, shape.num_token_pages
    named = dict(zip(STATE_TENSORS, tree_leaves(state), strict=True))
    ends = {"ring": shape.ring_size, "tkey": shape.index_buckets, "tpage": shape.index_buckets}
    ends["free_token_pages"] = stores
    row_names = (*SchedulerState._fields[:13], "owned", "block_table", "token_table")
    ends |= dict.fromkeys(row_names, rows)
    cut = {name: tensor[: ends[name]] if name in ends else tensor for name, tensor in named.items()}
    column = torch.arange(shape.table_width, device=state.state.device)
    cut["block_table"] = torch.where(column < cut["owned"][:, None], cut["block_table"], 0)
    for name in ("token_pages", "chain"):  # the null token page takes masked lanes
        cut[name] = cut[name][1:]
    return cut


def assert_same_state(
    shape: SchedulerShape, expected: SchedulerState, found: SchedulerState, where: str
) -> None:
    """Fails naming every tensor that differs."""
    want, have = real_parts(shape, expected), real_parts(shape, found)
    lines = [f"{where}: the kernel differs from the dense form"]
    for name in want:
        dense, kernel = want[name].flatten(), have[name].flatten()
        at = (dense != kernel).nonzero().flatten()[:8]
        if at.numel():
            lines.append(f"  {name} {at.tolist()}: {dense[at].tolist()} != {kernel[at].tolist()}")
    assert len(lines) == 1, "\n".join(lines)


def new_record_ring(num_rows: int) -> list[Tensor]:
    """Tensors of a record ring filled with rubbish."""
    return [
        torch.full((RECORD_SLOTS, num_rows, 4), RUBBISH, dtype=torch.int64),
        torch.full((RECORD_SLOTS, NUM_COUNTS), RUBBISH, dtype=torch.int64),
        torch.zeros(RECORD_SLOTS, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
    ]


class CheckedAdvance:
    """`advance` by the kernel, checked against the dense form.

    Args:
        shape: sizes of the scheduler.
        block: threads, at least `max_rows`.
        order: of the emulated threads.
    """

    def __init__(self, shape: SchedulerShape, block: int = 32, order: int = 0) -> None:
        self.sizes = sizes_of(shape)
        self.kernel = Emulated("scheduler/advance.cu", block, order)
        self.ring = new_record_ring(shape.max_rows + 1)
        self.scratch = torch.empty(scratch_bytes(self.sizes), dtype=torch.uint8)
        self.num_steps = 0

    def __call__(
        self,
        shape: SchedulerShape,
        state: SchedulerState,
        plan: Plan,
        tokens: Tensor,
        count: Tensor,
        is_stop: Tensor,
    ) -> StepRecord:
        expected = copy_of(state)
        record = advance(shape, expected, plan, tokens, count, is_stop)
        args = advance_args(
            tree_leaves(state), plan, (tokens, is_stop), self.ring, self.scratch, self.sizes
        )
        self.kernel.launch("scheduler_advance", 1, args)
        where = f"step {self.num_steps}"
        assert_same_state(shape, expected, state, where)
        self._check_record(shape, record, where)
        self.num_steps += 1
        return record

    def _check_record(self, shape: SchedulerShape, record: StepRecord, where: str) -> None:
        rows, counts = pack(record)
        slot = self.num_steps % RECORD_SLOTS
        ring_rows, ring_counts, sequence, step_counter = self.ring
        assert torch.equal(ring_rows[slot, : shape.max_rows], rows[: shape.max_rows]), where
        assert torch.equal(ring_counts[slot], counts), (where, ring_counts[slot], counts)
        assert int(sequence[slot]) == int(step_counter) == self.num_steps + 1, where


def checked_layout(
    shape: SchedulerShape, state: SchedulerState, plan: Plan, num_tokens: int, block: int = 32
) -> StepInputs:
    """`layout` by the kernel, checked against the dense form."""
    expected = layout(shape, state, plan, num_tokens)
    before = copy_of(state)
    found = new_inputs(num_tokens, shape.max_rows, torch.device("cpu"))
    for tensor in found:
        tensor.fill_(RUBBISH)
    args = layout_args(tree_leaves(state), plan, found, sizes_of(shape))
    blocks = max(1, -(-num_tokens // block))
    Emulated("scheduler/layout.cu", block).launch("scheduler_layout", blocks, args)
    assert_same_state(shape, before, state, "layout")
    for name, want, have in zip(StepInputs._fields, expected, found, strict=True):
        assert want.dtype == have.dtype, name
        assert torch.equal(want, have), (name, want, have)
    return StepInputs(*found)


class CheckedAdmit:
    """`_admit` of the plan by the match and admit kernels, checked against the dense form."""

    def __init__(self, shape: SchedulerShape, block: int = 32, order: int = 0) -> None:
        self.dense = plan_module._admit
        self.sizes = sizes_of(shape)
        self.kernel = Emulated("scheduler/prefix_ops.cu", block, order)
        self.num_admitted = 0

    def __call__(
        self,
        shape: SchedulerShape,
        state: SchedulerState,
        group: GroupState,
        order: Tensor,
        budget: Tensor,
    ) -> Tensor:
        self._check_match(shape, state, order)
        expected = copy_of(state)
        want = self.dense(shape, expected, expected.groups[0], order, budget)
        admitted = self.run_admit(state, budget)
        assert_same_state(shape, expected, state, "admit")
        assert torch.equal(admitted, want), (admitted, want)
        self.num_admitted += int(want.sum())
        return want

    def run_admit(self, state: SchedulerState, budget: Tensor) -> Tensor:
        """The kernel: [R + 1] bool, admitted."""
        admitted = torch.ones(state.state.shape[0], dtype=torch.bool)
        args = admit_args(tree_leaves(state), budget, admitted, self.sizes)
        self.kernel.launch("scheduler_admit", 1, args)
        return admitted

    def run_match(self, state: SchedulerState, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The kernel: pages [A, P] and matched [A], i64."""
        width = state.groups[0].block_table.shape[1]
        matches = new_matches(rows.shape[0], width, rows.device)
        args = match_args(tree_leaves(state), rows, matches, self.sizes)
        self.kernel.launch("scheduler_prefix_match", 1, args)
        return matches

    def _check_match(self, shape: SchedulerShape, state: SchedulerState, order: Tensor) -> None:
        waiting = (state.state == WAITING) | (
            (state.state == RETRACTED) & (state.groups[0].owned == 0)
        )
        rank = ((order < order[:, None]) & waiting).sum(1)
        rows = first_rows(shape, waiting, rank, shape.num_candidates)
        want = match(shape, state, state.groups[0], rows)
        is_real = rows < shape.max_rows
        before = copy_of(state)
        pages, matched = self.run_match(state, rows)
        assert_same_state(shape, before, state, "match")
        assert torch.equal(matched, torch.where(is_real, want.matched, 0)), (matched, want)
        assert torch.equal(pages, torch.where(is_real[:, None], want.pages, 0)), (pages, want)


class CheckedPublish:
    """`publish` by its kernel, checked against the dense form; the list stands in the scratch."""

    def __init__(self, shape: SchedulerShape, block: int = 32, order: int = 0) -> None:
        self.dense = prefix_module.publish
        self.sizes = sizes_of(shape)
        self.kernel = Emulated("scheduler/prefix_ops.cu", block, order)
        self.scratch = torch.empty(scratch_bytes(self.sizes), dtype=torch.uint8)
        self.num_published = 0

    def __call__(
        self,
        shape: SchedulerShape,
        state: SchedulerState,
        group: GroupState,
        first: Tensor,
        last: Tensor,
    ) -> None:
        expected = copy_of(state)
        self.dense(shape, expected, expected.groups[0], first, last)
        self.run_publish(state, first, last)
        assert_same_state(shape, expected, state, "publish")
        self.num_published += int((last - first).clamp_min(0).sum())

    def run_publish(self, state: SchedulerState, first: Tensor, last: Tensor) -> None:
        """The kernel."""
        args = publish_args(tree_leaves(state), (first, last), self.scratch, self.sizes)
        self.kernel.launch("scheduler_prefix_publish", 1, args)
