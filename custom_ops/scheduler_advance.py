"""Arguments of the scheduler's second half: one kernel from sampled tokens to the step's record.

The record goes straight into a ring of pinned host memory, see `csrc/scheduler/advance.cuh`; who
owns the ring is `compiled_engine.outbox`. Mirrors that header's structs, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from compiled_engine.custom_ops.scheduler_args import (
    STATE_SIZES,
    PlanOutArgs,
    StateArgs,
    fill,
    plan_out_args,
    pointers,
    state_args,
)

RECORD_SLOTS = 64
RECORD_TENSORS = ("rows", "counts", "sequence", "step_counter")
MAX_BLOCK = 512  # more threads cost more at barriers than they save
PLACE_BYTES = 56  # of publish.cuh


class RecordRingArgs(ctypes.Structure):
    """`RecordRing` in advance.cuh."""

    _fields_ = pointers(*RECORD_TENSORS)


class AdvanceArgs(ctypes.Structure):
    """`AdvanceArgs` in advance.cuh."""

    _fields_ = [
        ("state", StateArgs),
        ("plan", PlanOutArgs),
        ("record", RecordRingArgs),
        *pointers("tokens", "is_stop", "scratch"),
    ]


def scratch_bytes(sizes: Sequence[int]) -> int:
    """Bytes of scratch memory the kernel needs for this scheduler."""
    return PLACE_BYTES * sizes[STATE_SIZES.index("max_publishes")]


def block_of(sizes: Sequence[int]) -> int:
    """Threads of the kernel's one block: a thread a row where that is enough."""
    return 256 if sizes[STATE_SIZES.index("max_rows")] <= 256 else MAX_BLOCK


def advance_args(
    state: Sequence[Tensor],
    plan: Sequence[Tensor],
    sampled: tuple[Tensor, Tensor],
    record: Sequence[Tensor],
    scratch: Tensor,
    sizes: Sequence[int],
) -> AdvanceArgs:
    """The kernel's struct; see the op's schema for the tensors."""
    args = AdvanceArgs()
    args.state = state_args(state, sizes)
    args.plan = plan_out_args(plan)
    fill(args.record, record, RECORD_TENSORS)
    fill(args, (*sampled, scratch), ("tokens", "is_stop", "scratch"))
    return args
