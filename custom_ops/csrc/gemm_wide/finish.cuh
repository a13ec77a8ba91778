// From complete sums to outputs: bias, gate and residual in fp32, rounded once.
//
// A product's sums lie with the outputs of a token in different lanes. They are rounded to 16 bits and
// turned around as matrices of 8 outputs and 8 tokens, after which a lane has two neighbours of a token;
// residuals come in by the same way.
#pragma once
#include "args.cuh"

constexpr i32 HALVES = GATED ? 1 : 2;  // of 8 outputs, that a warp's 16 rows make

// The rows of a tile that a warp has.
struct Rows {
    i32 output;     // the first
    float bias[2];  // of the rows of this lane
};

DEVICE Rows rows_of(const WideArgs& args, i32 tile) {
    Rows rows;
    i32 row = lane_id() / 4;
    rows.output = tile * OUTPUTS + warp_id() * 8 * HALVES;
    rows.bias[0] = rows.bias[1] = 0.0f;
    if (args.bias && rows.output + row < args.num_outputs) {
        i32 first = rows.output + row, second = GATED ? args.num_outputs + first : min(first + 8, args.num_outputs - 1);
        rows.bias[0] = widen(((const unsigned short*)args.bias)[first]);
        rows.bias[1] = widen(((const unsigned short*)args.bias)[second]);
    }
    return rows;
}

// Where a lane's two neighbours of a half are, for a group of 8 tokens.
struct Pair {
    i32 token, output;
    i32 count;  // that exist

    METHOD Pair(const WideArgs& args, const Rows& rows, i32 eighth, i32 half) {
        token = eighth * 8 + lane_id() / 4;
        output = rows.output + half * 8 + (lane_id() & 3) * 2;
        count = token < args.num_tokens ? min(max(args.num_outputs - output, 0), 2) : 0;
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
    u32 values[HALVES];

    METHOD void load(const WideArgs& args, const Rows& rows, i32 eighth) {
#pragma unroll
        for (i32 half = 0; half < HALVES; half++) {
            values[half] = 0;
            if (!args.residual) continue;
            Pair pair(args, rows, eighth, half);
            values[half] = load_pair(args.residual + (pair.token * args.residual_stride + pair.output) * 2, pair.count, args.is_paired);
        }
    }
};

DEVICE float silu_times(float gate, float value) { return gate / (1.0f + power_of_two(gate * -LOG2E)) * value; }

// Sums of rows lane / 4 (first two) and 8 further (last two), of tokens 2 * (lane % 4) and the next one.
// Gated: the gate's and the value's row of one output.
DEVICE void finish_eighth(const WideArgs& args, const Rows& rows, i32 eighth, const float (&sums)[4], const Added& added) {
    float y[4];
#pragma unroll
    for (i32 i = 0; i < 4; i++) y[i] = sums[i] + rows.bias[i / 2];
    if (GATED) {
        y[0] = silu_times(y[0], y[2]);
        y[1] = silu_times(y[1], y[3]);
    }
#pragma unroll
    for (i32 half = 0; half < HALVES; half++) {
        if (args.residual) {
            u32 turned = transpose_matrix(added.values[half]);
            y[2 * half] += widen(turned & 0xffff);
            y[2 * half + 1] += widen(turned >> 16);
        }
        u32 outputs = transpose_matrix(pack(y[2 * half], y[2 * half + 1]));
        Pair pair(args, rows, eighth, half);
        char* at = args.out + ((i64)pair.token * args.num_outputs + pair.output) * 2;
        store_pair(at, pair.count, args.is_paired, outputs);
    }
}
