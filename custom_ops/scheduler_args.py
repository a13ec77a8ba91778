"""Arguments of the scheduler's CUDA kernels: C structs filled from tensors and sizes.

Mirrors the structs in `csrc/scheduler/`, field by field. A kernel takes one struct by value; the
structs hold addresses, so the tensors must outlive what was launched or captured with them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

# Tensors of the scheduler's state, in the order of its flattened NamedTuples.
STATE_TENSORS = (
    "state", "priority", "arrival", "gen", "salt", "num_prompt", "max_len", "grammar",
    "score_from",
    "num_tokens", "num_computed", "mask_pos", "pub_ok", "num_cached",
    "owned", "block_table", "ref", "uid", "parent_uid", "index_slot", "page_tokens",
    "ring", "ring_pos", "head", "tail", "uid_next", "tkey", "tpage", "num_free", "num_free_cached",
    "token_table", "token_pages", "chain", "free_token_pages", "num_free_token_pages",
    "place_steps", "num_retractions", "error",
)  # fmt: skip
# Sizes of the scheduler: attributes of `SchedulerShape`.
STATE_SIZES = (
    "max_rows", "num_pages", "page_size", "table_width", "max_tokens", "num_candidates",
    "max_releases", "index_buckets", "index_ways", "key_bits", "token_page_size",
    "num_token_pages", "token_table_width", "ring_size", "max_publishes", "prefix_caching",
    "vocab_size",
)  # fmt: skip
PLAN_TENSORS = (
    "give", "emit", "rank", "victim", "admitted", "num_tokens", "wanted", "num_unserved",
)  # fmt: skip
INBOX_TENSORS = ("submits", "pieces", "piece_tokens", "aborts", "masks", "forced_tokens")
INBOX_SIZES = ("max_submits", "max_pieces", "max_aborts", "max_masks", "max_forced")
# Fixed arrays in the kernels' shared memory; see csrc/scheduler/.
LIMITS = {"num_candidates": 256, "max_releases": 256, "max_pieces": 256, "max_rows": 4096}
_ROW_BYTES = 32  # kRowBytes in rows.cuh


def pointers(*names: str) -> list[tuple[str, type]]:
    """Struct fields for tensors."""
    return [(name, ctypes.c_void_p) for name in names]


def sizes(*names: str) -> list[tuple[str, type]]:
    """Struct fields for int32 numbers."""
    return [(name, ctypes.c_int32) for name in names]


class StateArgs(ctypes.Structure):
    """`State` in common.cuh."""

    _fields_ = [*pointers(*STATE_TENSORS), *sizes(*STATE_SIZES)]


class PlanOutArgs(ctypes.Structure):
    """`PlanOut` in common.cuh."""

    _fields_ = pointers(*PLAN_TENSORS)


class InboxArgs(ctypes.Structure):
    """`Inbox` in inbox.cuh."""

    _fields_ = [*pointers(*INBOX_TENSORS), *sizes(*INBOX_SIZES)]


class ReleaseArgs(ctypes.Structure):
    """`ReleaseArgs` in page_ops.cu."""

    _fields_ = [("state", StateArgs), *pointers("is_pending")]


class TakeArgs(ctypes.Structure):
    """`TakeArgs` in page_ops.cu."""

    _fields_ = [("state", StateArgs), *pointers("offset", "count")]


class ApplyInboxArgs(ctypes.Structure):
    """`ApplyInboxArgs` in page_ops.cu."""

    _fields_ = [("state", StateArgs), ("inbox", InboxArgs)]


class PlanArgs(ctypes.Structure):
    """`PlanArgs` in plan.cu."""

    _fields_ = [
        ("state", StateArgs),
        ("inbox", InboxArgs),
        ("plan", PlanOutArgs),
        *pointers("budget"),
    ]


def fill(struct: ctypes.Structure, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Sets the fields `names` to the addresses of `tensors`, which must be contiguous."""
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        setattr(struct, name, tensor.data_ptr())


def state_args(tensors: Sequence[Tensor], values: Sequence[int]) -> StateArgs:
    """The state's struct from its flattened tensors and sizes."""
    struct = StateArgs()
    fill(struct, tensors, STATE_TENSORS)
    for name, value in zip(STATE_SIZES, values, strict=True):
        setattr(struct, name, value)
    return struct


def plan_out_args(tensors: Sequence[Tensor]) -> PlanOutArgs:
    """The plan's struct from its tensors."""
    struct = PlanOutArgs()
    fill(struct, tensors, PLAN_TENSORS)
    return struct


def inbox_args(tensors: Sequence[Tensor]) -> InboxArgs:
    """The inbox's struct from its tensors."""
    struct = InboxArgs()
    fill(struct, tensors, INBOX_TENSORS)
    submits, pieces, _, aborts, masks, forced = tensors
    lengths = [table.shape[0] for table in (submits, pieces, aborts, masks)]
    for name, size in zip(INBOX_SIZES, (*lengths, forced.shape[1]), strict=True):
        setattr(struct, name, size)
    return struct


def plan_args(
    state: Sequence[Tensor],
    inbox: Sequence[Tensor],
    budget: Tensor,
    values: Sequence[int],
    out: Sequence[Tensor],
) -> PlanArgs:
    """The struct of the `scheduler_plan` kernel."""
    struct = PlanArgs(state_args(state, values), inbox_args(inbox), plan_out_args(out))
    fill(struct, [budget], ["budget"])
    return struct


def release_args(state: Sequence[Tensor], is_pending: Tensor, values: Sequence[int]) -> ReleaseArgs:
    """The struct of `scheduler_page_release`; `is_pending` is a bool scalar it writes."""
    struct = ReleaseArgs(state_args(state, values))
    fill(struct, [is_pending], ["is_pending"])
    return struct


def take_args(
    state: Sequence[Tensor], offset: Tensor, count: Tensor, values: Sequence[int]
) -> TakeArgs:
    """The struct of `scheduler_page_take`; both tensors are [R + 1] i32."""
    struct = TakeArgs(state_args(state, values))
    fill(struct, [offset, count], ["offset", "count"])
    return struct


def apply_inbox_args(
    state: Sequence[Tensor], inbox: Sequence[Tensor], values: Sequence[int]
) -> ApplyInboxArgs:
    """The struct of `scheduler_apply_inbox`."""
    return ApplyInboxArgs(state_args(state, values), inbox_args(inbox))


def rows_shared_bytes(max_rows: int) -> int:
    """Dynamic shared memory of kernels that order rows."""
    return -(-max_rows // 32) * 32 * _ROW_BYTES


def new_plan_out(num_rows: int, device: torch.device) -> list[Tensor]:
    """Uninitialised plan tensors for `num_rows` = R + 1; the kernel writes every element."""

    def row(dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, dtype=dtype, device=device)

    def scalar() -> Tensor:
        return torch.empty((), dtype=torch.int32, device=device)

    return [
        row(torch.int32), row(torch.bool), row(torch.int32), scalar(),
        row(torch.bool), scalar(), scalar(), scalar(),
    ]  # fmt: skip
