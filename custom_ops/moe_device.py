"""Device functions that the kernels of mixtures of experts share: activation, weights by format.

A weight is a matrix of rows; `FORMAT` says how a row of `SIZE` values lies in memory:
"" as it is; "mxfp4" two values a byte, the low nibble first, with an exponent a group of 32;
"nvfp4" likewise with an e4m3 scale a group of 16, and an fp32 scale a matrix that multiplies sums;
"fp8_block" e4m3, with an fp32 scale for 128 rows and 128 columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_BLOCK = tl.constexpr(128)  # rows, and columns, that share a scale in "fp8_block"


@triton.constexpr_function
def fp4_group(format: str) -> int:
    """Values that share a scale in a format of 4-bit floats; 1 of others."""
    return {"mxfp4": 32, "nvfp4": 16}.get(format, 1)


@triton.jit
def activate(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, CLAMPED: tl.constexpr
) -> tl.tensor:
    """What stands between an expert's two products, in fp32; see `reference.gated_activation`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate * up


@triton.jit
def unpack_fp4(packed: tl.tensor, IN_ASSEMBLY: tl.constexpr) -> tl.tensor:
    """The low and the high nibbles of bytes as fp16, each times 2^-14.

    The three bits below the sign are the lowest two of fp16's exponent and the first of its
    mantissa; values without an exponent are right too, because fp16 has none there either.
    """
    if IN_ASSEMBLY:
        # four bytes at a time, each in the upper half of 16 bits
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, 0, 0x1404;
            prmt.b32 b, $4, 0, 0x3424;
            shl.b32 c, a, 4;
            shl.b32 d, a, 1;
            and.b32 d, d, 0x0e000e00;
            lop3.b32 $0, c, 0x80008000, d, 0xea;
            shl.b32 c, b, 4;
            shl.b32 d, b, 1;
            and.b32 d, d, 0x0e000e00;
            lop3.b32 $1, c, 0x80008000, d, 0xea;
            shr.u32 d, a, 3;
            and.b32 d, d, 0x0e000e00;
            lop3.b32 $2, a, 0x80008000, d, 0xea;
            shr.u32 d, b, 3;
            and.b32 d, d, 0x0e000e00;
            lop3.b32 $3, b, 0x80008000, d, 0xea;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.uint16)
        low = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)
        wide = wide >> 4
        high = (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def fp4_scale(stored: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """What `unpack_fp4` gave is multiplied by, in fp32, from e4m3 or biased exponents (uint8)."""
    if GROUP == 16:
        scale = stored.to(tl.float32)
    else:
        wide = stored.to(tl.int32)
        bits = tl.where(wide == 0, 0x400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
        scale = bits.to(tl.float32, bitcast=True)
    return scale * 16384.0


@triton.jit
def dequantize_fp4(
    packed: tl.tensor, stored: tl.tensor, dtype: tl.constexpr, GROUP: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows [R, B] in `dtype` from bytes [R, B / 2] and scales [R, B / GROUP]."""
    ROWS: tl.constexpr = packed.shape[0]
    HALF: tl.constexpr = packed.shape[1]
    low, high = unpack_fp4(packed, IN_ASSEMBLY)
    values = tl.reshape(tl.join(low, high), (ROWS, 2 * HALF // GROUP, GROUP)).to(tl.float32)
    values = values * fp4_scale(stored, GROUP)[:, :, None]
    return tl.reshape(values.to(dtype), (ROWS, 2 * HALF))


@triton.jit
def load_rows(
    weight: tl.tensor,
    scale: tl.tensor,
    matrix: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    dtype: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Columns `column` to `column + BLOCK` of rows [R] of a matrix, in `dtype`; 0 past the end.

    weight: [matrices, NUM_ROWS, SIZE] as `FORMAT` packs it. Rows must exist.
    """
    IS_EVEN: tl.constexpr = SIZE % BLOCK == 0
    rows = matrix.to(tl.int64) * NUM_ROWS + row
    GROUP: tl.constexpr = fp4_group(FORMAT)
    if GROUP > 1:
        at = column // 2 + tl.arange(0, BLOCK // 2)[None, :]
        group = column // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
        packed_at = weight + rows[:, None] * (SIZE // 2) + at
        scale_at = scale + rows[:, None] * (SIZE // GROUP) + group
        if IS_EVEN:
            packed = tl.load(packed_at, eviction_policy="evict_first")
            stored = tl.load(scale_at)
        else:
            packed = tl.load(packed_at, mask=at < SIZE // 2, other=0, eviction_policy="evict_first")
            stored = tl.load(scale_at, mask=group < SIZE // GROUP, other=0.0)
        values = dequantize_fp4(packed, stored, dtype, GROUP, IN_ASSEMBLY)
    else:
        at = column + tl.arange(0, BLOCK)[None, :]
        place = weight + rows[:, None] * SIZE + at
        if IS_EVEN:
            values = tl.load(place, eviction_policy="evict_first")
        else:
            values = tl.load(place, mask=at < SIZE, other=0.0, eviction_policy="evict_first")
        if FORMAT == "fp8_block":
            SCALE_ROWS: tl.constexpr = (NUM_ROWS + FP8_BLOCK - 1) // FP8_BLOCK
            SCALES: tl.constexpr = (SIZE + FP8_BLOCK - 1) // FP8_BLOCK
            tl.static_assert(FP8_BLOCK % BLOCK == 0)
            scale_row = matrix.to(tl.int64) * SCALE_ROWS + row // FP8_BLOCK
            factor = tl.load(scale + scale_row * SCALES + column // FP8_BLOCK)
            values = (values.to(tl.float32) * factor[:, None]).to(dtype)
    return values
