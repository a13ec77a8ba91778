"""Triton kernels of `sparse_mlp` in front of its experts: norm and router, and the choice.

`router_kernel` computes the norm and the router's logits of up to 8 tokens and 16 experts; its
weights are on their way before the kernel in front has ended. `choose_kernel` then chooses experts,
and leaves a table that says by expert which tokens chose it, so that nothing has to be sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.moe_choice import (
    MAX_BLOCK_SIZE,
    ROUTER_EXPERTS,
    ROUTER_PARTS,
    ROUTER_TOKENS,
    router_part,
)
from compiled_engine.custom_ops.moe_route import Routing, choose_experts, score_tokens
from compiled_engine.custom_ops.triton_common import has_pdl, let_next_start, wait_for_previous

_TINY = tl.constexpr(1e-20)  # as in the reference


class RouterOperands(NamedTuple):
    """What stands in front of the experts; see `reference_moe.sparse_mlp`."""

    x: Tensor
    norm_weight: Tensor | None
    eps: float
    weight: Tensor
    bias: Tensor | None


@triton.jit
def router_kernel(
    x: tl.tensor, norm_weight: tl.tensor, weight: tl.tensor, bias: tl.tensor, normed: tl.tensor,
    logits: tl.tensor, num_tokens: tl.tensor, x_stride: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: tiles of `EXPERTS` experts, all those of `TOKENS` tokens in a row.

    normed: [T, SIZE], logits: [T, NUM_EXPERTS]. A warp has one of `PARTS` parts of the columns.
    """
    let_next_start(PDL)
    TILES: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    tile = tl.program_id(0) % TILES
    column = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    is_column = column < SIZE
    expert = tile * EXPERTS + tl.arange(0, EXPERTS)[None, :, None]
    mask = is_column & (expert < NUM_EXPERTS)
    w = tl.load(weight + expert * SIZE + column, mask=mask, other=0.0, eviction_policy="evict_last")
    token = tl.program_id(0) // TILES * TOKENS + tl.arange(0, TOKENS)[None, :, None]
    mask = is_column & (token < num_tokens)
    row = token.to(tl.int64)
    if HAS_NORM:
        gain = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0)
    if HAS_NORM:
        exact = values.to(tl.float32)
        squares = tl.sum(tl.sum(exact * exact, axis=2, keep_dims=True), axis=0, keep_dims=True)
        exact = (exact * tl.rsqrt(squares / SIZE + eps)).to(values.dtype).to(tl.float32)
        values = (gain * exact).to(values.dtype)
        if tile == 0:
            tl.store(normed + row * SIZE + column, values, mask=mask)
    parts = tl.dot(w, tl.trans(values, (0, 2, 1)), out_dtype=tl.float32)
    y = tl.sum(parts, axis=0)  # [EXPERTS, TOKENS]
    expert = tile * EXPERTS + tl.arange(0, EXPERTS)[:, None]
    token = tl.program_id(0) // TILES * TOKENS + tl.arange(0, TOKENS)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    mask = (expert < NUM_EXPERTS) & (token < num_tokens)
    tl.store(logits + token * NUM_EXPERTS + expert, y.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def choose_kernel(
    logits: tl.tensor, bias: tl.tensor, weights: tl.tensor, table: tl.tensor,
    num_tokens: tl.tensor, table_stride: tl.tensor, scale: tl.tensor, EXPERTS: tl.constexpr,
    K: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, PADDED_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: `ROWS` tokens each. weights: [T, K] fp32.

    table: [EXPERTS, table_stride] int8: which of token t's choices expert e is, -1 if none.
    """
    let_next_start(PDL)
    expert = tl.arange(0, PADDED)[None, :]
    column = tl.arange(0, PADDED_K)[None, :]
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    wait_for_previous(PDL)
    scores = score_tokens(logits, EXPERTS, token, expert, num_tokens, EXPERTS, SOFTMAX)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
    chosen, _, number = choose_experts(scores, choice, expert, K, EXPERTS, ROWS, PADDED, PADDED_K)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, axis=1, keep_dims=True) + _TINY)
    mask = (token < num_tokens) & (column < K)
    tl.store(weights + token * K + column, chosen * scale, mask=mask)
    mask = (token < num_tokens) & (expert < EXPERTS)
    tl.store(table + expert * table_stride + token, number.to(tl.int8), mask=mask)


def launch_router(operands: RouterOperands) -> tuple[Tensor, Tensor]:
    """The norm's result [T, h], `x` itself without a norm, and the logits [T, E]."""
    x, norm_weight, eps, weight, bias = operands
    num_tokens, size = x.shape
    assert size <= MAX_BLOCK_SIZE, (size, MAX_BLOCK_SIZE)
    num_experts = weight.shape[0]
    logits = x.new_empty((num_tokens, num_experts))
    normed = (
        x if norm_weight is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    )
    pdl = has_pdl(x.device)
    grid = triton.cdiv(num_experts, ROUTER_EXPERTS) * triton.cdiv(num_tokens, ROUTER_TOKENS)
    router_kernel[(grid,)](
        x, x if norm_weight is None else norm_weight, weight, x if bias is None else bias, normed,
        logits, num_tokens, x.stride(0), eps,
        SIZE=size,
        NUM_EXPERTS=num_experts,
        EXPERTS=ROUTER_EXPERTS,
        TOKENS=ROUTER_TOKENS,
        PARTS=ROUTER_PARTS,
        PART=router_part(size),
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=ROUTER_PARTS,
        launch_pdl=pdl,
    )  # fmt: skip
    return normed, logits


def launch_choose(
    logits: Tensor, score_bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """The weights [T, k] fp32 and the table [E, T] int8 of `choose_kernel`."""
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, routing.top_k), dtype=torch.float32)
    table = logits.new_empty((num_experts, num_tokens), dtype=torch.int8)
    padded, pdl = triton.next_power_of_2(num_experts), has_pdl(logits.device)
    choose_kernel[(num_tokens,)](
        logits, logits if score_bias is None else score_bias, weights, table, num_tokens,
        table.stride(0), float(routing.scale),
        EXPERTS=num_experts,
        K=routing.top_k,
        SOFTMAX=routing.scoring == "softmax",
        HAS_BIAS=score_bias is not None,
        RENORMALIZE=routing.renormalize,
        ROWS=1,
        PADDED=padded,
        PADDED_K=triton.next_power_of_2(routing.top_k),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip
    return weights, table
