"""Triton kernels of `experts` for many tokens: tiles of sorted pairs times tiles of outputs.

The first kernel lists the tiles: each expert's pairs are cut into pieces of equal size, so how many
pieces there are is known on the device only. Launches have a program for the most there can be.
The rows of x are gathered by the loads of the first product. Its results lie sorted, those of the
second product pair by pair; `moe_stream.sum_pairs` adds them up.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.moe_config import PairTilesConfig
from compiled_engine.custom_ops.moe_device import activate, load_rows
from compiled_engine.custom_ops.moe_operands import ExpertOperands, common_constants
from compiled_engine.custom_ops.moe_stream import sum_pairs
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous

LIST_BLOCK = 256


def max_tiles(num_pairs: int, num_experts: int, pairs: int) -> int:
    """The most tiles that `num_pairs` pairs can make."""
    return min(num_pairs, num_pairs // pairs + min(num_experts, num_pairs))


@triton.jit
def list_tiles_kernel(
    offsets: tl.tensor, tiles: tl.tensor, num_tiles: tl.tensor, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Lists the expert and the first pair of every tile, -1 behind the last: tiles [num_tiles, 2].

    Grid: one program for each `BLOCK` tiles.
    """
    let_next_start(PDL)
    expert = tl.arange(0, PADDED)
    wait_for_previous(PDL)
    begin = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < EXPERTS, other=0)
    counts = (end - begin + PAIRS - 1) // PAIRS
    ends = tl.cumsum(counts, axis=0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_before = ends[None, :] <= tile[:, None]
    owner = tl.sum(is_before.to(tl.int32), axis=1)
    first_tile = tl.sum(tl.where(is_before, counts[None, :], 0), axis=1)
    first = tl.load(offsets + tl.minimum(owner, EXPERTS - 1)) + (tile - first_tile) * PAIRS
    is_there = tile < tl.sum(counts)
    mask = tile < num_tiles
    tl.store(tiles + 2 * tile, tl.where(is_there, owner, -1), mask=mask)
    tl.store(tiles + 2 * tile + 1, first, mask=mask)


@triton.jit
def _find(
    tiles: tl.tensor, num_tiles: tl.tensor, COLUMNS: tl.constexpr, SWATH: tl.constexpr
) -> tl.tensor:
    """Expert, first pair, and tile of outputs of this program."""
    program = tl.program_id(0)
    if SWATH == 1:
        tile = program // COLUMNS
        column = program % COLUMNS
    else:
        swath = program // (SWATH * COLUMNS)
        height = tl.minimum(num_tiles - swath * SWATH, SWATH)
        tile = swath * SWATH + program % (SWATH * COLUMNS) % height
        column = program % (SWATH * COLUMNS) // height
    return tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1), column


@triton.jit
def _load_weight(
    weight: tl.tensor, scale: tl.tensor, expert: tl.tensor, row: tl.tensor, column: tl.tensor,
    dtype: tl.constexpr, LAST: tl.constexpr, NUM_ROWS: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, IS_DESCRIPTOR: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows from `row` on, `LAST` at most: [ROWS, BLOCK]; what is past the last row is anything."""
    if IS_DESCRIPTOR:
        values = weight.load([expert * NUM_ROWS + row, column])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), LAST)
        values = load_rows(
            weight, scale, expert, rows, column, dtype, NUM_ROWS, SIZE, BLOCK, FORMAT, IN_ASSEMBLY
        )
    return values


@triton.jit
def _load_pairs(
    place: tl.tensor, column: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Columns of pairs' rows [pairs, BLOCK], 0 past the end."""
    at = column + tl.arange(0, BLOCK)[None, :]
    if SIZE % BLOCK == 0:
        values = tl.load(place[:, None] + at)
    else:
        values = tl.load(place[:, None] + at, mask=at < SIZE, other=0.0)
    return values


@triton.jit
def tiles_gate_up_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    order: tl.tensor, offsets: tl.tensor, tiles: tl.tensor, inner: tl.tensor, x_stride: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor, num_tiles: tl.tensor, K: tl.constexpr, SIZE: tl.constexpr,
    INNER: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SWATH: tl.constexpr, IS_DESCRIPTOR: tl.constexpr, IN_ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: the most tiles of pairs there can be, times tiles of outputs. inner: [pairs, INNER]."""
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_previous(PDL)
    expert, first, tile = _find(tiles, num_tiles, (INNER + OUTPUTS - 1) // OUTPUTS, SWATH)
    if expert >= 0:
        end = tl.load(offsets + expert + 1)
        at = first + tl.arange(0, PAIRS)
        token = tl.load(order + tl.minimum(at, end - 1)) // K
        place = x + token.to(tl.int64) * x_stride
        row = tile * OUTPUTS
        gate = tl.zeros((PAIRS, OUTPUTS), tl.float32)
        up = tl.zeros((PAIRS, OUTPUTS), tl.float32)
        for column in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
            values = _load_pairs(place, column, SIZE, BLOCK)
            w_gate = _load_weight(
                weight, scale, expert, row, column, dtype, INNER - 1, 2 * INNER, SIZE, OUTPUTS,
                BLOCK, FORMAT, IS_DESCRIPTOR, IN_ASSEMBLY,
            )  # fmt: skip
            w_up = _load_weight(
                weight, scale, expert, INNER + row, column, dtype, 2 * INNER - 1, 2 * INNER, SIZE,
                OUTPUTS, BLOCK, FORMAT, IS_DESCRIPTOR, IN_ASSEMBLY,
            )  # fmt: skip
            gate = tl.dot(values, w_gate.T, gate)
            up = tl.dot(values, w_up.T, up)
        if FORMAT == "nvfp4":
            gate *= tl.load(overall + expert * 2)
            up *= tl.load(overall + expert * 2 + 1)
        output = row + tl.arange(0, OUTPUTS)
        is_output = output < INNER
        if HAS_BIAS:
            added = bias + expert * (2 * INNER) + output
            gate += tl.load(added, mask=is_output, other=0.0).to(tl.float32)[None, :]
            up += tl.load(added + INNER, mask=is_output, other=0.0).to(tl.float32)[None, :]
        result = activate(gate, up, alpha, limit, CLAMPED).to(dtype)
        target = inner + at.to(tl.int64)[:, None] * INNER + output[None, :]
        tl.store(target, result, mask=(at < end)[:, None] & is_output[None, :])


@triton.jit
def tiles_down_kernel(
    inner: tl.tensor, weight: tl.tensor, scale: tl.tensor, overall: tl.tensor, bias: tl.tensor,
    order: tl.tensor, offsets: tl.tensor, tiles: tl.tensor, results: tl.tensor,
    num_tiles: tl.tensor, K: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SWATH: tl.constexpr, IS_DESCRIPTOR: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: as of `tiles_gate_up_kernel`. results: [pairs, SIZE], pair by pair, not sorted."""
    let_next_start(PDL)
    dtype: tl.constexpr = results.dtype.element_ty
    wait_for_previous(PDL)
    expert, first, tile = _find(tiles, num_tiles, (SIZE + OUTPUTS - 1) // OUTPUTS, SWATH)
    if expert >= 0:
        end = tl.load(offsets + expert + 1)
        at = first + tl.arange(0, PAIRS)
        sorted_pair = tl.minimum(at, end - 1)
        row = tile * OUTPUTS
        y = tl.zeros((PAIRS, OUTPUTS), tl.float32)
        for column in tl.range(0, INNER, BLOCK, num_stages=STAGES):
            if IS_DESCRIPTOR:
                values = inner.load([first, column])
            else:
                place = inner + sorted_pair.to(tl.int64) * INNER
                values = _load_pairs(place, column, INNER, BLOCK)
            w = _load_weight(
                weight, scale, expert, row, column, dtype, SIZE - 1, SIZE, INNER, OUTPUTS, BLOCK,
                FORMAT, IS_DESCRIPTOR, IN_ASSEMBLY,
            )  # fmt: skip
            y = tl.dot(values, w.T, y)
        if FORMAT == "nvfp4":
            y *= tl.load(overall + expert)
        output = row + tl.arange(0, OUTPUTS)
        is_output = output < SIZE
        if HAS_BIAS:
            added = tl.load(bias + expert * SIZE + output, mask=is_output, other=0.0)
            y += added.to(tl.float32)[None, :]
        pair = tl.load(order + sorted_pair)
        target = results + pair.to(tl.int64)[:, None] * SIZE + output[None, :]
        tl.store(target, y.to(dtype), mask=(at < end)[:, None] & is_output[None, :])


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _operand(weight: Tensor, config: PairTilesConfig) -> Any:
    """A weight [E, n, m], or its descriptor as [E * n, m]."""
    if not config.has_descriptors:
        return weight
    return _descriptor(weight.flatten(0, 1), config.outputs, config.block)


def list_tiles(operands: ExpertOperands, pairs: int) -> Tensor:
    """The tiles of `pairs` pairs, [most, 2] int32: expert and first pair; expert -1 for none."""
    num_tiles = max_tiles(operands.ids.numel(), operands.num_experts, pairs)
    tiles = operands.offsets.new_empty((num_tiles, 2))
    pdl = common_constants(operands)["PDL"]
    padded = triton.next_power_of_2(operands.num_experts)
    block = max(1, min(LIST_BLOCK, 4096 // padded))
    list_tiles_kernel[(triton.cdiv(num_tiles, block),)](
        operands.offsets, tiles, num_tiles,
        EXPERTS=operands.num_experts,
        PADDED=padded,
        PAIRS=pairs,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return tiles


def launch_tiles(
    operands: ExpertOperands, first: PairTilesConfig, second: PairTilesConfig
) -> Tensor:
    """As `reference_moe.experts`; the configs of the two products."""
    assert first.pairs == second.pairs, (first, second)
    x, num_pairs = operands.x, operands.ids.numel()
    constants = common_constants(operands)
    size, inner_size, pdl = constants["SIZE"], constants["INNER"], constants["PDL"]
    inner = x.new_empty((num_pairs, inner_size))
    results = x.new_empty((num_pairs, size))
    tiles = list_tiles(operands, first.pairs)
    tiles_gate_up_kernel[(tiles.shape[0] * triton.cdiv(inner_size, first.outputs),)](
        x, _operand(operands.gate_up, first), operands.scale(0), operands.global_scale(0),
        operands.bias(0), operands.order, operands.offsets, tiles, inner, x.stride(0),
        operands.alpha, operands.limit, tiles.shape[0],
        CLAMPED=operands.activation == "swiglu_clamped",
        launch_pdl=pdl,
        **constants,
        **_sizes(first),
    )  # fmt: skip
    left: Any = inner
    if second.has_descriptors:
        left = _descriptor(inner, second.pairs, second.block)
    tiles_down_kernel[(tiles.shape[0] * triton.cdiv(size, second.outputs),)](
        left, _operand(operands.down, second), operands.scale(1), operands.global_scale(1),
        operands.bias(1), operands.order, operands.offsets, tiles, results, tiles.shape[0],
        launch_pdl=pdl,
        **constants,
        **_sizes(second),
    )  # fmt: skip
    return sum_pairs(results, operands)


def _sizes(config: PairTilesConfig) -> dict[str, Any]:
    return {
        "PAIRS": config.pairs,
        "OUTPUTS": config.outputs,
        "BLOCK": config.block,
        "STAGES": config.stages,
        "SWATH": config.swath,
        "IS_DESCRIPTOR": config.has_descriptors,
        "num_warps": config.num_warps,
    }
