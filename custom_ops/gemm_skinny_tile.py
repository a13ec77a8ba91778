"""Triton kernel of `fused_linear` for 2 to 32 tokens, on tensor cores.

Formula: `out[t, n] = rstd[t] * sum_k weight[n, k] * (x[t, k] * g[k]) + bias[n]`, `rstd[t]` from the
sum of `x[t, k]^2` in the same loop; gated: silu of the gate's sum times the value's; plus
`residual[t, n]`. `x * g` is rounded to the weight's dtype for the tensor cores; everything else is
fp32, rounded once.

A program owns `ROWS` rows of the weight (gated: `ROWS / 2` pairs) for all tokens, or one of `SPLIT`
parts of their columns. The weight is the left operand, so the tokens are padded to 8, not to 16.
With `SPLIT > 1` every program leaves its sums in `partials`, and the one that comes last, by a
counter a tile, adds them up in order, so results do not depend on who that was.
Before it waits for the kernel that computes x, a program asks L2 for its first `L2_FIRST` columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.gemm_skinny_device import prefetch_rows, silu_times, weight_rows
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous


@triton.jit
def _finish(
    sums: tl.tensor,
    squares: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Norm, bias, gate and residual of complete sums [ROWS, TOKENS], and the store."""
    ROWS: tl.constexpr = sums.shape[0]
    TOKENS: tl.constexpr = sums.shape[1]
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if HAS_NORM:
        sums *= tl.rsqrt(squares / SIZE + eps)[None, :]
    if HAS_BIAS:
        rows = weight_rows(first, tl.arange(0, ROWS), num_outputs, GATED)
        sums += tl.load(bias + rows).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(sums, (OUTPUTS, 2, TOKENS)), (0, 2, 1))
        gate, value = tl.split(pairs)
        sums = silu_times(gate, value)
    tokens = tl.arange(0, TOKENS)[None, :]
    outputs = first + tl.arange(0, OUTPUTS)[:, None]
    mask = (outputs < num_outputs) & (tokens < num_tokens)
    if HAS_RESIDUAL:
        places = residual + tokens * residual_stride + outputs
        sums += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tokens * num_outputs + outputs, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _column_sums(squares: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """[BLOCK, TOKENS] to [BLOCK / GROUP, TOKENS]: sums of neighbours that one thread holds."""
    BLOCK: tl.constexpr = squares.shape[0]
    TOKENS: tl.constexpr = squares.shape[1]
    return tl.sum(tl.reshape(squares, (BLOCK // GROUP, GROUP, TOKENS)), axis=1)


@triton.jit
def _load_block(
    weights: tl.tensor,
    xs: tl.tensor,
    column: tl.tensor,
    is_token: tl.tensor,
    SIZE: tl.constexpr,
    IS_EVEN: tl.constexpr,
) -> tl.tensor:
    """The weight's block [ROWS, BLOCK] at `column` and that of x, [BLOCK, TOKENS]."""
    if IS_EVEN:
        w = tl.load(weights + column, eviction_policy="evict_first")
        values = tl.load(xs + column, mask=is_token, other=0.0, eviction_policy="evict_last")
    else:
        inside = tl.arange(0, weights.shape[1]) < SIZE - column
        w = tl.load(
            weights + column, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        mask = inside[:, None] & is_token
        values = tl.load(xs + column, mask=mask, other=0.0, eviction_policy="evict_last")
    return w, values


@triton.jit
def _sums(
    weights: tl.tensor,
    xs: tl.tensor,
    norm_weight: tl.tensor,
    start: tl.tensor,
    is_token: tl.tensor,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Sums [ROWS, TOKENS] over `BLOCKS` blocks of columns from `start` on; squares of x, [TOKENS].

    Up to 16 tokens the squares are the diagonal of a product on tensor cores.
    """
    ROWS: tl.constexpr = weights.shape[0]
    BLOCK: tl.constexpr = weights.shape[1]
    TOKENS: tl.constexpr = xs.shape[1]
    GRAM: tl.constexpr = TOKENS <= 16
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS if GRAM else BLOCK // 8, TOKENS), tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        column = start + block * BLOCK
        w, values = _load_block(weights, xs, column, is_token, SIZE, IS_EVEN)
        if HAS_NORM:
            columns = column + tl.arange(0, BLOCK)
            g = tl.load(norm_weight + columns, mask=columns < SIZE, other=0.0)
            exact = values.to(tl.float32)
            if GRAM:
                squares = tl.dot(tl.trans(values), values, squares)
            else:
                squares += _column_sums(exact * exact, 8)
            values = (exact * g.to(tl.float32)[:, None]).to(values.dtype)
        sums = tl.dot(w, values, sums)
    if GRAM:
        token = tl.arange(0, TOKENS)
        squares = tl.where(token[:, None] == token[None, :], squares, 0.0)
    return sums, tl.sum(squares, axis=0)


@triton.jit
def _join_parts(
    sums: tl.tensor,
    squares: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    tile: tl.tensor,
    part: tl.tensor,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    """Leaves this part's sums; the last part of a tile gets all of them, added up in order.

    partials: [tiles, SPLIT, ROWS + 1, TOKENS] fp32; the last row holds the squares.
    """
    ROWS: tl.constexpr = sums.shape[0]
    TOKENS: tl.constexpr = sums.shape[1]
    STEP: tl.constexpr = (ROWS + 1) * TOKENS
    tokens = tl.arange(0, TOKENS)
    slots = tl.arange(0, ROWS)[:, None] * TOKENS + tokens[None, :]
    base = partials + tile.to(tl.int64) * (SPLIT * STEP)
    tl.store(base + part * STEP + slots, sums)
    tl.store(base + part * STEP + ROWS * TOKENS + tokens, squares)
    tl.debug_barrier()  # the counter's release covers this thread's own writes only
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for i in tl.static_range(SPLIT):
            sums += tl.load(base + i * STEP + slots, cache_modifier=".cg")
            squares += tl.load(base + i * STEP + ROWS * TOKENS + tokens, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return sums, squares, is_last


@triton.jit
def tile_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm_weight: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    L2_FIRST: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid: `SPLIT` programs for each `ROWS` rows of the weight. See the module docstring."""
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (SIZE + BLOCK * SPLIT - 1) // (BLOCK * SPLIT)
    IS_EVEN: tl.constexpr = SIZE == BLOCKS * BLOCK * SPLIT
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first = tile * (ROWS // 2 if GATED else ROWS)
    start = part * (BLOCKS * BLOCK)
    if L2_FIRST > 0:
        prefetch_rows(weight, first, start, num_outputs, SIZE, GATED, ROWS, L2_FIRST, THREADS)
    rows = weight_rows(first, tl.arange(0, ROWS), num_outputs, GATED)
    columns = tl.arange(0, BLOCK)
    tokens = tl.arange(0, TOKENS)
    weights = weight + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
    xs = x + tokens[None, :] * x_stride + columns[:, None]
    is_token = (tokens < num_tokens)[None, :]
    wait_for_previous(PDL)
    sums, squares = _sums(
        weights, xs, norm_weight, start, is_token, SIZE, HAS_NORM, BLOCKS, IS_EVEN, STAGES
    )
    is_last = True
    if SPLIT > 1:
        sums, squares, is_last = _join_parts(sums, squares, partials, counters, tile, part, SPLIT)
    if is_last:
        _finish(
            sums, squares, bias, residual, out, first, num_tokens, num_outputs, residual_stride,
            eps, SIZE, GATED, HAS_BIAS, HAS_NORM, HAS_RESIDUAL,
        )  # fmt: skip
