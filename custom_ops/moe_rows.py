"""Triton kernels of `experts` for few tokens: every pair of token and expert on its own.

The first product gives each pair's inner values, `act(W_gate x, W_up x)`; a program owns some of
one pair. In the second a program owns some outputs of one token and goes through its experts, whose
weighted products it adds up in order. All of it in fp32; inner values are rounded to x's dtype.

The first kernel cannot know its weights before the router has run. It lets the second one start
only then, so the second knows the experts too, and asks for its weights before it waits for the
first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.moe_config import RowsConfig
from compiled_engine.custom_ops.moe_device import (
    FP8_BLOCK,
    activate,
    fp4_group,
    fp4_scale,
    unpack_fp4,
)
from compiled_engine.custom_ops.moe_operands import ExpertOperands, common_constants
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous


@triton.jit
def _load(
    weight: tl.tensor, scale: tl.tensor, matrix: tl.tensor, row: tl.tensor, first: tl.constexpr,
    NUM_ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Columns from `first` on of rows [R] of a matrix, as they lie in memory, and their scales.

    What lies past the end of a row is 0. Plain weights have no scales: the second is the first.
    """
    rows = matrix.to(tl.int64) * NUM_ROWS + row
    GROUP: tl.constexpr = fp4_group(FORMAT)
    if GROUP > 1:
        at = first // 2 + tl.arange(0, BLOCK // 2)[None, :]
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
        place = weight + rows[:, None] * (SIZE // 2) + at
        scale_place = scale + rows[:, None] * (SIZE // GROUP) + group
        if first + BLOCK <= SIZE:
            values = tl.load(place, eviction_policy="evict_first")
            factors = tl.load(scale_place)
        else:
            values = tl.load(place, mask=at < SIZE // 2, other=0, eviction_policy="evict_first")
            factors = tl.load(scale_place, mask=group < SIZE // GROUP, other=0.0)
    else:
        at = first + tl.arange(0, BLOCK)[None, :]
        place = weight + rows[:, None] * SIZE + at
        if first + BLOCK <= SIZE:
            values = tl.load(place, eviction_policy="evict_first")
        else:
            values = tl.load(place, mask=at < SIZE, other=0.0, eviction_policy="evict_first")
        factors = values
        if FORMAT == "fp8_block":
            tl.static_assert(FP8_BLOCK % BLOCK == 0)
            scale_row = matrix.to(tl.int64) * (-(-NUM_ROWS // FP8_BLOCK)) + row // FP8_BLOCK
            factors = tl.load(scale + scale_row * (-(-SIZE // FP8_BLOCK)) + first // FP8_BLOCK)
    return values, factors


@triton.jit
def _load_x(
    x: tl.tensor, first: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Values [BLOCK] of x in fp32, 0 past the end."""
    column = first + tl.arange(0, BLOCK)
    if first + BLOCK <= SIZE:
        values = tl.load(x + column)
    else:
        values = tl.load(x + column, mask=column < SIZE, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _multiply(
    values: tl.tensor, factors: tl.tensor, x: tl.tensor, FORMAT: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of a block with x [BLOCK], of which sums over the last dim are still to be taken."""
    BLOCK: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = values.shape[0]
    GROUP: tl.constexpr = fp4_group(FORMAT)
    if GROUP > 1:
        HALF: tl.constexpr = GROUP // 2
        even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
        low, high = unpack_fp4(values, IN_ASSEMBLY)
        both = low.to(tl.float32) * even[None, :] + high.to(tl.float32) * odd[None, :]
        sums = tl.sum(tl.reshape(both, (ROWS, BLOCK // GROUP, HALF)), axis=2)
        products = sums * fp4_scale(factors, GROUP)
    elif FORMAT == "fp8_block":
        products = values.to(tl.float32) * x[None, :] * factors[:, None]
    else:
        products = values.to(tl.float32) * x[None, :]
    return products


@triton.jit
def rows_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    ids: tl.tensor, inner: tl.tensor, x_stride: tl.tensor, alpha: tl.tensor, limit: tl.tensor,
    K: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr, IN_ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: programs for each pair's `OUTPUTS` inner values, all those of a pair in a row.

    inner: [pairs, INNER].
    """
    TILES: tl.constexpr = (INNER + OUTPUTS - 1) // OUTPUTS
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    WIDTH: tl.constexpr = BLOCK // fp4_group(FORMAT)
    pair = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * OUTPUTS
    slot = tl.arange(0, 2 * OUTPUTS)
    row = tl.minimum(first + slot // 2, INNER - 1) + slot % 2 * INNER  # gate and up by turns
    wait_for_previous(PDL)
    expert = tl.load(ids + pair)
    let_next_start(PDL)
    loaded: tl.tuple = ()
    factors: tl.tuple = ()
    for i in tl.static_range(AHEAD):
        values, factor = _load(
            weight, scale, expert, row, i * BLOCK, 2 * INNER, SIZE, BLOCK, FORMAT
        )
        loaded += (values,)
        factors += (factor,)
    x += (pair // K).to(tl.int64) * x_stride
    sums = tl.zeros((2 * OUTPUTS, WIDTH), tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            values, factor = _load(
                weight, scale, expert, row, (i + AHEAD) * BLOCK, 2 * INNER, SIZE, BLOCK, FORMAT
            )
            loaded += (values,)
            factors += (factor,)
        values = _load_x(x, i * BLOCK, SIZE, BLOCK)
        sums += _multiply(loaded[i], factors[i], values, FORMAT, IN_ASSEMBLY)
    y = tl.sum(sums, axis=1)
    if FORMAT == "nvfp4":
        y *= tl.load(overall + expert * 2 + slot % 2)
    if HAS_BIAS:
        y += tl.load(bias + expert * (2 * INNER) + row).to(tl.float32)
    gate, up = tl.split(tl.reshape(y, (OUTPUTS, 2)))
    result = activate(gate, up, alpha, limit, CLAMPED).to(inner.dtype.element_ty)
    output = first + tl.arange(0, OUTPUTS)
    tl.store(inner + pair.to(tl.int64) * INNER + output, result, mask=output < INNER)


@triton.jit
def rows_down_kernel(
    inner: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    weights: tl.tensor, ids: tl.tensor, residual: tl.tensor, out: tl.tensor,
    residual_stride: tl.tensor, HAS_RESIDUAL: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    INNER: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, IN_ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: programs for each token's `OUTPUTS` values, all those of a token in a row.

    inner: [tokens * K, INNER]. weights and ids were written before the kernel in front of this one
    let it start, so they can be read before the wait. out: [tokens, SIZE].
    """
    let_next_start(PDL)
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    PARTS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    BLOCKS: tl.constexpr = K * PARTS
    WIDTH: tl.constexpr = BLOCK // fp4_group(FORMAT)
    token = tl.program_id(0) // TILES
    output = tl.program_id(0) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(output, SIZE - 1)
    experts: tl.tuple = ()
    shares: tl.tuple = ()
    for j in tl.static_range(K):
        experts += (tl.load(ids + token * K + j, volatile=True),)
        shares += (tl.load(weights + token * K + j, volatile=True),)
    loaded: tl.tuple = ()
    factors: tl.tuple = ()
    for i in tl.static_range(AHEAD):
        values, factor = _load(
            weight, scale, experts[i // PARTS], row, i % PARTS * BLOCK, SIZE, INNER, BLOCK, FORMAT
        )
        loaded += (values,)
        factors += (factor,)
    wait_for_previous(PDL)
    inner += token.to(tl.int64) * (K * INNER)
    sums = tl.zeros((OUTPUTS, WIDTH), tl.float32)
    y = tl.zeros((OUTPUTS,), tl.float32)
    for i in tl.static_range(BLOCKS):
        if i + AHEAD < BLOCKS:
            values, factor = _load(
                weight, scale, experts[(i + AHEAD) // PARTS], row, (i + AHEAD) % PARTS * BLOCK,
                SIZE, INNER, BLOCK, FORMAT,
            )  # fmt: skip
            loaded += (values,)
            factors += (factor,)
        values = _load_x(inner + i // PARTS * INNER, i % PARTS * BLOCK, INNER, BLOCK)
        values = values * shares[i // PARTS]
        if FORMAT == "nvfp4":
            values = values * tl.load(overall + experts[i // PARTS])
        sums += _multiply(loaded[i], factors[i], values, FORMAT, IN_ASSEMBLY)
        if HAS_BIAS and i % PARTS == 0:
            added = tl.load(bias + experts[i // PARTS] * SIZE + row).to(tl.float32)
            y += shares[i // PARTS] * added
    y += tl.sum(sums, axis=1)
    if HAS_RESIDUAL:
        at = residual + token.to(tl.int64) * residual_stride + output
        y += tl.load(at, mask=output < SIZE, other=0.0).to(tl.float32)
    place = out + token.to(tl.int64) * SIZE + output
    tl.store(place, y.to(out.dtype.element_ty), mask=output < SIZE)


def launch_rows(operands: ExpertOperands, first: RowsConfig, second: RowsConfig) -> Tensor:
    """As `reference_moe.experts`, and the residual if there is; the configs of the products."""
    x, num_pairs = operands.x, operands.ids.numel()
    constants = common_constants(operands)
    pdl, size, inner_size = constants["PDL"], constants["SIZE"], constants["INNER"]
    inner = x.new_empty((num_pairs, inner_size))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(size, first.block)
    rows_gate_up_kernel[(num_pairs * triton.cdiv(inner_size, first.outputs),)](
        x, operands.gate_up, operands.scale(0), operands.global_scale(0), operands.bias(0),
        operands.ids, inner, x.stride(0), operands.alpha, operands.limit,
        CLAMPED=operands.activation == "swiglu_clamped",
        OUTPUTS=first.outputs,
        BLOCK=first.block,
        AHEAD=min(first.ahead, blocks),
        num_warps=first.num_warps,
        launch_pdl=pdl,
        **constants,
    )  # fmt: skip
    blocks = operands.top_k * triton.cdiv(inner_size, second.block)
    rows_down_kernel[(x.shape[0] * triton.cdiv(size, second.outputs),)](
        inner, operands.down, operands.scale(1), operands.global_scale(1), operands.bias(1),
        operands.weights, operands.ids, operands.residual_or_x, out,
        operands.residual_or_x.stride(0),
        HAS_RESIDUAL=operands.residual is not None,
        OUTPUTS=second.outputs,
        BLOCK=second.block,
        AHEAD=min(second.ahead, blocks),
        num_warps=second.num_warps,
        launch_pdl=pdl,
        **constants,
    )  # fmt: skip
    return out
