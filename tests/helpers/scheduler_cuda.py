"""The first half of the scheduler's CUDA kernels on CPU tensors, beside the dense form.

`CheckedPlan` stands in for `plan` in a `TensorEngine`, `CheckedPageOps` for the page operations
inside the dense plan: each runs the dense form on a copy of the state and the emulated kernel on
guarded memory, and fails unless both leave the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from compiled_engine.custom_ops import scheduler_args as args
from compiled_engine.scheduler import inbox as inbox_module
from compiled_engine.scheduler import pages as pages_module
from compiled_engine.scheduler import plan as plan_module
from compiled_engine.scheduler.inbox import Inbox
from compiled_engine.scheduler.plan import Plan, plan
from compiled_engine.scheduler.state import (
    BLOCKED,
    DECODE,
    GroupState,
    SchedulerShape,
    SchedulerState,
)
from tests.helpers.cuda_emulator import Emulated
from tests.helpers.emulated_scheduler import (
    CheckedAdvance,
    assert_same_state,
    copy_of,
    sizes_of,
)

GUARD = 64  # elements before and behind each tensor
RUBBISH = 85


class Guarded:
    """A copy of tensors (any nest of tuples) between poisoned elements that nobody may touch."""

    def __init__(self, tensors: Any) -> None:
        self._buffers: list[Tensor] = []
        self.tensors = tree_map(self._copy, tensors)

    def _copy(self, tensor: Tensor) -> Tensor:
        buffer = torch.empty(tensor.numel() + 2 * GUARD, dtype=tensor.dtype)
        buffer.view(torch.uint8).fill_(RUBBISH)
        self._buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(tensor.shape).copy_(tensor)

    def check(self) -> None:
        """Fails if an element outside a tensor was written."""
        for buffer in self._buffers:
            for guard in (buffer[:GUARD], buffer[-GUARD:]):
                assert bool((guard.view(torch.uint8) == RUBBISH).all()), buffer.shape


class CheckedPlan:
    """`plan` by the kernel, checked against the dense form.

    Args:
        block: threads of the block.
        order: in which they run; a seed above 1 grows with every call.
    """

    def __init__(self, block: int = 64, order: int = 0) -> None:
        self.kernel = Emulated("scheduler/plan.cu", block=block, order=order)
        self.num_steps = 0

    def __call__(
        self, shape: SchedulerShape, state: SchedulerState, inbox: Inbox, budget: Tensor
    ) -> Plan:
        expected_state = copy_of(state)
        expected = plan(shape, expected_state, inbox, budget)
        guarded = Guarded((state, tuple(inbox)))
        mine, my_inbox = guarded.tensors
        found = run_plan(self.kernel, shape, mine, my_inbox, budget)
        guarded.check()
        where = f"plan {self.num_steps}"
        for name, want, have in zip(Plan._fields, expected, found, strict=True):
            assert want.dtype == have.dtype, f"{where} {name}: {want.dtype} {have.dtype}"
            assert torch.equal(want, have), f"{where} {name}: {want} {have}"
        assert_same_state(shape, expected_state, mine, where)
        for target, source in zip(tree_leaves(state), tree_leaves(mine), strict=True):
            target.copy_(source)
        self.num_steps += 1
        self.kernel.order += self.kernel.order > 1
        return found


def run_plan(
    kernel: Emulated, shape: SchedulerShape, state: SchedulerState, inbox: Any, budget: Tensor
) -> Plan:
    """Runs the kernel on CPU tensors, in place."""
    out = args.new_plan_out(shape.max_rows + 1, budget.device)
    for tensor in out:
        tensor.fill_(RUBBISH)
    struct = args.plan_args(tree_leaves(state), list(inbox), budget, sizes_of(shape), out)
    kernel.launch("scheduler_plan", 1, struct)
    return Plan(*out)


def checked_advance(shape: SchedulerShape) -> CheckedAdvance:
    """`advance` by its kernel with as few threads as its rows allow."""
    return CheckedAdvance(shape, block=-(-shape.max_rows // 32) * 32)


class CheckedPageOps:
    """The dense plan's inbox, release, take and compact by their kernels, each checked.

    Patch the names of `scheduler.plan` with the four methods.
    """

    def __init__(self, block: int = 32, order: int = 0) -> None:
        self.kernel = Emulated("scheduler/page_ops.cu", block=block, order=order)
        self.num_compactions = 0

    def apply_inbox(self, shape: SchedulerShape, state: SchedulerState, inbox: Inbox) -> None:
        """`inbox.apply_inbox`; the kernel leaves unblocking rows to the plan."""
        expected = copy_of(state)
        inbox_module.apply_inbox(shape, expected, inbox)
        before = state.state.clone()
        self._run("apply_inbox", args.apply_inbox_args, shape, state, list(inbox))
        missing = state.grammar & (state.mask_pos < state.num_tokens)
        state.state.masked_fill_((state.state == BLOCKED) & ~missing, DECODE)
        state.state[-1] = before[-1]
        assert_same_state(shape, expected, state, "inbox")

    def release(self, shape: SchedulerShape, state: SchedulerState, group: GroupState) -> Tensor:
        """`pages.release`."""
        expected = copy_of(state)
        want = pages_module.release(shape, expected, expected.groups[0])
        is_pending = torch.ones((), dtype=torch.bool)
        self._run("page_release", args.release_args, shape, state, is_pending)
        assert_same_state(shape, expected, state, "release")
        assert torch.equal(is_pending, want)
        return is_pending

    def take(
        self,
        shape: SchedulerShape,
        state: SchedulerState,
        offset: Tensor,
        count: Tensor,
    ) -> None:
        """`pages.take` and then `pages.compact`."""
        expected = copy_of(state)
        (group,) = expected.groups
        pages_module.take(shape, group, offset, count)
        head = int(group.head)
        pages_module.compact(shape, group)
        self.num_compactions += int(group.head) != head
        self._run("page_take", args.take_args, shape, state, offset, count)
        assert_same_state(shape, expected, state, "take")

    def _run(
        self, name: str, make: Any, shape: SchedulerShape, state: SchedulerState, *rest: Any
    ) -> None:
        guarded = Guarded(state)
        struct = make(tree_leaves(guarded.tensors), *rest, sizes_of(shape))
        self.kernel.launch(f"scheduler_{name}", 1, struct)
        guarded.check()
        for target, source in zip(tree_leaves(state), tree_leaves(guarded.tensors), strict=True):
            target.copy_(source)


@contextmanager
def page_kernels(state: SchedulerState, ops: CheckedPageOps) -> Iterator[None]:
    """Puts the kernels in the place of the dense plan's own page operations."""

    def take(shape: SchedulerShape, group: GroupState, offset: Tensor, count: Tensor) -> None:
        ops.take(shape, state, offset, count)

    with (
        mock.patch.object(plan_module, "apply_inbox", ops.apply_inbox),
        mock.patch.object(plan_module, "release", ops.release),
        mock.patch.object(plan_module, "take", take),
        mock.patch.object(plan_module, "compact"),
    ):
        yield
