"""Triton kernel that quantises rows, with what stands before it: norm, residual and norm, or gate.

One pass over memory: a program holds its rows whole. Roundings are those of the reference: what
stands before is rounded to its dtype, then `amax`, scale and values are computed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.activation_triton import gated, gated_activation
from compiled_engine.custom_ops.norm_triton import Config, add_rms_norm, rms_norm
from compiled_engine.custom_ops.quant_choice import MAX_SIZE, Before
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.reference_quant import BLOCK as SCALE_BLOCK
from compiled_engine.custom_ops.reference_quant import FP8_MAX, INT8_MAX, MIN_AMAX
from compiled_engine.custom_ops.triton_common import (
    has_pdl,
    is_interpreted,
    let_next_start,
    rounded_to_e4m3,
    wait_for_previous,
)

# Values of a program, and of a warp and warps where there are rows for all multiprocessors, or not.
TILE = 4096
MANY_ROWS, WARP_VALUES, MAX_WARPS = 264, (512, 1024), (16, 8)


@triton.jit
def _store_quantized(
    values: tl.tensor, q: tl.tensor, scale: tl.tensor, static_scale: tl.tensor, row: tl.tensor,
    mask: tl.tensor, SIZE: tl.constexpr, HAS_STATIC: tl.constexpr, IN_BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, ROUND_FIRST: tl.constexpr,
) -> None:  # fmt: skip
    """Writes q [rows, SIZE] of fp32 values [ROWS, BLOCK] that are 0 outside, and the scales."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    column = tl.arange(0, BLOCK)[None, :]
    is_row = tl.max(mask.to(tl.int32), axis=1, keep_dims=True) > 0
    if HAS_STATIC:
        scaled = values * tl.div_rn(1.0, tl.load(static_scale))
    elif IN_BLOCKS:
        NUM: tl.constexpr = BLOCK // 128
        blocks = tl.reshape(values, (ROWS, NUM, 128))
        amax = tl.max(tl.abs(blocks), axis=2)
        scales = tl.div_rn(tl.maximum(amax, LEAST), LARGEST)
        scaled = tl.reshape(blocks * tl.div_rn(1.0, scales)[:, :, None], (ROWS, BLOCK))
        which = tl.arange(0, NUM)[None, :]
        COUNT: tl.constexpr = (SIZE + 127) // 128
        tl.store(scale + row * COUNT + which, scales, mask=(which < COUNT) & is_row)
    else:
        amax = tl.max(tl.abs(values), axis=1, keep_dims=True)
        scales = tl.div_rn(tl.maximum(amax, LEAST), LARGEST)
        scaled = values * tl.div_rn(1.0, scales)
        tl.store(scale + row, scales, mask=is_row)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if q.dtype.element_ty == tl.int8:
        # to the nearest, ties to even: what is added has no bits below 1
        scaled = (scaled + 12582912.0) - 12582912.0
    elif ROUND_FIRST:
        scaled = rounded_to_e4m3(scaled)
    tl.store(q + row * SIZE + column, scaled.to(q.dtype.element_ty), mask=mask)


@triton.jit
def normed_rows(
    values: tl.tensor, gain: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """RMS norm of whole rows [ROWS, BLOCK] that are 0 behind `SIZE`, rounded as the reference."""
    exact = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, axis=1, keep_dims=True) / SIZE + eps)
    normed = (exact * factor).to(values.dtype).to(tl.float32)
    return (gain.to(tl.float32) * normed).to(values.dtype)


@triton.jit
def _quantize_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, static_scale: tl.tensor, q: tl.tensor,
    scale: tl.tensor, total: tl.tensor, num_rows: tl.tensor, eps: tl.tensor, x_stride: tl.tensor,
    residual_stride: tl.tensor, alpha: tl.tensor, limit: tl.tensor, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_STATIC: tl.constexpr, IN_BLOCKS: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, ROUND_FIRST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: groups of `ROWS` rows. See the module docstring."""
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < SIZE
    if HAS_NORM:
        gain = tl.load(weight + column, mask=is_column, other=0.0)
    wait_for_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = is_column & (row < num_rows)
    row = row.to(tl.int64)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    if ACTIVATION != "":
        up = tl.load(x + row * x_stride + SIZE + column, mask=mask, other=0.0)
        values = gated(values, up, alpha, limit, ACTIVATION).to(values.dtype)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * residual_stride + column, mask=mask, other=0.0)
        values = (added.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(total + row * SIZE + column, values, mask=mask)
    if HAS_NORM:
        values = normed_rows(values, gain, eps, SIZE)
    _store_quantized(
        values.to(tl.float32), q, scale, static_scale, row, mask, SIZE, HAS_STATIC, IN_BLOCKS,
        LARGEST, LEAST, ROUND_FIRST,
    )  # fmt: skip


def unsupported_reason(x: Tensor, before: Before) -> str | None:
    """Why the kernel cannot serve these arguments; None if it can. Reads shapes and dtypes only."""
    others = [t for t in (before.norm_weight, before.residual) if t is not None]
    if any(t.dtype != x.dtype for t in others):
        return "dtypes that differ"
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (x, *others)):
        return "the last dim is strided"
    if before.size_of(x) > MAX_SIZE:
        return f"more than {MAX_SIZE} columns"
    return None


def default_config(num_rows: int, size: int) -> Config:
    """Rows a program and warps that suit the size."""
    block = triton.next_power_of_2(max(size, SCALE_BLOCK))
    rows = 1
    while rows * block < TILE and num_rows // (2 * rows) >= MANY_ROWS:
        rows *= 2
    values, most = WARP_VALUES[num_rows >= MANY_ROWS], MAX_WARPS[num_rows >= MANY_ROWS]
    return Config(rows, min(most, max(1, rows * block // values)))


def _constants(before: Before, activation_format: str) -> dict[str, Any]:
    """What a kernel is made for."""
    return {
        "HAS_RESIDUAL": before.residual is not None,
        "HAS_NORM": before.norm_weight is not None,
        "ACTIVATION": before.activation,
        "HAS_STATIC": activation_format == "fp8_tensor",
        "IN_BLOCKS": activation_format == "fp8_block",
        "LARGEST": INT8_MAX if activation_format == "int8_token" else FP8_MAX,
        "LEAST": MIN_AMAX,
        "ROUND_FIRST": is_interpreted(),
    }


def quantize(
    x: Tensor,
    before: Before,
    activation_format: str,
    static_scale: Tensor | None,
    *,
    config: Config | None = None,
    is_pdl: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the kernel; "fp8_tensor" needs its static scale here.

    Args:
        x: [T, k], or [T, 2 k] with a gate.
        before: what stands before.
        activation_format: how values are quantised.
        static_scale: fp32 [1] of "fp8_tensor".
        config: how the launch is cut.
        is_pdl: whether it overlaps with the kernel before it.

    Returns:
        q [T, k], its scales, and `residual + x` (`x` itself without a residual).
    """
    num_rows, size = x.shape[0], before.size_of(x)
    dtype = torch.int8 if activation_format == "int8_token" else torch.float8_e4m3fn
    q = x.new_empty((num_rows, size), dtype=dtype)
    columns = -(-size // SCALE_BLOCK) if activation_format == "fp8_block" else 1
    assert (static_scale is not None) == (activation_format == "fp8_tensor"), activation_format
    scale = static_scale
    if scale is None:
        scale = x.new_empty((num_rows, columns), dtype=torch.float32)
    total = x if before.residual is None else x.new_empty((num_rows, size))
    if not num_rows:
        return q, scale, total
    config = default_config(num_rows, size) if config is None else config
    is_pdl = is_pdl and has_pdl(x.device)
    _quantize_kernel[(triton.cdiv(num_rows, config.rows),)](
        x,
        x if before.residual is None else before.residual,
        x if before.norm_weight is None else before.norm_weight,
        scale,
        q,
        scale,
        total,
        num_rows,
        before.eps,
        x.stride(0),
        0 if before.residual is None else before.residual.stride(0),
        before.alpha,
        before.limit,
        SIZE=size,
        BLOCK=triton.next_power_of_2(max(size, SCALE_BLOCK)),
        ROWS=config.rows,
        **_constants(before, activation_format),
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )
    return q, scale, total


def quantize_any(
    x: Tensor, before: Before, activation_format: str, static_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize`; one scale of the whole tensor is computed where it is not given."""
    if activation_format != "fp8_tensor" or static_scale is not None:
        return quantize(x, before, activation_format, static_scale)
    values, total = _without_quantizing(x, before)
    amax = values.new_zeros(1) if not values.numel() else values.abs().amax().reshape(1)
    scale = amax.float().clamp_min(MIN_AMAX) / FP8_MAX
    q, scale, _ = quantize(values, Before(), activation_format, scale)
    return q, scale, total


def _without_quantizing(x: Tensor, before: Before) -> tuple[Tensor, Tensor]:
    if before.activation:
        return gated_activation(x, before.activation, before.alpha, before.limit), x
    if before.norm_weight is None:
        return x, x
    if before.residual is None:
        return rms_norm(x, before.norm_weight, before.eps), x
    return add_rms_norm(x, before.residual, before.norm_weight, before.eps)


def norm_and_quantize(operands: QuantOperands) -> tuple[Tensor, Tensor]:
    """x of a quantised linear layer, normed if it has a norm: q and scales."""
    before = Before(operands.norm_weight, operands.eps)
    return quantize_any(operands.x, before, operands.activation_format, operands.input_scale)[:2]
