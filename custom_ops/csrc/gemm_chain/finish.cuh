// From complete sums to outputs: norm, bias, gate and residual in fp32, rounded once.
//
// A product's sums lie with the outputs of a token in different lanes. They are rounded to 16 bits and
// turned around as matrices of 8 outputs and 8 tokens, after which a lane has two neighbours of a token;
// residuals come in by the same way.
#pragma once
#include "args.cuh"

// The 16 rows of a tile that a warp has.
struct Rows {
    i32 output;     // the first
    i32 halves;     // of 8 outputs
    float bias[2];  // of the rows of this lane
};

DEVICE Rows rows_of(const Segment& s, i32 tile) {
    Rows rows;
    i32 row = lane_id() / 4;
    rows.halves = s.is_gated ? 1 : 2;
    rows.output = tile * s.outputs() + warp_id() * 8 * rows.halves;
    rows.bias[0] = rows.bias[1] = 0.0f;
    if (s.bias && rows.output + row < s.num_outputs) {
        i32 first = rows.output + row, second = s.is_gated ? s.num_outputs + first : min(first + 8, s.num_outputs - 1);
        rows.bias[0] = widen(((const unsigned short*)s.bias)[first]);
        rows.bias[1] = widen(((const unsigned short*)s.bias)[second]);
    }
    return rows;
}

// Where a lane's two neighbours of a half are, for a group of 8 tokens.
struct Pair {
    i32 token, output;
    i32 count;  // that exist

    METHOD Pair(const ChainArgs& args, const Segment& s, const Rows& rows, i32 eighth, i32 half) {
        token = eighth * 8 + lane_id() / 4;
        output = rows.output + half * 8 + (lane_id() & 3) * 2;
        count = token < args.num_tokens ? min(max(s.num_outputs - output, 0), 2) : 0;
    }
};

DEVICE u32 load_pair(const char* at, i32 count, bool is_paired) {
    if (count == 2 && is_paired) return load_fresh((const u32*)at);
    u32 result = 0;
    if (count > 0) result = load_fresh_half(at);
    if (count > 1) result |= load_fresh_half(at + 2) << 16;
    return result;
}
DEVICE void store_pair(char* at, i32 count, bool is_paired, u32 values) {
    if (count == 2 && is_paired) {
        *(u32*)at = values;
        return;
    }
    if (count > 0) *(unsigned short*)at = (unsigned short)values;
    if (count > 1) *(unsigned short*)(at + 2) = (unsigned short)(values >> 16);
}

// What is added to a warp's outputs of 8 tokens, as it lies in memory.
struct Added {
    u32 values[2];

    METHOD void load(const ChainArgs& args, const Segment& s, const Rows& rows, i32 eighth) {
#pragma unroll
        for (i32 half = 0; half < 2; half++) {
            values[half] = 0;
            if (!s.residual || half >= rows.halves) continue;
            Pair pair(args, s, rows, eighth, half);
            values[half] = load_pair(s.residual + (pair.token * s.residual_stride + pair.output) * 2, pair.count, args.is_paired);
        }
    }
};

DEVICE float silu_times(float gate, float value) { return gate / (1.0f + power_of_two(gate * -LOG2E)) * value; }

// Stores two outputs, and what the norm after this product needs of them; returns the sum of their squares.
DEVICE float store_outputs(const ChainArgs& args, const Segment& s, const Pair& pair, u32 values) {
    i64 at = ((i64)pair.token * s.num_outputs + pair.output) * 2;
    store_pair(s.out + at, pair.count, args.is_paired, values);
    if (!s.scale) return 0.0f;
    float first = pair.count > 0 ? widen(values & 0xffff) : 0.0f, second = pair.count > 1 ? widen(values >> 16) : 0.0f;
    u32 scale = load_pair(s.scale + pair.output * 2, pair.count, args.is_paired);
    store_pair(s.scaled + at, pair.count, args.is_paired, pack(first * widen(scale & 0xffff), second * widen(scale >> 16)));
    return first * first + second * second;
}

// Sums of rows lane / 4 (first two) and 8 further (last two), of tokens 2 * (lane % 4) and the next one.
// Gated: the gate's and the value's row of one output.
DEVICE void finish_eighth(const ChainArgs& args, const Segment& s, const Shared& shared, const Rows& rows, i32 eighth,
                          const float (&sums)[4], const Added& added) {
    float y[4], factors[2] = {1.0f, 1.0f}, squares = 0.0f;
    if (s.norm_squares)
        for (i32 i = 0; i < 2; i++) factors[i] = shared.factors()[eighth * 8 + (lane_id() & 3) * 2 + i];
#pragma unroll
    for (i32 i = 0; i < 4; i++) y[i] = sums[i] * factors[i % 2] + rows.bias[i / 2];
    if (s.is_gated) {
        y[0] = silu_times(y[0], y[2]);
        y[1] = silu_times(y[1], y[3]);
    }
#pragma unroll
    for (i32 half = 0; half < 2; half++) {
        if (half >= rows.halves) break;
        if (s.residual) {
            u32 turned = transpose_matrix(added.values[half]);
            y[2 * half] += widen(turned & 0xffff);
            y[2 * half + 1] += widen(turned >> 16);
        }
        u32 outputs = transpose_matrix(pack(y[2 * half], y[2 * half + 1]));
        squares += store_outputs(args, s, Pair(args, s, rows, eighth, half), outputs);
    }
    if (!s.scale) return;
    squares += __shfl_xor_sync(FULL, squares, 1);
    squares += __shfl_xor_sync(FULL, squares, 2);
    if ((lane_id() & 3) == 0) shared.squares()[warp_id() * TOKENS + eighth * 8 + lane_id() / 4] = squares;
}

// The squares of a tile's outputs, of the tokens from eighth `begin` to `end`; between two barriers.
DEVICE void store_squares(const Segment& s, const Shared& shared, i32 tile, i32 begin, i32 end) {
    sync_first(128 * s.warpgroups);
    for (i32 token = begin * 8 + threadIdx.x; token < end * 8; token += 128 * s.warpgroups) {
        float sum = 0.0f;
        for (i32 warp = 0; warp < 4 * s.warpgroups; warp++) sum += shared.squares()[warp * TOKENS + token];
        s.squares[tile * TOKENS + token] = sum;
    }
    sync_first(128 * s.warpgroups);
}
