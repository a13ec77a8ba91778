"""Triton kernel of the norm family: RMS norm of rows, with or without a residual added first."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import note_plain_body
from compiled_engine.custom_ops.triton_common import (
    DTYPES,
    Rows,
    has_pdl,
    let_next_start,
    rows_of,
    wait_for_previous,
)

MAX_SIZE = 32768
# Values of a program: enough work to hide a load, few enough to stay in registers.
TILE = 4096


class Config(NamedTuple):
    """How a launch is cut: rows a program, and its warps."""

    rows: int
    num_warps: int


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, total: tl.tensor,
    num_rows: tl.tensor, eps: tl.tensor, x_inner: tl.tensor, x_outer: tl.tensor,
    x_stride: tl.tensor, residual_inner: tl.tensor, residual_outer: tl.tensor,
    residual_stride: tl.tensor, out_inner: tl.tensor, out_outer: tl.tensor, out_stride: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`out = weight * round(t / sqrt(mean(t^2) + eps))`, `t = x` or `total = round(residual + x)`.

    Grid: groups of `ROWS` rows; a program holds its rows whole. Statistics in fp32; roundings as
    in the reference. `out` and `total` share their strides.
    """
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < SIZE
    gain = tl.load(weight + column, mask=is_column, other=0.0)
    wait_for_previous(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = is_column & (row < num_rows)
    row = row.to(tl.int64)
    place = row // x_inner * x_outer + row % x_inner * x_stride
    values = tl.load(x + place + column, mask=mask, other=0.0)
    out_place = row // out_inner * out_outer + row % out_inner * out_stride
    if HAS_RESIDUAL:
        place = row // residual_inner * residual_outer + row % residual_inner * residual_stride
        added = tl.load(residual + place + column, mask=mask, other=0.0)
        values = (added.to(tl.float32) + values.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + out_place + column, values, mask=mask)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=1, keep_dims=True) / SIZE + eps)
    normed = (exact * scale).to(values.dtype).to(tl.float32)
    result = (gain.to(tl.float32) * normed).to(out.dtype.element_ty)
    tl.store(out + out_place + column, result, mask=mask)


def unsupported_reason(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> str | None:
    """Why the kernel cannot serve these arguments; None if it can. Reads shapes and dtypes only."""
    tensors = (x, weight) if residual is None else (x, weight, residual)
    if any(t.dtype not in DTYPES for t in tensors):
        return f"a dtype other than {', '.join(map(str, DTYPES))}"
    if x.shape[-1] > MAX_SIZE:
        return f"rows of {x.shape[-1]} values, it takes {MAX_SIZE}"
    if not weight.is_contiguous():
        return "the weight is not contiguous"
    if residual is not None and residual.shape != x.shape:
        return "x and the residual differ in shape"
    if any(rows_of(t) is None for t in tensors):
        return "the last dim is strided, or more than two strides lead to the rows"
    return None


def default_config(num_rows: int, size: int) -> Config:
    """Rows a program and warps that suit the size."""
    block = triton.next_power_of_2(size)
    rows = 1
    while rows * block < TILE and num_rows // (2 * rows) >= 264:
        rows *= 2
    return Config(rows, min(16, max(1, rows * block // 512)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `reference.rms_norm`, which also serves what `unsupported_reason` names."""
    if (reason := unsupported_reason(x, weight)) is not None:
        note_plain_body("rms_norm", reason)
        return reference.rms_norm(x, weight, eps)
    return launch(x, weight, eps, None)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`, which also serves what `unsupported_reason` names."""
    if (reason := unsupported_reason(x, weight, residual)) is not None:
        note_plain_body("add_rms_norm", reason)
        return reference.add_rms_norm(x, residual, weight, eps)
    return launch(x, weight, eps, residual)


def launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    config: Config | None = None,
    is_pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel on arguments it supports.

    Returns:
        The normed rows, and `residual + x` (`x` itself without a residual).
    """
    total = x
    if residual is not None:
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    out = torch.empty_like(total, dtype=torch.promote_types(total.dtype, weight.dtype))
    rows = _known(rows_of(x))
    if not x.numel():
        return out, total
    other = x if residual is None else residual
    if config is None:
        config = default_config(rows.num_rows, x.shape[-1])
    is_pdl = is_pdl and has_pdl(x.device)
    _rms_norm_kernel[(triton.cdiv(rows.num_rows, config.rows),)](
        x,
        other,
        weight,
        out,
        total,
        rows.num_rows,
        eps,
        *rows[1:],
        *_known(rows_of(other))[1:],
        *_known(rows_of(out))[1:],
        SIZE=x.shape[-1],
        BLOCK=triton.next_power_of_2(x.shape[-1]),
        ROWS=config.rows,
        HAS_RESIDUAL=residual is not None,
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )
    return out, total


def _known(rows: Rows | None) -> Rows:
    assert rows is not None, "unsupported_reason lets through what rows_of cannot describe"
    return rows
