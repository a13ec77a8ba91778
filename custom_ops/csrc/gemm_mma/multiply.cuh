// The warps that multiply: 16 rows of the weight times 8 tokens at a time.
#pragma once
#include "args.cuh"

#ifndef CUDA_EMULATOR
// Products of two pairs of 16-bit values, rounded once.
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 result;
#if HALF
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));  // plus -0
#endif
    return result;
}
#endif

// What a warp has of a tile.
struct Sums {
    float products[GROUPS][EIGHTS][4];
    float squares[EIGHTS][4];  // of x: what each token has in common with each of its 8

    METHOD void clear() {
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                squares[n][i] = 0.0f;
#pragma unroll
                for (i32 m = 0; m < GROUPS; m++) products[m][n][i] = 0.0f;
            }
    }
};

DEVICE i32 k_warp() { return warp_id() / ROW_WARPS; }
DEVICE i32 row_warp() { return warp_id() % ROW_WARPS; }

// Adds the squares of 32 columns of x to the sums, and multiplies x by the norm's weight.
DEVICE void scale_x(Sums& sums, Quad (&x)[EIGHTS], const char* scales) {
    Quad scale = load_matrices(scales + (lane_id() >> 3) * 16);  // 8 equal rows
    if (row_warp() == 0)
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i += 2)
                multiply(sums.squares[n], Quad{{x[n].x[i], 0, x[n].x[i + 1], 0}}, x[n].x[i], x[n].x[i + 1]);
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
        for (i32 i = 0; i < 4; i++) x[n].x[i] = multiply_pairs(x[n].x[i], scale.x[i]);
}

// Adds a block's products; a warp has WARP_COLUMNS columns of it.
DEVICE void multiply_block(Sums& sums, const char* weights, const char* x) {
    i32 lane = lane_id();
    // where this lane's row of 8 matrices is, in the first step; steps differ in the swizzled bits
    i32 row = (row_warp() * (GROUPS * 16) + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    i32 token = (lane & 7) * 128 + (((lane >> 3) ^ (lane & 7)) << 4);
#pragma unroll
    for (i32 step = 0; step < WARP_COLUMNS; step += 32) {
        i32 column = k_warp() * WARP_COLUMNS + step, slab = column / SLAB, odd = column / 32 & 1;
        Quad values[EIGHTS];
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
            values[n] = load_matrices(x + slab * (TOKENS * 128) + n * 1024 + (token ^ odd << 6));
        if (HAS_NORM) scale_x(sums, values, x + SCALES_PLACE + column * 2);
#pragma unroll
        for (i32 half = 0; half < 2; half++)
#pragma unroll
            for (i32 m = 0; m < GROUPS; m++) {
                Quad w = load_matrices(weights + slab * (ROWS * 128) + m * 2048 + (row ^ (odd * 2 + half) << 5));
#pragma unroll
                for (i32 n = 0; n < EIGHTS; n++)
                    multiply(sums.products[m][n], w, values[n].x[half * 2], values[n].x[half * 2 + 1]);
            }
    }
}

// Writes a warp's sums to shared memory.
DEVICE void share_sums(const Sums& sums, const Shared& shared) {
    i32 lane = lane_id();
    float* place = shared.sums() + (k_warp() * TOKENS + (lane & 3) * 2) * PITCH;
    place += row_warp() * (GROUPS * 16) + (lane >> 2);
#pragma unroll
    for (i32 m = 0; m < GROUPS; m++)
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++) {
            float* at = place + n * 8 * PITCH + m * 16;
            at[0] = sums.products[m][n][0];
            at[PITCH] = sums.products[m][n][1];
            at[8] = sums.products[m][n][2];
            at[PITCH + 8] = sums.products[m][n][3];
        }
    // of the 8 by 8 products of tokens, the diagonal: token lane / 4 is column 2 * (lane % 4) or the next
    if (HAS_NORM && row_warp() == 0 && lane >> 3 == (lane & 3))
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
            shared.squares()[k_warp() * TOKENS + n * 8 + (lane >> 2)] =
                lane & 4 ? sums.squares[n][1] : sums.squares[n][0];
}
