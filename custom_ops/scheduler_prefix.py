"""Arguments of the prefix index's single operations; mirrors `csrc/scheduler/prefix_ops.cu`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_engine.custom_ops.scheduler_args import StateArgs, fill, pointers, state_args


class MatchArgs(ctypes.Structure):
    """`MatchArgs` in prefix_ops.cu."""

    _fields_ = [("state", StateArgs), *pointers("rows", "pages", "matched")]


class AdmitArgs(ctypes.Structure):
    """`AdmitArgs` in prefix_ops.cu."""

    _fields_ = [("state", StateArgs), *pointers("budget", "admitted")]


class PublishArgs(ctypes.Structure):
    """`PublishArgs` in prefix_ops.cu."""

    _fields_ = [("state", StateArgs), *pointers("first", "last", "scratch")]


def new_matches(
    num_candidates: int, table_width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Uninitialised pages [A, P] and matched [A], i64; the kernel writes every element."""
    pages = torch.empty(num_candidates, table_width, dtype=torch.int64, device=device)
    return pages, torch.empty(num_candidates, dtype=torch.int64, device=device)


def match_args(
    state: Sequence[Tensor], rows: Tensor, matches: tuple[Tensor, Tensor], sizes: Sequence[int]
) -> MatchArgs:
    """The struct of the match kernel; `rows` [A] i64."""
    args = MatchArgs(state=state_args(state, sizes))
    fill(args, (rows, *matches), ("rows", "pages", "matched"))
    return args


def admit_args(
    state: Sequence[Tensor], budget: Tensor, admitted: Tensor, sizes: Sequence[int]
) -> AdmitArgs:
    """The struct of the admit kernel; `budget` i32 scalar, `admitted` [R + 1] bool."""
    args = AdmitArgs(state=state_args(state, sizes))
    fill(args, (budget, admitted), ("budget", "admitted"))
    return args


def publish_args(
    state: Sequence[Tensor], pages: tuple[Tensor, Tensor], scratch: Tensor, sizes: Sequence[int]
) -> PublishArgs:
    """The struct of the publish kernel; `pages` are first and last, [R + 1] i64 each."""
    args = PublishArgs(state=state_args(state, sizes))
    fill(args, (*pages, scratch), ("first", "last", "scratch"))
    return args
