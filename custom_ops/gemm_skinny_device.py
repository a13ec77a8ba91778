"""Device functions of the skinny GEMM kernels: rows of a tile, L2 prefetch, gate.

Imports Triton, so only launchers may import it. Everything that is not plain Triton stands behind a
constexpr which is off in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(
    first: tl.tensor, slot: tl.tensor, num_outputs: tl.tensor, GATED: tl.constexpr
) -> tl.tensor:
    """Row of the weight that each slot of a program's tile holds.

    Gated: slots 2 i and 2 i + 1 hold the gate's and the value's row of output `first + i`. Slots
    past the last output hold the last one again.
    """
    if GATED:
        row = tl.minimum(first + slot // 2, num_outputs - 1) + (slot % 2) * num_outputs
    else:
        row = tl.minimum(first + slot, num_outputs - 1)
    return row


@triton.jit
def prefetch_rows(
    weight: tl.tensor,
    first: tl.tensor,
    column: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Asks L2 for up to `LENGTH` columns from `column` on, of each row of a program's tile.

    A bulk prefetch takes its address from a register of the whole warp, so the lanes that have one
    take turns: one lane a row, rows spread over the warps. `column`, `LENGTH` and `SIZE` are
    multiples of 8 values of 16 bits: addresses and lengths are multiples of 16 bytes.
    """
    LANES: tl.constexpr = max(THREADS, ROWS)
    SPREAD: tl.constexpr = LANES // ROWS
    lane = tl.arange(0, LANES)
    row = weight_rows(first, lane // SPREAD, num_outputs, GATED)
    length = tl.maximum(tl.minimum(SIZE - column, LENGTH), 0) * 2
    length = tl.where(lane % SPREAD == 0, length, 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred has_row;
        setp.ne.u32 has_row, $2, 0;
        @has_row cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [(weight + (row.to(tl.int64) * SIZE + column)).to(tl.uint64), length],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def silu_times(gate: tl.tensor, value: tl.tensor) -> tl.tensor:
    """`silu(gate) * value` in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * value
