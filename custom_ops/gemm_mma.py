"""Launcher of the `fused_linear` kernel in CUDA C++, for up to 32 tokens on tensor cores.

A tile may have any multiple of 16 rows of the weight, so that every multiprocessor gets an equal
share of them in one stretch; see `csrc/gemm_mma/mma.cu`. The kernel keeps no state between calls
and has no scratch. Below compute capability 9.0 it copies without the tensor memory accelerator.

Owns the variants of the kernel and its arguments. When it is the fastest kernel, and with which
sizes, is known to `gemm_choice`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.gemm_skinny import MmaConfig, Operands
from compiled_engine.custom_ops.registry import Traits
from compiled_engine.custom_ops.tensor_maps import MAP_BYTES, Boxes, encode_boxes

SOURCE = "gemm_mma/mma.cu"
KERNEL = "few_tokens_product"
NUM_THREADS = 160
MAX_TOKENS = 32
# Of a tile: as many as a box of the copy engine may have.
MAX_ROWS = 256
# Of shared memory, of one block of threads at most.
MAX_SHARED_BYTES = 232448
_WARPS = 4  # that multiply
_SLAB = 64  # columns of a box
_OTHER_REGISTERS = 44  # of a thread, beside sums and values of x
_LANE_REGISTERS = 512  # of a lane, in each of the four parts of a multiprocessor
_PROCESSOR_BYTES = 233472  # of shared memory
_RESERVED_BYTES = 1024  # of it, for each block of threads


class MmaArgs(ctypes.Structure):
    """Mirror of `MmaArgs` in `csrc/gemm_mma/args.cuh`; the map is aligned to 64 bytes there."""

    _fields_: ClassVar = [
        ("map", ctypes.c_uint8 * MAP_BYTES),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "norm_weight")),
        *((name, ctypes.c_void_p) for name in ("residual", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_outputs", "size")),
        *((name, ctypes.c_int32) for name in ("lead", "stagger")),
        ("eps", ctypes.c_float),
        ("padding", ctypes.c_int32 * 10),
    ]


def why_not_made(config: MmaConfig) -> str | None:
    """Why the kernel cannot be made with these sizes."""
    row_warps = _WARPS // config.k_warps
    rules = (
        (config.k_warps in (1, 2, 4), "k_warps of 1, 2 or 4"),
        (config.rows % (16 * row_warps) == 0, f"rows in {row_warps} parts of 16"),
        (config.rows <= MAX_ROWS, f"more than {MAX_ROWS} rows"),
        (config.block % _SLAB == 0, f"blocks of {_SLAB} columns"),
        (config.block % (32 * config.k_warps) == 0, f"blocks in {config.k_warps} parts of 32"),
        (2 <= config.x_stages <= config.stages, "2 <= x_stages <= stages"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for; `tokens` are padded.

    `has_whole_slabs`: the columns are a multiple of those of a box.
    """

    config: MmaConfig
    tokens: int
    is_gated: bool
    has_residual: bool
    is_half: bool
    has_norm: bool
    has_whole_slabs: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        config = self.config
        values = {
            "ROWS": config.rows,
            "TOKENS": self.tokens,
            "BLOCK": config.block,
            "K_WARPS": config.k_warps,
            "STAGES": config.stages,
            "X_STAGES": config.x_stages,
            "GATED": self.is_gated,
            "WHOLE_SLABS": self.has_whole_slabs,
            "RESIDENT": self.resident,
            "HAS_NORM": self.has_norm,
            "HAS_RESIDUAL": self.has_residual,
            "HALF": self.is_half,
        }
        return tuple(f"-D{name}={int(value)}" for name, value in values.items())

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `csrc/gemm_mma/args.cuh` divides it."""
        config, tokens = self.config, self.tokens
        x_rows = tokens + self.has_norm
        rings = (config.stages * config.rows + config.x_stages * x_rows) * config.block * 2
        barriers = 8 * (2 * config.stages + config.x_stages)
        return rings + config.k_warps * tokens * 4 + barriers

    @property
    def resident(self) -> int:
        """Blocks of threads for which a multiprocessor has shared memory and registers."""
        config = self.config
        groups = config.rows // 16 * config.k_warps // _WARPS
        needed = self.tokens // 2 * (groups + 1 + self.has_norm) + _OTHER_REGISTERS
        count = _PROCESSOR_BYTES // (self.shared_bytes + _RESERVED_BYTES)
        while count > 1 and _LANE_REGISTERS // -(-count * NUM_THREADS // 128) < needed:
            count -= 1
        return max(1, count)


def padded_tokens(num_tokens: int) -> int:
    """The tokens that the kernel computes for `num_tokens`."""
    return max(8, -(-num_tokens // 8) * 8)


def num_tiles(rows: int, config: MmaConfig) -> int:
    """Tiles of a weight with so many rows; gated ones too, they take `config.rows` of them."""
    return -(-rows // config.rows)


def variant_of(operands: Operands, config: MmaConfig) -> Variant:
    """The compiled kernel that serves these arguments."""
    size = operands.weight.shape[1]
    return Variant(
        config=replace(config, lead=0, stagger=0),
        tokens=padded_tokens(operands.x.shape[0]),
        is_gated=operands.is_gated,
        has_residual=operands.residual is not None,
        is_half=operands.x.dtype == torch.float16,
        has_norm=operands.norm_weight is not None,
        has_whole_slabs=size % _SLAB == 0,
    )


def weight_boxes(operands: Operands, config: MmaConfig) -> Boxes:
    """Boxes of a tile's rows: [slab, half, row, column], halves of a gated weight.

    All slabs of a block, if the columns can be divided into slabs; or else one.
    """
    weight, num_outputs = operands.weight, operands.num_outputs
    size = weight.shape[1]
    halves = 2 if operands.is_gated else 1
    is_whole = size % _SLAB == 0
    columns, slabs = (_SLAB, size // _SLAB) if is_whole else (size, 1)
    row_bytes = size * 2
    return Boxes(
        address=weight.data_ptr(),
        sizes=(columns, num_outputs, halves, slabs),
        strides=(row_bytes, num_outputs * row_bytes, _SLAB * 2),
        box=(_SLAB, config.rows // halves, halves, config.block // _SLAB if is_whole else 1),
        is_half=weight.dtype == torch.float16,
    )


@functools.lru_cache(maxsize=4096)
def _encode_kept(boxes: Boxes) -> bytes:
    """As `encode_boxes`; what it says depends on nothing but the boxes."""
    return encode_boxes(boxes)


def _no_boxes(boxes: Boxes) -> bytes:
    """For a GPU without the copy engine."""
    return bytes(MAP_BYTES)


def arguments(
    operands: Operands,
    out: Tensor,
    config: MmaConfig,
    encode: Callable[[Boxes], bytes] = _encode_kept,
) -> MmaArgs:
    """The kernel's argument; `out` [T, num_outputs], contiguous."""
    x, weight, bias, norm_weight, eps, residual, _ = operands
    assert 1 <= x.shape[0] <= MAX_TOKENS, x.shape
    assert out.shape == (x.shape[0], operands.num_outputs), out.shape
    assert out.is_contiguous(), out.stride()
    reason = why_not_made(config)
    assert reason is None, f"{config}: {reason}"
    encoded = encode(weight_boxes(operands, config))
    return MmaArgs(
        map=(ctypes.c_uint8 * MAP_BYTES).from_buffer_copy(encoded),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        num_tokens=x.shape[0],
        num_outputs=operands.num_outputs,
        size=weight.shape[1],
        lead=config.lead,
        stagger=config.stagger,
        eps=eps,
    )


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    assert variant.shared_bytes <= MAX_SHARED_BYTES, variant
    library = load_library(SOURCE, arch, cubin_dir(), variant.flags)
    return Kernel(
        library,
        KERNEL,
        block=NUM_THREADS,
        shared_bytes=variant.shared_bytes,
        is_dependent=_number(arch) >= 90,
    )


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("a"))


def launch_mma(operands: Operands, out: Tensor, config: MmaConfig) -> None:
    """Runs the kernel on the current stream; `out` [T, num_outputs], contiguous."""
    arch = arch_of(operands.x.device)
    kernel = load_variant(variant_of(operands, config), arch)
    encode = _encode_kept if _number(arch) >= 90 else _no_boxes
    tiles = num_tiles(operands.weight.shape[0], config)
    kernel.launch(tiles, arguments(operands, out, config, encode))


def mma_rejects(traits: Traits) -> str | None:
    """What the kernel cannot take; traits: those of `gemm.fused_linear_traits`."""
    num_tokens, size = traits["num_tokens"], traits["size"]
    rules = (
        (1 <= num_tokens <= MAX_TOKENS, f"takes 1 to {MAX_TOKENS} tokens, not {num_tokens}"),
        (traits["has_one_dtype"], "needs the same dtype for all tensors"),
        (traits["is_weight_contiguous"], "needs a contiguous weight"),
        (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        (traits["is_aligned"], "needs rows of x and weights at multiples of 16 bytes"),
        (size % 8 == 0, f"needs a multiple of 8 columns, these are {size}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)
