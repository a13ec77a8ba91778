"""Launcher of the `experts` kernel in CUDA C++ for packed weights and few pairs of an expert.

Weights become 16-bit floats in registers, for tensor cores; see `csrc/packed/experts.cu`. A launch
for each of the two products, and one that adds up the pairs of a token. Nothing is kept between
calls. From compute capability 9.0 on each overlaps with the one before it.
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
from compiled_engine.custom_ops.moe_config import PackedExpertsConfig
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.quant_packed import PackedArgs

SOURCE = "packed/experts.cu"
KERNEL = "expert_product"
FORMATS = {"nvfp4": 2, "mxfp4": 3}
# Columns of 128 bytes of a row.
UNIT = 256


class ExpertArgs(ctypes.Structure):
    """Mirror of `ExpertArgs` in `csrc/packed/experts.cu`."""

    _fields_: ClassVar = [
        ("product", PackedArgs),
        *((name, ctypes.c_void_p) for name in ("order", "offsets")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_slots", "top_k", "rows")),
    ]


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is made for."""

    config: PackedExpertsConfig
    is_down: bool
    is_clamped: bool
    is_half: bool
    num_units: int
    format: str = "mxfp4"

    @property
    def ahead(self) -> int:
        """Units on their way: not more than a warp has."""
        return max(1, min(self.config.ahead, -(-self.num_units // self.config.warps)))

    @property
    def warp_units(self) -> int:
        """Units of each warp, the same for all; some may lie behind the last column."""
        units = -(-self.num_units // self.config.warps)
        return -(-units // self.ahead) * self.ahead

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return 16 * self.config.sixteens // (1 if self.is_down else 2)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, for the sums of its warps."""
        return self.config.warps * 16 * self.config.sixteens * (self.config.pairs + 1) * 4

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the compiler."""
        values = {
            "FORMAT": FORMATS[self.format],
            "X_KIND": 0,
            "TOKENS": self.config.pairs,
            "HALF": self.is_half,
            "IO_HALF": self.is_half,
            "GATED": not self.is_down,
            "DOWN": self.is_down,
            "CLAMPED": self.is_clamped,
            "SIXTEENS": self.config.sixteens,
            "WARPS": self.config.warps,
            "AHEAD": self.ahead,
            "RESIDENT": self.config.resident,
        }
        return tuple(f"-D{name}={int(value)}" for name, value in values.items())


def variant_of(operands: ExpertOperands, config: PackedExpertsConfig, *, is_down: bool) -> Variant:
    """The compiled kernel that serves a product of these arguments."""
    size = operands.inner_size if is_down else operands.x.shape[1]
    return Variant(
        config=config,
        is_down=is_down,
        is_clamped=operands.activation == "swiglu_clamped",
        is_half=operands.x.dtype == torch.float16,
        num_units=-(-size // UNIT),
        format=operands.format,
    )


def num_slots(operands: ExpertOperands) -> int:
    """Experts in use, at most."""
    return min(operands.num_experts, operands.ids.numel())


def arguments(operands: ExpertOperands, x: Tensor, out: Tensor, variant: Variant) -> ExpertArgs:
    """The kernel's argument for one product; out [pairs, its outputs], contiguous."""
    is_down = variant.is_down
    weight = operands.down if is_down else operands.gate_up
    scale = operands.scale(int(is_down))
    bias = operands.down_bias if is_down else operands.gate_up_bias
    num_outputs = out.shape[1]
    product = PackedArgs(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        row_scale=operands.global_scale(int(is_down)).data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        num_outputs=num_outputs,
        size=x.shape[1],
        row_bytes=weight.shape[2],
        scale_columns=scale.shape[2],
        num_tiles=-(-num_outputs // variant.outputs),
        warp_units=variant.warp_units,
        factor=_factor(variant),
    )
    return ExpertArgs(
        product=product,
        order=operands.order.data_ptr(),
        offsets=operands.offsets.data_ptr(),
        alpha=operands.alpha,
        limit=operands.limit,
        num_experts=operands.num_experts,
        num_slots=num_slots(operands),
        top_k=operands.top_k,
        rows=weight.shape[1],
    )


def _factor(variant: Variant) -> float:
    """What undoes the powers of two in the kernel's sums; see `widen_word` and `widen_scales`."""
    if variant.format == "mxfp4":
        return 1.0
    return 128.0 if variant.is_half else 512.0


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


def launch_packed_experts(
    operands: ExpertOperands, first: PackedExpertsConfig, second: PackedExpertsConfig
) -> Tensor:
    """As `reference_moe.experts`; the configs of the two products."""
    from compiled_engine.custom_ops.moe_stream import sum_pairs

    x, num_pairs, arch = operands.x, operands.ids.numel(), arch_of(operands.x.device)
    inner = x.new_empty((num_pairs, operands.inner_size))
    results = x.new_empty((num_pairs, x.shape[1]))
    for config, left, out in ((first, x, inner), (second, inner, results)):
        variant = variant_of(operands, config, is_down=out is results)
        args = arguments(operands, left, out, variant)
        load_variant(variant, arch).launch(num_slots(operands) * args.product.num_tiles, args)
    return sum_pairs(results, operands)
