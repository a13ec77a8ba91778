"""Triton kernel of `fused_linear` for one token.

Formula: `out[n] = rstd * sum_k weight[n, k] * (x[k] * g[k]) + bias[n]`, `rstd` from the sum of
`x[k]^2` in the same loop; gated: silu of the gate's sum times the value's; plus `residual[n]`. All
of it in fp32, rounded once.

A program owns `ROWS` rows of the weight, whole (gated: `ROWS / 2` pairs). The first `AHEAD` blocks
of columns are on their way to registers before the program waits for the kernel that computes x;
the memory then never rests between two products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.gemm_skinny_device import silu_times, weight_rows
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous


@triton.jit
def _load_columns(
    pointers: tl.tensor,
    columns: tl.tensor,
    first: tl.constexpr,
    SIZE: tl.constexpr,
    IS_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Loads one block of columns; what lies past the end of a row is 0."""
    BLOCK: tl.constexpr = columns.shape[columns.type.shape.__len__() - 1]
    policy: tl.constexpr = "evict_first" if IS_WEIGHT else "evict_last"
    if first + BLOCK <= SIZE:
        values = tl.load(pointers + first, eviction_policy=policy)
    else:
        values = tl.load(
            pointers + first, mask=columns + first < SIZE, other=0.0, eviction_policy=policy
        )
    return values


@triton.jit
def row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid: one program for each `ROWS` rows of the weight. See the module docstring."""
    let_next_start(PDL)
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    first = tl.program_id(0) * OUTPUTS
    rows = weight_rows(first, tl.arange(0, ROWS), num_outputs, GATED)
    columns = tl.arange(0, BLOCK)
    weights = weight + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]

    loaded: tl.tuple = ()
    for i in tl.static_range(AHEAD):
        loaded += (_load_columns(weights, columns[None, :], i * BLOCK, SIZE, True),)
    wait_for_previous(PDL)

    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            loaded += (_load_columns(weights, columns[None, :], (i + AHEAD) * BLOCK, SIZE, True),)
        values = _load_columns(x + columns, columns, i * BLOCK, SIZE, False).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            scale = _load_columns(norm_weight + columns, columns, i * BLOCK, SIZE, False)
            values *= scale.to(tl.float32)
        sums += loaded[i].to(tl.float32) * values[None, :]

    y = tl.sum(sums, axis=1)  # [ROWS]
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
    if HAS_BIAS:
        y += tl.load(bias + rows).to(tl.float32)
    if GATED:
        gate, value = tl.split(tl.reshape(y, (OUTPUTS, 2)))
        y = silu_times(gate, value)
    outputs = first + tl.arange(0, OUTPUTS)
    mask = outputs < num_outputs
    if HAS_RESIDUAL:
        y += tl.load(residual + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + outputs, y.to(out.dtype.element_ty), mask=mask)
