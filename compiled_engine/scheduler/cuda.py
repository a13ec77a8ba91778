"""The scheduler's first half on CUDA behind the dense form's own interface.

`schedule_plan` takes the place of `plan` on a GPU: the same state, the same results bit for bit, in
one kernel. Only what the dense form leaves undefined differs: the dump row, the dump places, and
table entries past a row's owned pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_engine.custom_ops.scheduler_args import STATE_SIZES
from compiled_engine.custom_ops.scheduler_ops import check_sizes
from compiled_engine.scheduler.inbox import Inbox
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState


def state_tensors(state: SchedulerState) -> list[Tensor]:
    """Every tensor of the state in the order of its kernels' struct; there is one group."""
    tensors: list[Tensor] = []
    for part in state:
        if isinstance(part, Tensor):
            tensors.append(part)
        else:
            (group,) = part
            tensors += group
    return tensors


def shape_sizes(shape: SchedulerShape) -> list[int]:
    """The sizes in the order of the kernels' struct."""
    return [int(getattr(shape, name)) for name in STATE_SIZES]


def schedule_plan(
    shape: SchedulerShape, state: SchedulerState, inbox: Inbox, budget: Tensor
) -> Plan:
    """What `scheduler.plan.plan` does, as one kernel; the result's tensors are fresh.

    The first call compiles and loads the kernel: it must not be captured into a graph.

    Raises:
        ValueError: a size is beyond the kernel's fixed arrays.
    """
    sizes = shape_sizes(shape)
    check_sizes(sizes, shape.max_pieces)
    return Plan(*torch.ops.ce.scheduler_plan(state_tensors(state), list(inbox), budget, sizes))
