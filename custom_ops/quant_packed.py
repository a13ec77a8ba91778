"""Launcher of the `quantized_linear` kernels in CUDA C++, for up to 32 tokens on tensor cores.

The weight is read as it is stored and becomes 16-bit floats in registers. It goes there from memory
(`csrc/packed/packed.cu`) or through a ring in shared memory (`csrc/packed/ring.cu`). One token may
be normed and quantised by every block of threads itself; several are prepared by kernels of their
own first. A kernel keeps no state between calls and has no scratch. From compute capability 9.0 on
it overlaps with the kernel before it.

Owns the variants of the kernels and their arguments. When one is the fastest, and with which sizes,
is known to `quant_choice`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.gemm_skinny import num_multiprocessors
from compiled_engine.custom_ops.reference_quant import BLOCK, PACKED_FORMATS
from compiled_engine.custom_ops.registry import Traits

KERNEL = "packed_product"
MAX_TOKENS = 32
# Of a block of threads, at most.
MAX_SHARED_BYTES = 232448
# The last compute capability that has them, from 9.0 on; of later ones a block has less.
MOST_SHARED_ARCH = 119
_CODES = {
    "fp8_tensor": 0,
    "fp8_channel": 0,
    "fp8_block": 0,
    "fp8_token_block": 0,
    "int8_channel": 1,
    "nvfp4": 2,
    "mxfp4": 3,
    "int4_group": 4,
}
_ROW_BLOCKS = {"fp8_block": BLOCK, "fp8_token_block": 1}
# Kinds of x, and what a token in shared memory is quantised to.
VALUES, E4M3, INT8, SHARED = 0, 1, 2, 3
_QUANT = {"": 0, "fp8_token": 1, "fp8_tensor": 1, "fp8_block": 2, "int8_token": 3}
# In the ring, one token of bfloat16 is divided by a power of two and multiplied as fp16: weights
# without their scales are exact in fp16.
_SCALED = 4


class QuantOperands(NamedTuple):
    """Arguments of `quantized_linear`, without the kernel's name."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    global_scale: Tensor | None
    input_scale: Tensor | None
    bias: Tensor | None
    format: str
    activation_format: str
    norm_weight: Tensor | None
    eps: float
    residual: Tensor | None
    is_gated: bool

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)

    @property
    def row_bytes(self) -> int:
        """Of the weight."""
        return self.weight.shape[1] * self.weight.element_size()

    @property
    def has_offsets(self) -> bool:
        """Whether zeros are values, not codes."""
        return self.zero is not None and self.zero.is_floating_point()

    @property
    def scales_of_values(self) -> list[Tensor]:
        """What multiplies values of the weight, or is added to them."""
        return [t for t in (self.scale, self.zero if self.has_offsets else None) if t is not None]


@dataclass(frozen=True)
class PackedConfig:
    """Sizes of the kernel.

    Attributes:
        sixteens: groups of 16 rows of the weight in a tile.
        warps: of a block of threads, that divide the columns.
        ahead: pieces of 128 bytes of each row of a tile on their way, of a warp.
        resident: blocks of threads for which a multiprocessor has registers.
        blocks: of threads, a multiprocessor, that take tiles in turn; 0: a block for every tile.
        is_apart: whether one token too is prepared by a kernel of its own.
        is_ring: whether weights go through shared memory, not to registers at once.
    """

    sixteens: int = 1
    warps: int = 8
    ahead: int = 4
    resident: int = 2
    blocks: int = 0
    is_apart: bool = False
    is_ring: bool = False


class PackedArgs(ctypes.Structure):
    """Mirror of `PackedArgs` in `csrc/packed/args.cuh`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "x_scale", "weight", "scale", "zero")),
        *((name, ctypes.c_void_p) for name in ("row_scale", "bias", "norm_weight")),
        *((name, ctypes.c_void_p) for name in ("residual", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_outputs", "size", "row_bytes")),
        *((name, ctypes.c_int32) for name in ("scale_columns", "x_scale_step", "num_tiles")),
        *((name, ctypes.c_int32) for name in ("warp_units", "padded_size", "row_scale_step")),
        *((name, ctypes.c_float) for name in ("eps", "factor")),
    ]


@dataclass(frozen=True)
class Prepared:
    """x as the kernel takes it: quantised, or as it is, to be prepared by the kernel.

    `scale` is that of quantised values, or the static one of those to be quantised.
    """

    x: Tensor
    scale: Tensor | None
    kind: int
    has_norm: bool = False
    quant: int = 0


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for; `tokens` are padded."""

    config: PackedConfig
    code: int
    row_block: int
    group_bits: int
    tokens: int
    kind: int
    quant: int
    has_norm: bool
    has_x_blocks: bool
    is_half: bool
    is_gated: bool
    num_units: int
    has_offsets: bool = False

    @property
    def source(self) -> str:
        """File under `csrc`."""
        return "packed/ring.cu" if self.config.is_ring else "packed/packed.cu"

    @property
    def unit(self) -> int:
        """Columns of 128 bytes of a row."""
        return 256 if self.code >= 2 else 128

    @property
    def ahead(self) -> int:
        """Units on their way: as many of those asked for as shared memory holds, or a warp has."""
        if not self.config.is_ring:
            return max(1, min(self.config.ahead, -(-self.num_units // self.config.warps)))
        room = (MAX_SHARED_BYTES - self._shared_bytes(0)) // self.stage_bytes
        return max(1, min(self.config.ahead, room))

    @property
    def warp_units(self) -> int:
        """Units of each warp in a tile, the same for all; some may lie behind the last column."""
        units = -(-self.num_units // self.config.warps)
        return units if self.config.is_ring else -(-units // self.ahead) * self.ahead

    @property
    def stage_bytes(self) -> int:
        """Of a unit of all warps in the ring: weights, words with their scales, x."""
        if not self.config.is_ring:
            return 0
        chunks, is_packed = 4 * self.config.sixteens, self.code >= 2
        words = chunks * (2 if self.code == _CODES["int4_group"] else 1) if is_packed else 0
        if self.row_block:
            words = chunks // 2
        piece = (2 if is_packed else 1) * (2 if self.kind == VALUES else 1)
        pieces = 0 if self.kind == SHARED else self.tokens // 8 * 2 * piece
        return 32 * self.config.warps * (16 * chunks + 4 * words + 16 * pieces)

    @property
    def padded_size(self) -> int:
        """Columns of all warps' units."""
        return self.warp_units * self.config.warps * self.unit

    @property
    def parts(self) -> int:
        """Pieces of 8 columns that a thread prepares of one token."""
        return -(-self.padded_size // (8 * 32 * self.config.warps))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `csrc/packed/args.cuh` divides it."""
        return self._shared_bytes(self.ahead)

    def _shared_bytes(self, ahead: int) -> int:
        is_alone = self.config.is_ring and self.kind == SHARED
        pitch = 2 if is_alone else self.tokens + 1  # of one token, for two tiles
        sums = self.config.warps * 16 * self.config.sixteens * pitch * 4
        token = self.padded_size * 2 + self.padded_size // BLOCK * 4
        place = (sums + 256 + 15) // 16 * 16 + ahead * self.stage_bytes
        return place + (token if self.kind == SHARED else 0)

    @property
    def multiplies_halves(self) -> bool:
        """Whether the tensor cores get fp16: bytes are exact in it, and x may be of that type."""
        return self.is_half or self.kind in (E4M3, INT8) or self.quant > 0

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        values = {
            "FORMAT": self.code,
            "ROW_BLOCK": self.row_block,
            "GROUP_BITS": self.group_bits,
            "OFFSETS": self.has_offsets,
            "TOKENS": self.tokens,
            "X_KIND": self.kind,
            "QUANT": self.quant,
            "HAS_NORM": self.has_norm,
            "X_BLOCK_SCALES": self.has_x_blocks,
            "HALF": self.multiplies_halves,
            "IO_HALF": self.is_half,
            "GATED": self.is_gated,
            "SIXTEENS": self.config.sixteens,
            "WARPS": self.config.warps,
            "AHEAD": self.ahead,
            "RESIDENT": self.config.resident,
            "X_PARTS": self.parts if self.kind == SHARED else 1,
        }
        return tuple(f"-D{name}={int(value)}" for name, value in values.items())


def prepare(operands: QuantOperands, config: PackedConfig) -> Prepared:
    """x as the kernel takes it; runs the kernels that several tokens need for it."""
    x, activation_format = operands.x, operands.activation_format
    needs_work = operands.norm_weight is not None or bool(activation_format)
    if x.shape[0] == 1 and (needs_work or config.is_ring) and not config.is_apart:
        quant = _QUANT[activation_format]
        if not quant and config.is_ring and x.dtype == torch.bfloat16:
            quant = _SCALED
        return Prepared(x, operands.input_scale, SHARED, operands.norm_weight is not None, quant)
    if activation_format:
        from compiled_engine.custom_ops import quant_triton

        q, scale = quant_triton.norm_and_quantize(operands)
        return Prepared(q, scale, INT8 if q.dtype == torch.int8 else E4M3)
    if operands.norm_weight is not None:
        from compiled_engine.custom_ops.norm_triton import rms_norm

        x = rms_norm(x, operands.norm_weight, operands.eps)
    return Prepared(x, None, VALUES)


def variant_of(operands: QuantOperands, prepared: Prepared, config: PackedConfig) -> Variant:
    """The compiled kernel that serves these arguments."""
    format, size = operands.format, operands.x.shape[1]
    group = operands.row_bytes * 2 // operands.scale.shape[1] if format == "int4_group" else 128
    is_quantised = prepared.kind in (E4M3, INT8)
    return Variant(
        config=replace(config, blocks=0, is_apart=False),
        code=_CODES[format],
        row_block=_ROW_BLOCKS.get(format, 0),
        group_bits=group.bit_length() - 1,
        tokens=-(-operands.x.shape[0] // 8) * 8,
        kind=prepared.kind,
        quant=prepared.quant,
        has_norm=prepared.has_norm,
        has_x_blocks=is_quantised and operands.activation_format == "fp8_block",
        is_half=operands.x.dtype == torch.float16,
        is_gated=operands.is_gated,
        num_units=-(-size // (256 if format in PACKED_FORMATS else 128)),
        has_offsets=operands.has_offsets,
    )


def num_tiles(operands: QuantOperands, config: PackedConfig) -> int:
    """Tiles of rows of the weight."""
    outputs = 16 * config.sixteens // (2 if operands.is_gated else 1)
    return -(-operands.num_outputs // outputs)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def arguments(
    operands: QuantOperands, prepared: Prepared, out: Tensor, variant: Variant
) -> PackedArgs:
    """The kernel's argument; `out` [T, num_outputs], contiguous."""
    x, residual, format = prepared.x, operands.residual, operands.format
    assert 1 <= x.shape[0] <= MAX_TOKENS, x.shape
    assert out.shape == (x.shape[0], operands.num_outputs), out.shape
    assert out.is_contiguous(), out.stride()
    row_scale = operands.global_scale
    if format in ("fp8_tensor", "fp8_channel", "int8_channel"):
        row_scale = operands.scale
    x_scale_step = 0
    if prepared.kind in (E4M3, INT8) and prepared.scale is not None:
        x_scale_step = 0 if prepared.scale.dim() == 1 else prepared.scale.shape[1]
    return PackedArgs(
        x=x.data_ptr(),
        x_scale=_address(prepared.scale),
        weight=operands.weight.data_ptr(),
        scale=operands.scale.data_ptr(),
        zero=_address(operands.zero),
        row_scale=_address(row_scale),
        bias=_address(operands.bias),
        norm_weight=_address(operands.norm_weight),
        residual=_address(residual),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        num_tokens=x.shape[0],
        num_outputs=operands.num_outputs,
        size=x.shape[1],
        row_bytes=operands.row_bytes,
        scale_columns=operands.scale.shape[-1],
        x_scale_step=x_scale_step,
        num_tiles=num_tiles(operands, variant.config),
        warp_units=variant.warp_units,
        padded_size=variant.padded_size,
        row_scale_step=0 if row_scale is None or row_scale.numel() == 1 else 1,
        eps=operands.eps,
        factor=_factor(format, variant),
    )


def _factor(format: str, variant: Variant) -> float:
    """What undoes the powers of two in the kernel's sums; see `widen_word` and `widen_scales`."""
    is_lifted = variant.config.is_ring and variant.kind == SHARED  # scales multiply sums
    if format == "nvfp4":
        alone = 2.0**14 if is_lifted else 128.0
        return alone if variant.multiplies_halves else 512.0
    return 2.0**14 if format == "mxfp4" and is_lifted else 1.0


def grid_of(operands: QuantOperands, config: PackedConfig, num_processors: int) -> int:
    """Blocks of threads of a launch: as many as run at once, or fewer if none then has more."""
    tiles = num_tiles(operands, config)
    if not config.blocks:
        return tiles
    rounds = -(-tiles // (num_processors * config.blocks))
    return -(-tiles // rounds)


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    assert variant.shared_bytes <= MAX_SHARED_BYTES, variant
    library = load_library(variant.source, arch, cubin_dir(), variant.flags)
    return Kernel(
        library,
        KERNEL,
        block=32 * variant.config.warps,
        shared_bytes=variant.shared_bytes,
        is_dependent=int(arch.removeprefix("sm_").rstrip("a")) >= 90,
    )


def launch_packed(operands: QuantOperands, config: PackedConfig) -> Tensor:
    """Runs the kernel on the current stream; returns [T, num_outputs]."""
    device = operands.x.device
    out = operands.x.new_empty((operands.x.shape[0], operands.num_outputs))
    prepared = prepare(operands, config)
    variant = variant_of(operands, prepared, config)
    kernel = load_variant(variant, arch_of(device))
    grid = grid_of(operands, config, num_multiprocessors(device))
    kernel.launch(grid, arguments(operands, prepared, out, variant))
    return out


def packed_rejects(traits: Traits) -> str | None:
    """What the kernels cannot take; traits: those of `quant_choice.quantized_linear_traits`."""
    num_tokens, size, multiple = traits["num_tokens"], traits["size"], traits["x_multiple"]
    rules = (
        (not traits["is_tiled"], "reads scales by rows, not in tiles"),
        (1 <= num_tokens <= MAX_TOKENS, f"takes 1 to {MAX_TOKENS} tokens, not {num_tokens}"),
        (size % multiple == 0, f"needs a multiple of {multiple} columns, these are {size}"),
        (traits["has_one_dtype"], "needs the same dtype for x, bias, norm and residual"),
        (traits["has_fine_scales"], "needs fp32 scales, of int4_group the dtype of x"),
        (traits["has_whole_groups"], "needs groups of a power of two of columns, from 32 on"),
        (traits["is_weight_contiguous"], "needs contiguous weights and scales"),
        (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        (traits["is_aligned"], "needs rows of x and weights at multiples of 16 bytes"),
        (traits["weight_bytes"] < 2**32, "counts bytes in 32 bits, too few for this weight"),
        (num_tokens > 1 or size <= 16384, f"takes up to 16384 columns of 1 token, not {size}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)
