"""Triton kernels of `experts` that read the weights of every expert in use once, for some tokens.

A program owns some rows of one expert's weights and multiplies them, as left operands, with the
pairs of that expert, of which there are few: 8 to 32 at a time. Programs of experts that nobody
chose end at once. The second product leaves a value for each pair, rounded as the reference's; a
third kernel adds up those of a token, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.moe_config import StreamConfig
from compiled_engine.custom_ops.moe_device import activate, load_rows
from compiled_engine.custom_ops.moe_operands import ExpertOperands, common_constants
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous

SUM_BLOCK = 1024


@triton.jit
def _load_pairs(
    place: tl.tensor, is_pair: tl.tensor, first: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Columns from `first` on of pairs' rows, turned: [BLOCK, pairs]; 0 for what is not there."""
    column = first + tl.arange(0, BLOCK)[:, None]
    mask = is_pair[None, :]
    if SIZE % BLOCK != 0:
        mask = mask & (column < SIZE)
    return tl.load(place[None, :] + column, mask=mask, other=0.0)


@triton.jit
def _listed(
    table: tl.tensor, expert: tl.tensor, num_tokens: tl.tensor, K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """An expert's pairs by token, their place among them, both [1, TOKENS], and how many."""
    token = tl.arange(0, TOKENS)[None, :]
    at = table + expert * num_tokens + token
    number = tl.load(at, mask=token < num_tokens, other=-1, volatile=True).to(tl.int32)
    chosen = (number >= 0).to(tl.int32)
    place = tl.where(number >= 0, tl.cumsum(chosen, axis=1) - 1, -1)
    return token * K + number, place, tl.sum(tl.sum(chosen, axis=1), axis=0)


@triton.jit
def _picked(pair: tl.tensor, place: tl.tensor, at: tl.tensor) -> tl.tensor:
    """The pairs at the places `at` [PAIRS], 0 where there is none."""
    return tl.sum(tl.where(place == at[:, None], pair, 0), axis=1)


@triton.jit
def stream_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    order: tl.tensor, offsets: tl.tensor, inner: tl.tensor, x_stride: tl.tensor, alpha: tl.tensor,
    limit: tl.tensor, num_tokens: tl.tensor, TOKENS: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, OUTPUTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, IN_ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: programs for each expert's `OUTPUTS` inner values, all those of an expert in a row.

    inner: [pairs, INNER], in the order of `order`. With `TOKENS`, the number of tokens rounded up,
    `order` is the table of `choose_kernel`, and inner is in the order of pairs.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    expert = tl.program_id(0) // TILES
    output = tl.program_id(0) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(output, INNER - 1)
    wait_for_previous(PDL)
    let_next_start(PDL)
    if TOKENS > 0:
        listed, listed_at, end = _listed(order, expert, num_tokens, K, TOKENS)
        begin = 0
    else:
        begin = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
    for first in range(begin, end, PAIRS):
        at = first + tl.arange(0, PAIRS)
        is_pair = at < end
        if TOKENS > 0:
            at = _picked(listed, listed_at, at)
            token = at // K
        else:
            token = tl.load(order + at, mask=is_pair, other=0) // K
        place = x + token.to(tl.int64) * x_stride
        gate = tl.zeros((OUTPUTS, PAIRS), tl.float32)
        up = tl.zeros((OUTPUTS, PAIRS), tl.float32)
        for column in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
            w_gate = load_rows(
                weight, scale, expert, row, column, dtype, 2 * INNER, SIZE, BLOCK, FORMAT,
                IN_ASSEMBLY,
            )  # fmt: skip
            w_up = load_rows(
                weight, scale, expert, row + INNER, column, dtype, 2 * INNER, SIZE, BLOCK, FORMAT,
                IN_ASSEMBLY,
            )  # fmt: skip
            values = _load_pairs(place, is_pair, column, SIZE, BLOCK)
            gate = tl.dot(w_gate, values, gate)
            up = tl.dot(w_up, values, up)
        if FORMAT == "nvfp4":
            gate *= tl.load(overall + expert * 2)
            up *= tl.load(overall + expert * 2 + 1)
        if HAS_BIAS:
            gate += tl.load(bias + expert * (2 * INNER) + row).to(tl.float32)[:, None]
            up += tl.load(bias + expert * (2 * INNER) + INNER + row).to(tl.float32)[:, None]
        result = activate(gate, up, alpha, limit, CLAMPED).to(dtype)
        target = inner + at.to(tl.int64)[None, :] * INNER + output[:, None]
        tl.store(target, result, mask=is_pair[None, :] & (output < INNER)[:, None])


@triton.jit
def stream_down_kernel(
    inner: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    order: tl.tensor, offsets: tl.tensor, results: tl.tensor, num_tokens: tl.tensor,
    TOKENS: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, IN_ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: programs for each expert's `OUTPUTS` values, all those of an expert in a row.

    inner: as the kernel before left it. results: [pairs, SIZE], pair by pair, not sorted. Offsets,
    or the table, were written before the kernel in front of this one let it start.
    """
    let_next_start(PDL)
    dtype: tl.constexpr = results.dtype.element_ty
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    expert = tl.program_id(0) // TILES
    output = tl.program_id(0) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(output, SIZE - 1)
    if TOKENS > 0:
        listed, listed_at, end = _listed(order, expert, num_tokens, K, TOKENS)
        begin = 0
    else:
        begin = tl.load(offsets + expert, volatile=True)
        end = tl.load(offsets + expert + 1, volatile=True)
    wait_for_previous(PDL)
    for first in range(begin, end, PAIRS):
        at = first + tl.arange(0, PAIRS)
        is_pair = at < end
        if TOKENS > 0:
            at = _picked(listed, listed_at, at)
        place = inner + at.to(tl.int64) * INNER
        y = tl.zeros((OUTPUTS, PAIRS), tl.float32)
        for column in tl.range(0, INNER, BLOCK, num_stages=STAGES):
            w = load_rows(
                weight, scale, expert, row, column, dtype, SIZE, INNER, BLOCK, FORMAT, IN_ASSEMBLY
            )
            values = _load_pairs(place, is_pair, column, INNER, BLOCK)
            y = tl.dot(w, values, y)
        if FORMAT == "nvfp4":
            y *= tl.load(overall + expert)
        if HAS_BIAS:
            y += tl.load(bias + expert * SIZE + row).to(tl.float32)[:, None]
        pair = at
        if TOKENS == 0:
            pair = tl.load(order + at, mask=is_pair, other=0)
        target = results + pair.to(tl.int64)[None, :] * SIZE + output[:, None]
        tl.store(target, y.to(dtype), mask=is_pair[None, :] & (output < SIZE)[:, None])


@triton.jit
def sum_kernel(
    results: tl.tensor, weights: tl.tensor, residual: tl.tensor, out: tl.tensor,
    residual_stride: tl.tensor, K: tl.constexpr, SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`out[t] = residual[t] + sum_j weights[t, j] * results[t * K + j]`, in fp32, rounded once.

    Grid: programs for each token's `BLOCK` columns, all those of a token in a row.
    """
    let_next_start(PDL)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        values = tl.load(results + (token * K + j) * SIZE + column, mask=mask, other=0.0)
        total += tl.load(weights + token * K + j) * values.to(tl.float32)
    if HAS_RESIDUAL:
        added = tl.load(residual + token * residual_stride + column, mask=mask, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=mask)


def sum_pairs(results: Tensor, operands: ExpertOperands) -> Tensor:
    """The weighted sums [T, h] of each token's pairs [T * k, h], and the residual if there is."""
    x, pdl = operands.x, common_constants(operands)["PDL"]
    num_tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(SUM_BLOCK, triton.next_power_of_2(size))
    sum_kernel[(num_tokens * triton.cdiv(size, block),)](
        results, operands.weights, operands.residual_or_x, out, operands.residual_or_x.stride(0),
        K=operands.top_k,
        SIZE=size,
        HAS_RESIDUAL=operands.residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, block // 256),
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def launch_stream(operands: ExpertOperands, first: StreamConfig, second: StreamConfig) -> Tensor:
    """As `reference_moe.experts`; the configs of the two products.

    `operands.order` may be the table of `choose_kernel`, int8; then ids and offsets are not read.
    """
    x, num_pairs = operands.x, operands.weights.numel()
    num_tokens = x.shape[0]
    is_table = operands.order.dtype == torch.int8
    tokens = max(16, triton.next_power_of_2(num_tokens)) if is_table else 0
    constants = common_constants(operands)
    size, inner_size, pdl = constants["SIZE"], constants["INNER"], constants["PDL"]
    inner = x.new_empty((num_pairs, inner_size))
    results = x.new_empty((num_pairs, size))
    outputs = first.rows // 2
    stream_gate_up_kernel[(operands.num_experts * triton.cdiv(inner_size, outputs),)](
        x, operands.gate_up, operands.scale(0), operands.global_scale(0), operands.bias(0),
        operands.order, operands.offsets, inner, x.stride(0), operands.alpha, operands.limit,
        num_tokens,
        TOKENS=tokens,
        CLAMPED=operands.activation == "swiglu_clamped",
        OUTPUTS=outputs,
        PAIRS=first.pairs,
        BLOCK=first.block,
        STAGES=first.stages,
        num_warps=first.num_warps,
        launch_pdl=pdl,
        **constants,
    )  # fmt: skip
    stream_down_kernel[(operands.num_experts * triton.cdiv(size, second.rows),)](
        inner, operands.down, operands.scale(1), operands.global_scale(1), operands.bias(1),
        operands.order, operands.offsets, results, num_tokens,
        TOKENS=tokens,
        OUTPUTS=second.rows,
        PAIRS=second.pairs,
        BLOCK=second.block,
        STAGES=second.stages,
        num_warps=second.num_warps,
        launch_pdl=pdl,
        **constants,
    )  # fmt: skip
    return sum_pairs(results, operands)
