"""The second half of the scheduler by its CUDA kernels: layout, and advance with its record.

The same state and the same results bit for bit as `layout` and `advance` + `outbox.pack`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Registers the ops.
import compiled_engine.custom_ops.scheduler_advance_ops  # noqa: F401
from compiled_engine.layout import StepInputs
from compiled_engine.outbox import RecordRing
from compiled_engine.scheduler.cuda import shape_sizes, state_tensors
from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState


def schedule_layout(
    shape: SchedulerShape, state: SchedulerState, plan: Plan, num_tokens: int
) -> StepInputs:
    """What `layout.layout` does, as one kernel; the result's tensors are fresh.

    Raises:
        ValueError: more rows than the kernel holds.
    """
    made = torch.ops.ce.scheduler_layout(
        state_tensors(state), list(plan), num_tokens, shape_sizes(shape)
    )
    return StepInputs(*made)


def schedule_advance(
    shape: SchedulerShape,
    state: SchedulerState,
    plan: Plan,
    tokens: Tensor,
    is_stop: Tensor,
    ring: RecordRing,
) -> None:
    """What `scheduler.advance.advance` does, as one kernel that writes the record into `ring`.

    Every row of the plan that emits takes its token.

    Args:
        shape: static sizes.
        state: mutated in place.
        plan: what this step computed.
        tokens: [R + 1, 1] i32, sampled tokens.
        is_stop: [R + 1, 1] bool, the token ends the row.
        ring: of the `RingOutbox`.

    Raises:
        ValueError: more rows than the kernel holds.
    """
    assert tokens.shape[1] == is_stop.shape[1] == 1, "one token a row"
    torch.ops.ce.scheduler_advance(
        state_tensors(state), list(plan), tokens, is_stop, list(ring), shape_sizes(shape)
    )
