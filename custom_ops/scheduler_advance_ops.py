"""Ops of the scheduler's second half on CUDA: layout, advance, and the prefix index's single steps.

The ops take the scheduler's state and plan as the lists of their tensors. They have no CPU form: on
a CPU the engine runs the dense form in `scheduler/` and `layout`, which these are tested against.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import scheduler_advance, scheduler_layout, scheduler_prefix
from compiled_engine.custom_ops.library import LIBRARY, NAMESPACE
from compiled_engine.custom_ops.scheduler_args import STATE_SIZES
from compiled_engine.custom_ops.scheduler_ops import check_sizes, launch

ADVANCE = "scheduler/advance.cu"
LAYOUT = "scheduler/layout.cu"
PREFIX = "scheduler/prefix_ops.cu"


def _size(sizes: list[int], name: str) -> int:
    return sizes[STATE_SIZES.index(name)]


def _define(schema: str, cuda: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


def _new_scratch(sizes: list[int], device: torch.device) -> Tensor:
    return torch.empty(scheduler_advance.scratch_bytes(sizes), dtype=torch.uint8, device=device)


def _advance(
    state: list[Tensor],
    plan: list[Tensor],
    tokens: Tensor,
    is_stop: Tensor,
    record: list[Tensor],
    sizes: list[int],
) -> None:
    check_sizes(sizes, max_pieces=0)
    device = tokens.device
    if not torch.cuda.is_current_stream_capturing():  # seen once before every capture
        _check_is_reachable(record)
    scratch = _new_scratch(sizes, device)
    args = scheduler_advance.advance_args(state, plan, (tokens, is_stop), record, scratch, sizes)
    block = scheduler_advance.block_of(sizes)
    launch(ADVANCE, "scheduler_advance", 1, args, device, block=block)


def _check_is_reachable(record: list[Tensor]) -> None:
    """Raises ValueError if the device cannot write a tensor of the ring."""
    for tensor in record:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            raise ValueError("scheduler_advance: the record must be in pinned memory or on the GPU")


# `record` is the ring in pinned memory and the step counter, as in `scheduler_advance`.
_define(
    "scheduler_advance(Tensor(a!)[] state, Tensor[] plan, Tensor tokens, Tensor is_stop, "
    "Tensor(b!)[] record, int[] sizes) -> ()",
    _advance,
    lambda *_: None,
)


def _new_inputs(
    state: list[Tensor], plan: list[Tensor], num_tokens: int, sizes: list[int]
) -> tuple[Tensor, ...]:
    max_rows = _size(sizes, "max_rows")
    return tuple(scheduler_layout.new_inputs(num_tokens, max_rows, state[0].device))


def _layout(
    state: list[Tensor], plan: list[Tensor], num_tokens: int, sizes: list[int]
) -> tuple[Tensor, ...]:
    check_sizes(sizes, max_pieces=0)
    inputs = _new_inputs(state, plan, num_tokens, sizes)
    args = scheduler_layout.layout_args(state, plan, inputs, sizes)
    launch(
        LAYOUT,
        "scheduler_layout",
        scheduler_layout.num_blocks(num_tokens),
        args,
        state[0].device,
        block=scheduler_layout.BLOCK,
        shared_bytes=scheduler_layout.shared_bytes(args.state.max_rows),
    )
    return inputs


_define(
    "scheduler_layout(Tensor[] state, Tensor[] plan, SymInt num_tokens, int[] sizes) -> ("
    + ", ".join(["Tensor"] * len(scheduler_layout.INPUT_TENSORS))
    + ")",
    _layout,
    _new_inputs,
)


def _launch_prefix(name: str, args: ctypes.Structure, device: torch.device) -> None:
    launch(PREFIX, name, 1, args, device, block=scheduler_advance.MAX_BLOCK)


def _new_matches(state: list[Tensor], rows: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    return scheduler_prefix.new_matches(rows.shape[0], _size(sizes, "table_width"), rows.device)


def _match(state: list[Tensor], rows: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    check_sizes(sizes, max_pieces=0)
    matches = _new_matches(state, rows, sizes)
    args = scheduler_prefix.match_args(state, rows, matches, sizes)
    _launch_prefix("scheduler_prefix_match", args, rows.device)
    return matches


# Tables of `rows` [A] i64, which own no pages, are scratch; unused places hold the dump row.
_define(
    "scheduler_prefix_match(Tensor(a!)[] state, Tensor rows, int[] sizes) -> (Tensor, Tensor)",
    _match,
    _new_matches,
)


def _new_admitted(state: list[Tensor], budget: Tensor, sizes: list[int]) -> Tensor:
    return torch.empty(state[0].shape[0], dtype=torch.bool, device=state[0].device)


def _admit(state: list[Tensor], budget: Tensor, sizes: list[int]) -> Tensor:
    check_sizes(sizes, max_pieces=0)
    admitted = _new_admitted(state, budget, sizes)
    args = scheduler_prefix.admit_args(state, budget, admitted, sizes)
    _launch_prefix("scheduler_admit", args, budget.device)
    return admitted


_define(
    "scheduler_admit(Tensor(a!)[] state, Tensor budget, int[] sizes) -> Tensor",
    _admit,
    _new_admitted,
)


def _publish(state: list[Tensor], first: Tensor, last: Tensor, sizes: list[int]) -> None:
    check_sizes(sizes, max_pieces=0)
    scratch = _new_scratch(sizes, first.device)
    args = scheduler_prefix.publish_args(state, (first, last), scratch, sizes)
    _launch_prefix("scheduler_prefix_publish", args, first.device)


_define(
    "scheduler_prefix_publish(Tensor(a!)[] state, Tensor first, Tensor last, int[] sizes) -> ()",
    _publish,
    lambda *_: None,
)
