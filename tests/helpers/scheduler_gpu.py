"""The scheduler's single operations on a GPU, each beside its dense form on the CPU.

Scheduler and traffic run on the CPU; every call of one operation is handed to its CUDA op as well,
on a copy of the state, and fails unless both leave the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Registers the ops.
import compiled_engine.custom_ops.scheduler_advance_ops  # noqa: F401
from compiled_engine.scheduler import advance as advance_module
from compiled_engine.scheduler import plan as plan_module
from compiled_engine.scheduler import prefix as prefix_module
from compiled_engine.scheduler.cuda import state_tensors
from compiled_engine.scheduler.state import GroupState, SchedulerShape, SchedulerState
from tests.helpers.emulated_scheduler import CheckedAdmit, CheckedPublish, sizes_of
from tests.helpers.scheduler_cuda import CheckedPageOps

PAGE_OPS = ("apply_inbox", "page_release", "page_take", "admit", "prefix_publish")


class GpuOps:
    """Calls ops on copies of CPU tensors, and copies the state back.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, shape: SchedulerShape, device: str = "cuda") -> None:
        self.sizes = sizes_of(shape)
        self.device = device
        self.num_calls = 0

    def call(self, name: str, state: SchedulerState, *rest: Any) -> Any:
        """Results on the CPU of `ce::scheduler_<name>`."""
        mine, arguments = self._copies((state, rest))
        op = getattr(torch.ops.ce, f"scheduler_{name}")
        results = op(state_tensors(mine), *arguments, self.sizes)
        for target, source in zip(tree_leaves(state), tree_leaves(mine), strict=True):
            target.copy_(source)
        self.num_calls += 1
        return None if results is None else tree_map(lambda tensor: tensor.cpu(), results)

    def _copies(self, tree: Any) -> Any:
        return tree_map(lambda tensor: tensor.to(self.device, copy=True), tree)


class GpuPageOps(CheckedPageOps):
    """Inbox, release and take."""

    def __init__(self, ops: GpuOps) -> None:
        self.ops = ops
        self.num_compactions = 0

    def _run(
        self, name: str, make: Any, shape: SchedulerShape, state: SchedulerState, *rest: Any
    ) -> None:
        if name == "page_release":
            (is_pending,) = rest
            is_pending.copy_(self.ops.call(name, state))
        else:
            self.ops.call(name, state, *rest)


class GpuAdmit(CheckedAdmit):
    """Match and admission."""

    def __init__(self, ops: GpuOps) -> None:
        self.dense = plan_module._admit
        self.ops = ops
        self.num_admitted = 0

    def run_admit(self, state: SchedulerState, budget: Tensor) -> Tensor:
        admitted: Tensor = self.ops.call("admit", state, budget)
        return admitted

    def run_match(self, state: SchedulerState, rows: Tensor) -> tuple[Tensor, Tensor]:
        pages, matched = self.ops.call("prefix_match", state, rows)
        return pages, matched


class GpuPublish(CheckedPublish):
    """Publication."""

    def __init__(self, ops: GpuOps) -> None:
        self.dense = prefix_module.publish
        self.ops = ops
        self.num_published = 0

    def run_publish(self, state: SchedulerState, first: Tensor, last: Tensor) -> None:
        self.ops.call("prefix_publish", state, first, last)


@contextmanager
def checked_op(name: str, state: SchedulerState, ops: GpuOps) -> Iterator[Any]:
    """Puts one of `PAGE_OPS` in the place of its dense form; gives what does it."""
    pages, admit, publish = GpuPageOps(ops), GpuAdmit(ops), GpuPublish(ops)

    def take(shape: SchedulerShape, group: GroupState, offset: Tensor, count: Tensor) -> None:
        pages.take(shape, state, offset, count)

    places: dict[str, tuple[Any, dict[str, Any]]] = {
        "apply_inbox": (plan_module, {"apply_inbox": pages.apply_inbox}),
        "page_release": (plan_module, {"release": pages.release}),
        "page_take": (plan_module, {"take": take, "compact": lambda *_: None}),
        "admit": (plan_module, {"_admit": admit}),
        "prefix_publish": (advance_module, {"publish": publish}),
    }
    module, replaced = places[name]
    with ExitStack() as stack:
        for attribute, function in replaced.items():
            stack.enter_context(mock.patch.object(module, attribute, function))
        yield {"admit": admit, "prefix_publish": publish}.get(name, pages)
