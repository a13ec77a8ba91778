"""Launcher of the `fused_linear` kernel for 9 to 128 tokens on Hopper.

A tile of 64 to 256 rows of the weight streams through shared memory once, for all tokens; see
`csrc/gemm_wide/wide.cu`. Where rows are few, blocks of threads divide the columns of a tile and
leave sums for each other in a scratch of the device, so launches of one device must follow each
other, as they do on one stream. A norm in front is a kernel of its own.

Owns the variants of the kernel, its arguments and the scratch. When it is the fastest kernel, and
with which sizes, is known to `gemm_choice`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.gemm_skinny import Operands, WideConfig, num_multiprocessors
from compiled_engine.custom_ops.registry import Traits
from compiled_engine.custom_ops.tensor_maps import MAP_BYTES, Boxes, encode_boxes

SOURCE = "gemm_wide/wide.cu"
KERNEL = "wide_product"
MIN_TOKENS, MAX_TOKENS = 9, 128  # of fewer, other kernels are faster
PADDED_TOKENS = (16, 32, 64, 96, 128)
# Of shared memory, of one block of threads at most.
MAX_SHARED_BYTES = 232448
# Sums that the blocks of one launch may leave for each other.
MAX_PARTIALS = 1 << 22
_SLAB = 64  # columns of a box
_PANEL = 64  # rows of a warpgroup


class WideArgs(ctypes.Structure):
    """Mirror of `WideArgs` in `csrc/gemm_wide/args.cuh`; the maps are aligned to 64 bytes there."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint8 * MAP_BYTES) for name in ("weight", "x")),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "out", "partials")),
        ("residual_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_outputs", "num_blocks")),
        *((name, ctypes.c_int32) for name in ("num_tiles", "is_paired")),
        ("padding", ctypes.c_int32),
    ]


def padded_tokens(num_tokens: int) -> int:
    """The tokens that the kernel computes for `num_tokens`."""
    return next(tokens for tokens in PADDED_TOKENS if num_tokens <= tokens)


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for; `tokens` are padded."""

    config: WideConfig
    tokens: int
    is_gated: bool
    is_half: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        config = self.config
        values = {
            "WARPGROUPS": config.warpgroups,
            "TOKENS": self.tokens,
            "SLABS": config.slabs,
            "STAGES": self.stages,
            "SPLIT": config.split,
            "GATED": self.is_gated,
            "HALF": self.is_half,
        }
        return tuple(f"-D{name}={int(value)}" for name, value in values.items())

    @property
    def stages(self) -> int:
        """Blocks of columns in shared memory: as many as there is room for."""
        return MAX_SHARED_BYTES // (self._stage_bytes + 16)

    @property
    def _stage_bytes(self) -> int:
        rows = _PANEL * self.config.warpgroups
        return (rows + self.tokens) * self.config.slabs * _SLAB * 2

    @property
    def num_threads(self) -> int:
        """Of a block: those that multiply, and a warp that loads."""
        return 128 * self.config.warpgroups + 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `csrc/gemm_wide/args.cuh` divides it."""
        return self.stages * (self._stage_bytes + 16)


def why_not_made(config: WideConfig) -> str | None:
    """Why the kernel cannot be made with these sizes."""
    rules = (
        (1 <= config.warpgroups <= 4, "1 to 4 warpgroups"),
        (config.slabs in (1, 2), "1 or 2 slabs"),
        (config.split >= 1, "at least one part"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def variant_of(operands: Operands, config: WideConfig) -> Variant:
    """The compiled kernel that serves these arguments."""
    return Variant(
        config=config,
        tokens=padded_tokens(operands.x.shape[0]),
        is_gated=operands.is_gated,
        is_half=operands.x.dtype == torch.float16,
    )


def weight_boxes(operands: Operands, config: WideConfig) -> Boxes:
    """Boxes of a tile's rows; gated: 8 rows of the gate, the 8 of their values, and so on."""
    weight, outputs = operands.weight, operands.num_outputs
    num_rows, size = weight.shape
    row, rows = size * 2, _PANEL * config.warpgroups
    is_half = weight.dtype == torch.float16
    if not operands.is_gated:
        return Boxes(weight.data_ptr(), (size, num_rows), (row,), (_SLAB, rows), is_half)
    assert outputs % 8 == 0, f"{outputs} outputs are gated, not a multiple of 8"
    sizes, strides = (size, 8, 2, outputs // 8), (row, outputs * row, 8 * row)
    return Boxes(weight.data_ptr(), sizes, strides, (_SLAB, 8, 2, rows // 16), is_half)


def x_boxes(x: Tensor) -> Boxes:
    """Boxes of all tokens."""
    num_tokens, size = x.shape
    box = (_SLAB, padded_tokens(num_tokens))
    strides = (x.stride(0) * 2,)
    return Boxes(x.data_ptr(), (size, num_tokens), strides, box, x.dtype == torch.float16)


@functools.lru_cache(maxsize=4096)
def _encode_kept(boxes: Boxes) -> bytes:
    """As `encode_boxes`; what it says depends on nothing but the boxes."""
    return encode_boxes(boxes)


def num_tiles(rows: int, config: WideConfig) -> int:
    """Tiles of a weight with so many rows."""
    return -(-rows // (_PANEL * config.warpgroups))


def num_blocks_of_threads(rows: int, config: WideConfig, num_processors: int) -> int:
    """Blocks of a launch: as many as there is work for, or as run at once.

    All parts of a tile are in different blocks, or the first would wait for the last for ever.
    """
    assert config.split <= num_processors, (config, num_processors)
    return min(num_tiles(rows, config) * config.split, num_processors)


def num_partials(rows: int, tokens: int, config: WideConfig) -> int:
    """Sums that the parts of all tiles leave for each other, for so many padded tokens."""
    if config.split == 1:
        return 0
    return num_tiles(rows, config) * config.split * tokens * _PANEL * config.warpgroups


@functools.cache
def _scratch(device: torch.device) -> Tensor:
    """fp32 with all bits set, and so left by every kernel; shared by all of a device.

    Raises:
        RuntimeError: asked for the first time while a CUDA graph is captured, which would take it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("fused_linear: run it once before a CUDA graph with it is captured")
    return make_scratch(device)


def make_scratch(device: torch.device) -> Tensor:
    """What `arguments` takes: [MAX_PARTIALS] fp32."""
    absent = torch.full((MAX_PARTIALS,), -1, dtype=torch.int32, device=device)
    return absent.view(torch.float32)


def arguments(
    operands: Operands,
    out: Tensor,
    config: WideConfig,
    scratch: Tensor,
    encode: Callable[[Boxes], bytes] = _encode_kept,
) -> WideArgs:
    """The kernel's argument, for operands without a norm; `out` [T, num_outputs], contiguous."""
    x, weight, bias, norm_weight, _, residual, _ = operands
    assert norm_weight is None, "the norm is a kernel of its own"
    assert MIN_TOKENS <= x.shape[0] <= MAX_TOKENS, x.shape
    assert out.shape == (x.shape[0], operands.num_outputs), out.shape
    assert out.is_contiguous(), out.stride()
    tokens = padded_tokens(x.shape[0])
    reason = why_not_made(config)
    assert reason is None, f"{config}: {reason}"
    num_blocks = -(-weight.shape[1] // (_SLAB * config.slabs))
    assert num_blocks >= config.split, (num_blocks, config)
    others = [out] if residual is None else [out, residual]
    rows = weight.shape[0]
    assert num_partials(rows, tokens, config) <= MAX_PARTIALS, (rows, tokens, config)

    def encoded(boxes: Boxes) -> ctypes.Array[ctypes.c_uint8]:
        return (ctypes.c_uint8 * MAP_BYTES).from_buffer_copy(encode(boxes))

    return WideArgs(
        weight=encoded(weight_boxes(operands, config)),
        x=encoded(x_boxes(x)),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        partials=scratch.data_ptr(),
        residual_stride=0 if residual is None else residual.stride(0),
        num_tokens=x.shape[0],
        num_outputs=operands.num_outputs,
        num_blocks=num_blocks,
        num_tiles=num_tiles(rows, config),
        is_paired=all(t.stride(0) % 2 == t.data_ptr() % 4 == 0 for t in others),
    )


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    library = load_library(SOURCE, arch, cubin_dir(), variant.flags)
    return Kernel(
        library,
        KERNEL,
        block=variant.num_threads,
        shared_bytes=variant.shared_bytes,
        is_dependent=True,
    )


def launch_wide(operands: Operands, out: Tensor, config: WideConfig) -> None:
    """Runs the kernel on the current stream, for operands without a norm."""
    device = operands.x.device
    kernel = load_variant(variant_of(operands, config), arch_of(device))
    blocks = num_blocks_of_threads(operands.weight.shape[0], config, num_multiprocessors(device))
    kernel.launch(blocks, arguments(operands, out, config, _scratch(device)))


def wide_rejects(traits: Traits) -> str | None:
    """What the kernel cannot take; traits: those of `gemm.fused_linear_traits`."""
    num_tokens, size, outputs = traits["num_tokens"], traits["size"], traits["rows"] // 2
    is_even = not traits["is_gated"] or outputs % 8 == 0
    rules = (
        (
            MIN_TOKENS <= num_tokens <= MAX_TOKENS,
            f"takes {MIN_TOKENS} to {MAX_TOKENS} tokens, not {num_tokens}",
        ),
        (traits["has_one_dtype"], "needs the same dtype for all tensors"),
        (traits["is_weight_contiguous"], "needs a contiguous weight"),
        (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        (traits["is_aligned"], "needs rows of x and weights at multiples of 16 bytes"),
        (size % 8 == 0, f"needs a multiple of 8 columns, these are {size}"),
        (is_even, f"needs a multiple of 8 gated outputs, not {outputs}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)
