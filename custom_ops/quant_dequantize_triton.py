"""Triton kernel that writes a quantised weight as 16-bit or 32-bit floats, for libraries.

A program reads a tile of a few rows and writes it; values are computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP
from compiled_engine.custom_ops.reference_quant import TILED
from compiled_engine.custom_ops.triton_common import (
    has_pdl,
    let_next_start,
    wait_for_previous,
)

ROWS, COLUMNS, NUM_WARPS = 4, 1024, 4
# What the kernel tells formats apart by.
BYTES, E2M1, CODES = 0, 1, 2


@triton.jit
def _value_of(codes: tl.tensor) -> tl.tensor:
    """e2m1 to fp32."""
    magnitude = (codes & 7).to(tl.int32)
    exponent = magnitude >> 1
    bits = ((exponent + 126) << 23) | ((magnitude & 1) << 22)
    value = bits.to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, magnitude.to(tl.float32) * 0.5, value)
    return tl.where(codes >= 8, -value, value)


@triton.jit
def tile_place(row: tl.tensor, group: tl.tensor, num_groups: tl.tensor) -> tl.tensor:
    """As `reference_fp4.tile_places`, of rows int64 [ROWS, 1] and groups [1, COLUMNS]."""
    tile = row // 128 * (num_groups // 4) + group // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@triton.jit
def _dequantize_kernel(
    q: tl.tensor, scale: tl.tensor, zero: tl.tensor, global_scale: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, stored: tl.tensor, size: tl.tensor, scale_columns: tl.tensor,
    global_step: tl.tensor, KIND: tl.constexpr, ROW_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    IS_POWER: tl.constexpr, IS_TILED: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_GLOBAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: groups of rows x groups of columns. Scale of (r, c): `scale[r / ROW_BLOCK, c / GROUP]`.

    `IS_TILED`: that of group c / GROUP is where `reference_fp4` puts it.

    `ROW_BLOCK` 0: one scale for all rows; `GROUP` 0: one for all columns. `stored`: bytes of a row.
    """
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < num_rows) & (column < size)
    row = row.to(tl.int64)
    place = tl.zeros((ROWS, COLUMNS), tl.int64)
    if IS_TILED:
        place += tile_place(row, column // GROUP, scale_columns)
    elif ROW_BLOCK > 0:
        place += row // ROW_BLOCK * scale_columns
    if GROUP > 0 and not IS_TILED:
        place += column // GROUP
    wait_for_previous(PDL)
    if KIND == 0:
        values = tl.load(q + row * stored + column, mask=mask, other=0.0).to(tl.float32)
    else:
        half = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
        inside = (row < num_rows) & (half < stored)
        packed = tl.load(q + row * stored + half, mask=inside, other=0)
        codes = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, COLUMNS))
        if KIND == 1:
            values = _value_of(codes)
        elif HAS_ZERO:
            values = codes.to(tl.float32) - tl.load(zero + place, mask=mask, other=0).to(tl.float32)
        else:
            values = codes.to(tl.float32) - 8.0
    scales = tl.load(scale + place, mask=mask)
    if IS_POWER:
        bits = scales.to(tl.int32)
        power = tl.where(bits == 0, 1 << 22, bits << 23)
        values *= power.to(tl.float32, bitcast=True)
    else:
        values *= scales.to(tl.float32)
    if HAS_OFFSET:
        values += tl.load(zero + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_GLOBAL:
        values *= tl.load(global_scale + row * global_step, mask=row < num_rows, other=0.0)
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), mask=mask)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference_quant.dequantize`, of contiguous tensors on a GPU."""
    num_rows = q.shape[0]
    out = q.new_empty((num_rows, size), dtype=dtype)
    if not out.numel():
        return out
    kinds = {"nvfp4": E2M1, TILED: E2M1, "mxfp4": E2M1, "int4_group": CODES}
    kind = kinds.get(format, BYTES)
    group = 0
    if format == TILED:
        group = NVFP4_GROUP
    elif kind != BYTES:
        group = 2 * q.shape[1] // scale.shape[1]
    elif format in ("fp8_block", "fp8_token_block"):
        group = 128
    row_block = {"fp8_tensor": 0, "fp8_block": 128}.get(format, 1)
    is_pdl = has_pdl(q.device)
    _dequantize_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(size, COLUMNS))](
        q,
        scale,
        scale if zero is None else zero,
        scale if global_scale is None else global_scale,
        out,
        num_rows,
        q.shape[1],
        size,
        scale.shape[-1],
        0 if global_scale is None or global_scale.numel() == 1 else 1,
        KIND=kind,
        ROW_BLOCK=row_block,
        GROUP=group,
        IS_POWER=format == "mxfp4",
        IS_TILED=format == TILED,
        HAS_ZERO=zero is not None and not zero.is_floating_point(),
        HAS_OFFSET=zero is not None and zero.is_floating_point(),
        HAS_GLOBAL=global_scale is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        PDL=is_pdl,
        num_warps=NUM_WARPS,
        launch_pdl=is_pdl,
    )
    return out
