"""Launcher of the CUDA C++ decode kernel: attention of single tokens over the paged cache.

One kernel a call: a block serves one lane of the work list and one KV head; what is cut between
lanes is finished by the block that has the last segment, which may wait for blocks before it: these
are placed first and wait for nobody behind them. Owns the variants of the kernel, its arguments and
its scratch. The kernel is `csrc/attention/decode.cu`; what it works on comes from `attention_work`.

What the kernel reads before it waits for the kernel in front of it (programmatic launch):

- the work list and the block table. All kernels between `plan_kernel` and this one may have been
  let in early, each when the one before it had begun, so none of them need be complete. But
  `plan_kernel` lets nobody in early: the next kernel begins when it has ended, and this one later
  still. Loads go past the first-level cache, which knows nothing of other multiprocessors.
- KV of earlier steps (`EARLY_END`). `plan_kernel` waits before it ends, so all that was enqueued
  before it, the whole step before included, is complete and visible: each kernel either waits in
  the same way or was launched without the attribute, so completion reaches back without a gap. This
  step's own KV is written by the kernel in front of this one, and is read after the wait.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_work import (
    GROUP_TILE,
    KV_TILE,
    LANE_FIELDS,
    SLOT_SIZE,
    UNIT_FIELDS,
    WorkShape,
)
from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)

SOURCE = "attention/decode.cu"
KERNEL = "decode_attention"
_LOG2E = 1.4426950408889634
_WARPS = 4
_CHUNK = 16
# more do not make it faster, and shared memory is left for the next kernel
_MOST_STAGES = 2

assert (LANE_FIELDS, UNIT_FIELDS) == (32, 16), "the kernel mirrors these records"


class DecodeArgs(ctypes.Structure):
    """Mirror of `DecodeArgs` in `csrc/attention/args.cuh`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "block_table", "work")),
        *((name, ctypes.c_void_p) for name in ("positions", "out", "partials", "sinks")),
        ("out_scale", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_stride", "q_token", "q_head")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("page_shift", "width", "kv_tile", "group_tile")),
        *((name, ctypes.c_int32) for name in ("lanes", "units", "members", "counters", "slots")),
        *((name, ctypes.c_int32) for name in ("window", "early", "prefetch", "is_early")),
        *((name, ctypes.c_float) for name in ("scale", "cap_in", "cap_out")),
    ]


@dataclass(frozen=True)
class CudaTuning:
    """Launch settings; None: what fits the call and the device.

    Attributes:
        stages: chunks of 16 positions that a warp has on their way.
        resident: blocks a multiprocessor, for which registers are left.
        early: chunks a warp copies before it waits for the kernel before, if its stages allow.
        prefetch: chunks of a shared prefix after those that it then asks L2 for.
        is_early: whether the next kernel may be placed before this one has waited.
    """

    stages: int | None = None
    resident: int = 2
    early: int = 3
    prefetch: int = 4
    is_early: bool = True


@dataclass(frozen=True)
class Options:
    """How scores are made, and the one scale (fp32 [1]) of results in e4m3."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    out_scale: Tensor | None = None


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for."""

    head_dim: int
    group: int
    stages: int
    resident: int
    has_groups: bool
    has_cap: bool
    is_half: bool
    is_quantized: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        return (
            f"-DHEAD_DIM={self.head_dim}",
            f"-DGROUP={self.group}",
            f"-DSTAGES={self.stages}",
            f"-DRESIDENT={self.resident}",
            f"-DHAS_GROUPS={int(self.has_groups)}",
            f"-DHAS_CAP={int(self.has_cap)}",
            f"-DHALF={int(self.is_half)}",
            f"-DQUANTIZED={int(self.is_quantized)}",
        )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return _shared_bytes(self.head_dim, self.group, self.stages)


def _head_tiles(group: int) -> int:
    return -(-group // 8)


def _shared_bytes(head_dim: int, group: int, stages: int) -> int:
    """As `shared_places` in `csrc/attention/args.cuh` divides them."""
    ring = _WARPS * stages * 2 * _CHUNK * (2 * head_dim + 16)
    sums = _WARPS * (group * (head_dim + 4) + 2 * 8 * _head_tiles(group)) * 4
    return ring + sums


@functools.cache
def _shared_limits(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory of a block at most, and of a multiprocessor."""
    properties = torch.cuda.get_device_properties(device)
    block = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return int(block), properties.shared_memory_per_multiprocessor


def _stages(head_dim: int, group: int, limits: tuple[int, int]) -> int:
    """Most stages with which two blocks share a multiprocessor; at least 1."""
    block, whole = limits
    for stages in range(_MOST_STAGES, 1, -1):
        size = _shared_bytes(head_dim, group, stages)
        if size <= block and 2 * (size + 1024) <= whole:
            return stages
    return 1


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    library = load_library(SOURCE, arch, cubin_dir(), variant.flags)
    return Kernel(
        library,
        KERNEL,
        block=_WARPS * 32,
        shared_bytes=variant.shared_bytes,
        is_dependent=int(arch.removeprefix("sm_").rstrip("a")) >= 90,
    )


class CudaDecode:
    """One call of the kernel, with its scratch.

    Args:
        q: [T, H, D] bf16 or fp16, last dim contiguous.
        caches: k and v [num_pages, page_size, H_kv, D] of the same dtype, contiguous.
        block_table: [rows, max_pages_per_row] int32.
        positions: [T] int64.
        work: the work list of `shape`; its counters and slots are used and left at 0.
        shape: its sizes.
        options: how scores are made.
        tuning: launch settings.
    """

    def __init__(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        block_table: Tensor,
        positions: Tensor,
        work: Tensor,
        shape: WorkShape,
        options: Options,
        *,
        tuning: CudaTuning | None = None,
    ) -> None:
        assert block_table.dtype == torch.int32, f"the block table is {block_table.dtype}"
        assert positions.dtype == torch.int64, f"positions are {positions.dtype}, not int64"
        assert not any(c.data_ptr() % 16 for c in caches), "the KV cache is not aligned to 16 bytes"
        assert q.shape[2] + 4 <= SLOT_SIZE, f"heads of {q.shape[2]} values have no slots"
        self.tuning = tuning or CudaTuning()
        # two values at a time are read
        is_paired = q.data_ptr() % 4 == q.stride(0) % 2 == q.stride(1) % 2 == 0
        self.q = q if is_paired else q.contiguous()
        self.caches = caches
        self.block_table = block_table
        self.positions = positions
        self.work = work
        self.shape = shape
        self.options = options
        self.sinks = None if options.sinks is None else options.sinks.float().contiguous()
        rows, heads, head_dim = shape.num_partial_rows, *q.shape[1:]
        # values, then the log2 of the sum of weights
        self.partials = torch.empty(rows, heads, head_dim + 4, dtype=torch.float32, device=q.device)

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return self.shape.num_lanes * self.shape.num_kv_heads

    def variant(self, limits: tuple[int, int]) -> Variant:
        """The compiled kernel that serves this call, with `limits` of shared memory."""
        shape, (_, heads, head_dim) = self.shape, self.q.shape
        group = heads // shape.num_kv_heads
        return Variant(
            head_dim=head_dim,
            group=group,
            stages=self.tuning.stages or _stages(head_dim, group, limits),
            resident=self.tuning.resident,
            has_groups=shape.max_group_units > 0,
            has_cap=self.options.soft_cap > 0,
            is_half=self.q.dtype == torch.float16,
            is_quantized=self.options.out_scale is not None,
        )

    def arguments(self, out: Tensor) -> DecodeArgs:
        """The kernel's argument."""
        options, shape, starts = self.options, self.shape, self.shape.starts
        names = ("lanes", "units", "members", "counters", "slots")
        cap = options.soft_cap
        return DecodeArgs(
            q=self.q.data_ptr(),
            k_cache=self.caches[0].data_ptr(),
            v_cache=self.caches[1].data_ptr(),
            block_table=self.block_table.data_ptr(),
            work=self.work.data_ptr(),
            positions=self.positions.data_ptr(),
            out=out.data_ptr(),
            partials=self.partials.data_ptr(),
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
            out_scale=None if options.out_scale is None else options.out_scale.data_ptr(),
            table_stride=self.block_table.stride(0),
            q_token=self.q.stride(0),
            q_head=self.q.stride(1),
            num_tokens=self.q.shape[0],
            num_kv_heads=shape.num_kv_heads,
            page_shift=self.caches[0].shape[1].bit_length() - 1,
            width=shape.members_per_tile,
            kv_tile=KV_TILE,
            group_tile=GROUP_TILE,
            window=options.window,
            early=self.tuning.early,
            prefetch=self.tuning.prefetch,
            is_early=self.tuning.is_early,
            scale=options.scale * _LOG2E,
            cap_in=options.scale / cap * 2 * _LOG2E if cap else 0.0,
            cap_out=cap * _LOG2E,
            **{name: starts[name] for name in names},
        )

    def launch(self, out: Tensor) -> None:
        """Writes the results of all candidates into `out` [T, H, D], and 0 for padding tokens."""
        variant = self.variant(_shared_limits(self.q.device))
        load_variant(variant, arch_of(self.q.device)).launch(self.grid, self.arguments(out))
