"""Launcher of the `experts` kernel in CUDA C++ for packed weights and one token.

Weights of the chosen experts come through a ring in shared memory; see
`csrc/packed/experts_token.cu`. A launch for each of the two products, of which the second also adds
up the experts. Nothing is kept between calls. From compute capability 9.0 on each overlaps with the
one before it.
"""

from __future__ import annotations

import ctypes
import functools
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
from compiled_engine.custom_ops.gemm_skinny import num_multiprocessors
from compiled_engine.custom_ops.moe_config import PackedTokenConfig
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.moe_packed import FORMATS, UNIT
from compiled_engine.custom_ops.quant_packed import MAX_SHARED_BYTES, PackedArgs

SOURCE = "packed/experts_token.cu"
KERNEL = "expert_token"


class ExpertTokenArgs(ctypes.Structure):
    """Mirror of `ExpertTokenArgs` in `csrc/packed/experts_token.cu`."""

    _fields_: ClassVar = [
        ("product", PackedArgs),
        *((name, ctypes.c_void_p) for name in ("ids", "weights")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, ctypes.c_int32) for name in ("rows", "slot_units")),
    ]


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for; `slot_units` are the units of an expert's row."""

    config: PackedTokenConfig
    is_down: bool
    is_clamped: bool
    is_half: bool
    top_k: int
    slot_units: int
    format: str = "mxfp4"

    @property
    def warp_units(self) -> int:
        """Units of each warp in a tile, the same for all; some may lie behind the last column."""
        return -(-self.slot_units * (self.top_k if self.is_down else 1) // self.config.warps)

    @property
    def padded_size(self) -> int:
        """Columns of all warps' units."""
        return self.warp_units * self.config.warps * UNIT

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return 16 * self.config.sixteens // (1 if self.is_down else 2)

    @property
    def ahead(self) -> int:
        """Units on their way: as many of those asked for as shared memory holds."""
        room = (MAX_SHARED_BYTES - self._shared_bytes(0)) // self._stage_bytes
        return max(1, min(self.config.ahead, room))

    @property
    def parts(self) -> int:
        """Pieces of 8 columns that a thread prepares."""
        return -(-self.padded_size // (8 * 32 * self.config.warps))

    @property
    def _stage_bytes(self) -> int:
        return 32 * self.config.warps * 4 * self.config.sixteens * (16 + 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `csrc/packed/args.cuh` divides it."""
        return self._shared_bytes(self.ahead)

    def _shared_bytes(self, ahead: int) -> int:
        sums = 2 * self.config.warps * 16 * self.config.sixteens * 4
        return sums + 256 + ahead * self._stage_bytes + self.padded_size * 2

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        values = {
            "FORMAT": FORMATS[self.format],
            "HALF": True,
            "IO_HALF": self.is_half,
            "GATED": not self.is_down,
            "DOWN": self.is_down,
            "CLAMPED": self.is_clamped,
            "TOP_K": self.top_k,
            "SIXTEENS": self.config.sixteens,
            "WARPS": self.config.warps,
            "AHEAD": self.ahead,
            "RESIDENT": self.config.resident,
            "X_PARTS": self.parts,
        }
        return tuple(f"-D{name}={int(value)}" for name, value in values.items())


def variant_of(operands: ExpertOperands, config: PackedTokenConfig, *, is_down: bool) -> Variant:
    """The compiled kernel that serves a product of these arguments."""
    size = operands.inner_size if is_down else operands.x.shape[1]
    return Variant(
        config=config,
        is_down=is_down,
        is_clamped=operands.activation == "swiglu_clamped",
        is_half=operands.x.dtype == torch.float16,
        top_k=operands.top_k,
        slot_units=-(-size // UNIT),
        format=operands.format,
    )


def arguments(
    operands: ExpertOperands, x: Tensor, out: Tensor, variant: Variant
) -> ExpertTokenArgs:
    """The kernel's argument for one product; out [k, i] of the first, [1, h]; contiguous."""
    assert operands.x.shape[0] == 1, operands.x.shape
    is_down = variant.is_down
    weight = operands.down if is_down else operands.gate_up
    scale = operands.scale(int(is_down))
    bias = operands.down_bias if is_down else operands.gate_up_bias
    # One token: its row starts where the tensor does.
    is_added = is_down and operands.residual is not None
    residual = operands.residual_or_x.data_ptr() if is_added else None
    product = PackedArgs(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        row_scale=operands.global_scale(int(is_down)).data_ptr(),
        residual=residual,
        out=out.data_ptr(),
        x_stride=x.stride(0),
        num_tokens=1,
        num_outputs=out.shape[1],
        size=x.shape[1],
        row_bytes=weight.shape[2],
        scale_columns=scale.shape[2],
        num_tiles=-(-out.shape[1] // variant.outputs),
        warp_units=variant.warp_units,
        padded_size=variant.padded_size,
        factor=2.0**14,
    )
    return ExpertTokenArgs(
        product=product,
        ids=operands.ids.data_ptr(),
        weights=operands.weights.data_ptr(),
        alpha=operands.alpha,
        limit=operands.limit,
        rows=weight.shape[1],
        slot_units=variant.slot_units,
    )


def grid_of(args: ExpertTokenArgs, variant: Variant, num_processors: int) -> int:
    """Blocks of threads of a launch: as many as run at once, or fewer if none then has more."""
    tiles = args.product.num_tiles * (1 if variant.is_down else variant.top_k)
    rounds = -(-tiles // (num_processors * variant.config.resident))
    return int(-(-tiles // rounds))


@functools.cache
def load_variant(variant: Variant, arch: str) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    library = load_library(SOURCE, arch, cubin_dir(), variant.flags)
    return Kernel(
        library,
        KERNEL,
        block=32 * variant.config.warps,
        shared_bytes=variant.shared_bytes,
        is_dependent=int(arch.removeprefix("sm_").rstrip("a")) >= 90,
    )


def launch_packed_token(
    operands: ExpertOperands, first: PackedTokenConfig, second: PackedTokenConfig
) -> Tensor:
    """As `reference_moe.experts`; the configs of the two products."""
    x, device = operands.x, operands.x.device
    inner = x.new_empty((operands.top_k, operands.inner_size))
    out = x.new_empty((1, x.shape[1]))
    for config, left, made in ((first, x, inner), (second, inner, out)):
        variant = variant_of(operands, config, is_down=made is out)
        args = arguments(operands, left, made, variant)
        kernel = load_variant(variant, arch_of(device))
        kernel.launch(grid_of(args, variant, num_multiprocessors(device)), args)
    return out
