"""Arguments and launcher of the layout kernel; mirrors `csrc/scheduler/layout.cu`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_engine.custom_ops.scheduler_args import (
    PlanOutArgs,
    StateArgs,
    fill,
    plan_out_args,
    pointers,
    sizes,
    state_args,
)

INPUT_TENSORS = (
    "token_ids", "positions", "token_rows", "slot_mapping",
    "seq_rows", "seq_lens", "query_start_loc", "logits_indices",
)  # fmt: skip
BLOCK = 256


class LayoutArgs(ctypes.Structure):
    """`LayoutArgs` in layout.cu."""

    _fields_ = [
        ("state", StateArgs),
        ("plan", PlanOutArgs),
        *pointers(*INPUT_TENSORS),
        *sizes("num_tokens"),
    ]


def new_inputs(num_tokens: int, max_rows: int, device: torch.device) -> list[Tensor]:
    """Uninitialised outputs; the kernel writes every element."""

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    tokens = [empty(num_tokens, torch.int64) for _ in range(4)]
    rows, lengths = empty(max_rows, torch.int32), empty(max_rows, torch.int32)
    return [
        *tokens, rows, lengths, empty(max_rows + 1, torch.int32), empty(max_rows, torch.int64)
    ]  # fmt: skip


def layout_args(
    state: Sequence[Tensor], plan: Sequence[Tensor], inputs: Sequence[Tensor], values: Sequence[int]
) -> LayoutArgs:
    """The kernel's struct; `values` are the state's sizes."""
    args = LayoutArgs()
    args.state = state_args(state, values)
    args.plan = plan_out_args(plan)
    fill(args, inputs, INPUT_TENSORS)
    args.num_tokens = inputs[0].shape[0]
    return args


def num_blocks(num_tokens: int) -> int:
    """Blocks that lay out `num_tokens` tokens; the first always runs."""
    return max(1, -(-num_tokens // BLOCK))


def shared_bytes(max_rows: int) -> int:
    """Dynamic shared memory of a block: four arrays over the rows."""
    return 16 * max_rows
