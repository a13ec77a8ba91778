"""Triton kernel that quantises rows to nvfp4, with or without an RMS norm before it.

A program holds its rows whole. Values are e2m1 two in a byte, with an e4m3 scale for 16 columns and
an fp32 one for the row, rounded as `reference_quant.quantize_nvfp4` does; scales of groups go to
the places that `reference_fp4` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.norm_triton import Config
from compiled_engine.custom_ops.quant_dequantize_triton import tile_place
from compiled_engine.custom_ops.quant_triton import default_config, normed_rows
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP, tiled_shape
from compiled_engine.custom_ops.reference_quant import MIN_AMAX, TILED, stored_multiple
from compiled_engine.custom_ops.triton_common import (
    has_pdl,
    is_interpreted,
    let_next_start,
    rounded_to_e4m3,
    wait_for_previous,
)


@triton.jit
def _to_e2m1(values: tl.tensor) -> tl.tensor:
    """The nearest codes of fp32 values, ties to the even one, as int32."""
    size = tl.abs(values)
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    codes += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32)
    codes += (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return codes | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _quantize_kernel(
    x: tl.tensor, weight: tl.tensor, static_scale: tl.tensor, q: tl.tensor, scale: tl.tensor,
    token_scale: tl.tensor, num_rows: tl.tensor, eps: tl.tensor, x_stride: tl.tensor,
    SIZE: tl.constexpr, STORED: tl.constexpr, TILED_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_STATIC: tl.constexpr, LEAST: tl.constexpr,
    ROUND_FIRST: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: groups of `ROWS` rows. `STORED`: columns of q, of which those behind `SIZE` are 0."""
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)[None, :]
    if HAS_NORM:
        gain = tl.load(weight + column, mask=column < SIZE, other=0.0)
    wait_for_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < num_rows
    row = row.to(tl.int64)
    loaded = tl.load(x + row * x_stride + column, mask=is_row & (column < SIZE), other=0.0)
    if HAS_NORM:
        loaded = normed_rows(loaded, gain, eps, SIZE)
    groups = tl.reshape(loaded.to(tl.float32), (ROWS, BLOCK // 16, 16))
    amax = tl.max(tl.abs(groups), axis=2)
    if HAS_STATIC:
        overall = tl.zeros((ROWS, 1), tl.float32) + tl.load(static_scale)
    else:
        largest = tl.maximum(tl.max(amax, axis=1, keep_dims=True), LEAST)
        overall = tl.div_rn(largest, tl.full((ROWS, 1), 2688.0, tl.float32))
    scales = tl.div_rn(amax, 6.0 * overall)
    scales = tl.minimum(tl.maximum(scales, 0.001953125), 448.0)
    # a maximum knows no NaN: the scale of the group keeps it
    is_nan = tl.max((groups != groups).to(tl.int32), axis=2) > 0
    if ROUND_FIRST:
        scales = rounded_to_e4m3(scales)
    kept = scales.to(tl.float8e4nv)
    if not ROUND_FIRST:
        scales = kept.to(tl.float32)
    inverse = tl.div_rn(1.0, scales * overall)
    codes = _to_e2m1(groups * inverse[:, :, None])
    low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(q + row * (STORED // 2) + pair, packed, mask=is_row & (pair < STORED // 2))
    group = tl.arange(0, BLOCK // 16)[None, :]
    kept = tl.where(is_nan, 0x7F, kept.to(tl.uint8, bitcast=True)).to(tl.uint8)
    there = is_row & (group < STORED // 16)
    tl.store(scale + tile_place(row, group, TILED_GROUPS), kept, mask=there)
    tl.store(token_scale + row, overall, mask=is_row)


def quantize(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    static_scale: Tensor | None,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference_quant.quantize_nvfp4`, behind a norm if there is a weight for one.

    Args:
        x: [T, k], last dim contiguous.
        norm_weight: [k] in the dtype of `x`, or None.
        eps: of the norm.
        static_scale: fp32 [1], or None.
        config: how the launch is cut.

    Returns:
        q uint8 [T, ceil(k / 32) * 16], scales e4m3 in tiles, and fp32 [T, 1].
    """
    num_rows, size = x.shape
    stored = size + -size % stored_multiple(TILED)
    rows, num_groups = tiled_shape(num_rows, stored // NVFP4_GROUP)
    q = x.new_empty((num_rows, stored // 2), dtype=torch.uint8)
    # what fills up tiles must not be NaN: it meets zeros
    scale = x.new_zeros((rows, num_groups), dtype=torch.uint8)
    token_scale = x.new_empty((num_rows, 1), dtype=torch.float32)
    if not num_rows:
        return q, scale.view(torch.float8_e4m3fn), token_scale
    config = default_config(num_rows, stored) if config is None else config
    is_pdl = has_pdl(x.device)
    _quantize_kernel[(triton.cdiv(num_rows, config.rows),)](
        x,
        x if norm_weight is None else norm_weight,
        x if static_scale is None else static_scale,
        q,
        scale,
        token_scale,
        num_rows,
        eps,
        x.stride(0),
        SIZE=size,
        STORED=stored,
        TILED_GROUPS=num_groups,
        BLOCK=triton.next_power_of_2(max(stored, 128)),
        ROWS=config.rows,
        HAS_NORM=norm_weight is not None,
        HAS_STATIC=static_scale is not None,
        LEAST=MIN_AMAX,
        ROUND_FIRST=is_interpreted(),
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )
    return q, scale.view(torch.float8_e4m3fn), token_scale
