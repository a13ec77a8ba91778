// Units of a weight times x, summed by each warp on its own.
#pragma once
#include "weights.cuh"

struct Sums {
    float x[SIXTEENS][EIGHTS][4];

    METHOD void clear() {
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
                for (i32 i = 0; i < 4; i++) x[m][n][i] = 0.0f;
    }
};

DEVICE void multiply_chunk(const PackedArgs& args, const Unit& unit, const char* shared, const char* stage, i32 number, i32 which, Sums& sums) {
    u32 x[EIGHTS][PAIRS];
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++) load_x(args, shared, stage, n, number, which, x[n]);
    float x_sums[PAIRS / 8];  // of a lane's columns, 16 at a time
    if (LANE_SUMS && OFFSETS)
#pragma unroll
        for (i32 first = 0; first < PAIRS; first += 8) {
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (i32 i = first; i < min(first + 8, PAIRS); i += 2)
                multiply(part, Quad{{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00}}, x[0][i], x[0][i + 1]);  // by 1
            x_sums[first / 8] = part[0];
        }
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++) {
        u32 upper[PAIRS], lower[PAIRS];
        widen_chunk(unit.chunks[m][0][which], upper);
        widen_chunk(unit.chunks[m][1][which], lower);
        if (LANE_SUMS) {
            float upper_scales[SCALES], lower_scales[SCALES];
            sum_scales(unit.chunks[m][0][which], upper_scales);
            sum_scales(unit.chunks[m][1][which], lower_scales);
#pragma unroll
            for (i32 first = 0; first < PAIRS; first += 8) {  // of 16 columns
                float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (i32 i = first; i < min(first + 8, PAIRS); i += 2)
                    multiply(part, Quad{{upper[i], lower[i], upper[i + 1], lower[i + 1]}}, x[0][i], x[0][i + 1]);
                sums.x[m][0][0] += part[0] * upper_scales[first * SCALES / PAIRS];
                sums.x[m][0][2] += part[2] * lower_scales[first * SCALES / PAIRS];
                if (OFFSETS) {
                    sums.x[m][0][0] += x_sums[first / 8] * widen_value(unit.chunks[m][0][which].zero);
                    sums.x[m][0][2] += x_sums[first / 8] * widen_value(unit.chunks[m][1][which].zero);
                }
            }
            continue;
        }
#pragma unroll
        for (i32 i = 0; i < PAIRS; i += 2) {
            Quad w = {{upper[i], lower[i], upper[i + 1], lower[i + 1]}};
#pragma unroll
            for (i32 n = 0; n < EIGHTS; n++) multiply(sums.x[m][n], w, x[n][i], x[n][i + 1]);
        }
    }
}

// The scale of 128 columns of token `token`.
DEVICE float x_block_scale(const PackedArgs& args, const char* shared, i32 token, i32 number) {
    if (QUANT == BLOCK_SCALES)
        return token == 0 ? ((const float*)(shared + X_PLACE + args.padded_size * 2))[number] : 0.0f;
    bool is_there = token < args.num_tokens && number < args.x_scale_step;
    return !X_BLOCK_SCALES ? 1.0f : is_there ? args.x_scale[(i64)token * args.x_scale_step + number] : 0.0f;
}

DEVICE void multiply_unit(const PackedArgs& args, const Unit& unit, const char* shared, const char* stage, i32 number, Sums& sums) {
    if (!HAS_BLOCKS) {
        constexpr bool IS_SMALL = RING && !LANE_SUMS && SIXTEENS * EIGHTS == 1;  // then two sums, neither waits for the other
        Sums other;
        other.clear();
        multiply_chunk(args, unit, shared, stage, number, 0, sums);
        multiply_chunk(args, unit, shared, stage, number, 1, IS_SMALL ? other : sums);
        if (IS_SMALL)
#pragma unroll
            for (i32 i = 0; i < 4; i++) sums.x[0][0][i] += other.x[0][0][i];
        return;
    }
    Sums part;
    part.clear();
    multiply_chunk(args, unit, shared, stage, number, 0, part);
    multiply_chunk(args, unit, shared, stage, number, 1, part);
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
        for (i32 c = 0; c < 2; c++) {
            float x_scale = x_block_scale(args, shared, n * 8 + (lane_id() & 3) * 2 + c, number);
#pragma unroll
            for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
                for (i32 h = 0; h < 2; h++)
                    sums.x[m][n][h * 2 + c] += part.x[m][n][h * 2 + c] * (ROW_BLOCK ? unit.block_scales[m][h] * x_scale : x_scale);
        }
}

// Of one token only the lanes with its column have sums, or each lane those of its columns.
DEVICE void share_sums(Sums& sums, char* place) {
    if (LANE_SUMS)
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 i = 0; i < 4; i += 2)
#pragma unroll
                for (i32 step = 1; step < 4; step *= 2) sums.x[m][0][i] += __shfl_xor_sync(FULL, sums.x[m][0][i], step);
    if (SUMMED == 1 && (lane_id() & 3)) return;
    float* first = (float*)place + (warp_id() * ROWS + (lane_id() >> 2)) * PITCH + (SUMMED == 1 ? 0 : (lane_id() & 3) * 2);
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++)
                if (SUMMED > 1 || i % 2 == 0) first[(m * 16 + i / 2 * 8) * PITCH + n * 8 + i % 2] = sums.x[m][n][i];
}
