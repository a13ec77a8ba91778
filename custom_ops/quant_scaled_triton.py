"""Triton kernel of `scaled_linear`: bytes times bytes on tensor cores, for many tokens.

    out[t, n] = sum_k q[t, k] weight[n, k] * scale of (t, k / 128) * scale of (n, k / 128) + bias[n]

Scales of 128 columns multiply the sum of each 128 columns, in fp32: a program's products of one
step. Scales of whole rows or of all multiply the sums at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.quant_scaled import ScaledOperands
from compiled_engine.custom_ops.triton_common import (
    has_pdl,
    let_next_start,
    wait_for_previous,
)

COLUMNS = 128  # of a step


class Config(NamedTuple):
    """Tokens and outputs of a tile, tiles of tokens in a row, stages, warps."""

    tokens: int = 128
    outputs: int = 128
    group: int = 8
    stages: int = 4
    num_warps: int = 8


@triton.jit
def _scaled_kernel(
    q: tl.tensor, q_scale: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor,
    out: tl.tensor, num_tokens: tl.tensor, num_outputs: tl.tensor, size: tl.tensor,
    stored: tl.tensor, q_columns: tl.tensor, columns: tl.tensor, Q_STEP: tl.constexpr,
    ROW_BLOCK: tl.constexpr, IN_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: tiles, `GROUP` tiles of tokens for each tile of outputs in turn.

    `Q_STEP` 0: one scale for all tokens; `ROW_BLOCK`: rows of the weight that share one, 0: all.
    """
    let_next_start(PDL)
    across = tl.cdiv(num_outputs, OUTPUTS)
    down = tl.cdiv(num_tokens, TOKENS)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    token = (group * GROUP + inside % height) * TOKENS + tl.arange(0, TOKENS)
    output = inside // height * OUTPUTS + tl.arange(0, OUTPUTS)
    # Past the end the last one is computed again and not stored.
    last_token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    last_output = tl.minimum(output, num_outputs - 1).to(tl.int64)
    k = tl.arange(0, STEP)
    left = q + last_token[:, None] * size + k[None, :]
    right = weight + last_output[None, :] * stored + k[:, None]
    wait_for_previous(PDL)
    IS_INTEGER: tl.constexpr = q.dtype.element_ty == tl.int8
    sums = tl.zeros((TOKENS, OUTPUTS), tl.int32 if IS_INTEGER else tl.float32)
    for step in tl.range(0, tl.cdiv(size, STEP), num_stages=STAGES):
        is_there = k < size - step * STEP
        a = tl.load(left + step * STEP, mask=is_there[None, :], other=0.0)
        b = tl.load(right + step * STEP, mask=is_there[:, None], other=0.0)
        if IN_BLOCKS:
            a_scale = tl.load(q_scale + last_token * (Q_STEP * q_columns) + step * Q_STEP)
            b_scale = tl.load(scale + last_output // ROW_BLOCK * columns + step)
            sums += tl.dot(a, b) * (a_scale[:, None] * b_scale[None, :])
        elif IS_INTEGER:
            sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(a, b, sums)
    y = sums.to(tl.float32)
    if not IN_BLOCKS:
        y *= tl.load(q_scale + last_token * Q_STEP)[:, None]
        if ROW_BLOCK > 0:
            y *= tl.load(scale + last_output)[None, :]
        else:
            y *= tl.load(scale)
    if HAS_BIAS:
        y += tl.load(bias + last_output).to(tl.float32)[None, :]
    mask = (token < num_tokens)[:, None] & (output < num_outputs)[None, :]
    places = out + last_token[:, None] * num_outputs + last_output[None, :]
    tl.store(places, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(
    sums: tl.tensor, q_scale: tl.tensor, scale: tl.tensor, bias: tl.tensor, out: tl.tensor,
    num_tokens: tl.tensor, num_outputs: tl.tensor, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: groups of `ROWS` tokens, blocks of outputs."""
    let_next_start(PDL)
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (token < num_tokens) & (output < num_outputs)
    wait_for_previous(PDL)
    place = token * num_outputs + output
    y = tl.load(sums + place, mask=mask, other=0).to(tl.float32)
    y *= tl.load(q_scale + token, mask=token < num_tokens, other=0.0)
    y *= tl.load(scale + output, mask=output < num_outputs, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def scale_sums(sums: Tensor, operands: ScaledOperands) -> Tensor:
    """int32 sums [T, n] of int8 times the scales of tokens and outputs, plus bias, in the dtype."""
    out = sums.new_empty(sums.shape, dtype=operands.dtype)
    num_tokens, num_outputs = sums.shape
    is_pdl = has_pdl(sums.device)
    rows, block = 4, 1024
    _scale_kernel[(triton.cdiv(num_tokens, rows), triton.cdiv(num_outputs, block))](
        sums,
        operands.q_scale,
        operands.weight_scale,
        sums if operands.bias is None else operands.bias,
        out,
        num_tokens,
        num_outputs,
        HAS_BIAS=operands.bias is not None,
        ROWS=rows,
        BLOCK=block,
        PDL=is_pdl,
        num_warps=8,
        launch_pdl=is_pdl,
    )
    return out


def default_config(num_tokens: int, num_outputs: int) -> Config:
    """Sizes that suit the product."""
    if num_tokens <= 64:
        return Config(64, 64, 1, 4, 4)
    is_large = num_tokens * num_outputs >= 132 * 128 * 256
    return Config(128, 256 if is_large else 128, 8, 3, 8)


def scaled_linear(operands: ScaledOperands, *, config: Config | None = None) -> Tensor:
    """As `reference_quant.scaled_linear`; if one operand has scales of blocks, both must."""
    q, q_scale, weight, weight_scale, bias, format, activation_format, dtype = operands
    num_tokens, size = q.shape
    out = q.new_empty((num_tokens, weight.shape[0]), dtype=dtype)
    if not out.numel():
        return out
    config = default_config(num_tokens, weight.shape[0]) if config is None else config
    is_pdl = has_pdl(q.device)
    in_blocks = activation_format == "fp8_block"
    tiles = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(weight.shape[0], config.outputs)
    _scaled_kernel[(tiles,)](
        q,
        q_scale,
        weight,
        weight_scale,
        q if bias is None else bias,
        out,
        num_tokens,
        weight.shape[0],
        size,
        weight.shape[1],
        q_scale.shape[-1],
        weight_scale.shape[-1],
        Q_STEP=1 if q_scale.dim() == 2 else 0,
        ROW_BLOCK={"fp8_tensor": 0, "fp8_block": 128}.get(format, 1),
        IN_BLOCKS=in_blocks,
        HAS_BIAS=bias is not None,
        TOKENS=config.tokens,
        OUTPUTS=config.outputs,
        STEP=COLUMNS,
        GROUP=config.group,
        STAGES=config.stages,
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )
    return out
