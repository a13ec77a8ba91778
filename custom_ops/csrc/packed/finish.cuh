// Complete sums of a tile, and what stands behind a product of a layer.
#pragma once
#include "product.cuh"

DEVICE float load_value(const char* p) { return widen_value(*(const unsigned short*)p); }

// The complete sum of a slot of a tile and a token, with its scales and bias.
DEVICE float sum_of(const PackedArgs& args, const char* place, i32 tile, i32 slot, i32 token, float x_scale) {
    const float* sums = (const float*)place + slot * PITCH + token;
    float sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < WARPS; w++) sum += sums[w * ROWS * PITCH];
    i32 row = row_of(args, tile, slot / 16, slot % 16);
    sum *= x_scale * args.factor;
    if (args.row_scale) sum *= args.row_scale[(i64)row * args.row_scale_step];
    return args.bias ? sum + load_value(args.bias + row * 2) : sum;
}

// With a ring the warps take the first of the work in turn, so that others go on with the next tile.
DEVICE void finish_tile(const PackedArgs& args, const char* place, i32 tile, i32 count, float token_scale) {
    for (i32 i = RING ? (threadIdx.x + 32 * count) % THREADS : threadIdx.x; i < OUTPUTS * SUMMED; i += THREADS) {
        i32 inside = i % OUTPUTS, token = i / OUTPUTS, output = tile * OUTPUTS + inside;
        if (token >= args.num_tokens || output >= args.num_outputs) continue;
        i32 slot = GATED ? inside / 8 * 16 + inside % 8 : inside;
        float scale = X_KIND == X_SHARED || X_BLOCK_SCALES || !args.x_scale ? token_scale : args.x_scale[token * args.x_scale_step];
        float y = sum_of(args, place, tile, slot, token, scale);
        if (GATED) y = y / (1.0f + power_of_two(-LOG2E * y)) * sum_of(args, place, tile, slot + 8, token, scale);
        if (args.residual) y += load_value(args.residual + (token * args.residual_stride + output) * 2);
        *(unsigned short*)(args.out + ((i64)token * args.num_outputs + output) * 2) = (unsigned short)round_values(y, 0.0f);
    }
}
