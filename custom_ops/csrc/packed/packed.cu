// Products of up to 32 tokens with a quantised weight: the kernel "packed" of `quantized_linear`.
// Launched by custom_ops/quant_packed.py.
//
//     out[t, n] = sum_k value(weight[n, k]) * x[t, k] + bias[n]
//
// Gated: silu of the gate's sum times the value's; plus residual[t, n]. One token may be normed and
// quantised by every block itself; several come so.
//
// A weight goes from memory to registers, becomes 16-bit floats there, exactly or rounded once, and
// is the left operand of the tensor cores, 16 rows at a time. Which columns a lane holds does not
// matter as long as x follows: a lane loads whole pieces of 16 bytes of two rows, and the same columns
// of its token. The warps of a block divide the columns; each has some units on their way, and had them
// before x was written. Sums are fp32; the scales of a row or a token multiply them at the end, those
// of blocks of 128 columns after each unit, those of smaller groups the weights themselves.
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

DEVICE void multiply_chunk(const PackedArgs& args, const Unit& unit, const char* shared, i32 number, i32 which, Sums& sums) {
    u32 x[EIGHTS][PAIRS];
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++) load_x(args, shared, n, column_of(number, which), x[n]);
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++) {
        u32 upper[PAIRS], lower[PAIRS];
        widen_chunk(unit.chunks[m][0][which], upper);
        widen_chunk(unit.chunks[m][1][which], lower);
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

DEVICE void multiply_unit(const PackedArgs& args, const Unit& unit, const char* shared, i32 number, Sums& sums) {
    if (!HAS_BLOCKS) {
        multiply_chunk(args, unit, shared, number, 0, sums);
        multiply_chunk(args, unit, shared, number, 1, sums);
        return;
    }
    Sums part;
    part.clear();
    multiply_chunk(args, unit, shared, number, 0, part);
    multiply_chunk(args, unit, shared, number, 1, part);
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

DEVICE void share_sums(const Sums& sums, char* shared) {
    float* place = (float*)(shared + SUMS_PLACE) + (warp_id() * ROWS + (lane_id() >> 2)) * PITCH + (lane_id() & 3) * 2;
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) place[(m * 16 + i / 2 * 8) * PITCH + n * 8 + i % 2] = sums.x[m][n][i];
}

DEVICE float load_value(const char* p) { return widen_value(*(const unsigned short*)p); }

// The complete sum of a slot of a tile and a token, with its scales and bias.
DEVICE float sum_of(const PackedArgs& args, const char* shared, i32 tile, i32 slot, i32 token, float x_scale) {
    const float* sums = (const float*)(shared + SUMS_PLACE) + slot * PITCH + token;
    float sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < WARPS; w++) sum += sums[w * ROWS * PITCH];
    i32 row = row_of(args, tile, slot / 16, slot % 16);
    sum *= x_scale * args.factor;
    if (args.row_scale) sum *= args.row_scale[(i64)row * args.row_scale_step];
    return args.bias ? sum + load_value(args.bias + row * 2) : sum;
}

DEVICE void finish_tile(const PackedArgs& args, const char* shared, i32 tile, float token_scale) {
    for (i32 i = threadIdx.x; i < OUTPUTS * TOKENS; i += THREADS) {
        i32 inside = i % OUTPUTS, token = i / OUTPUTS, output = tile * OUTPUTS + inside;
        if (token >= args.num_tokens || output >= args.num_outputs) continue;
        i32 slot = GATED ? inside / 8 * 16 + inside % 8 : inside;
        float scale = X_KIND == X_SHARED || X_BLOCK_SCALES || !args.x_scale ? token_scale : args.x_scale[token * args.x_scale_step];
        float y = sum_of(args, shared, tile, slot, token, scale);
        if (GATED) y = y / (1.0f + power_of_two(-LOG2E * y)) * sum_of(args, shared, tile, slot + 8, token, scale);
        if (args.residual) y += load_value(args.residual + (token * args.residual_stride + output) * 2);
        *(unsigned short*)(args.out + ((i64)token * args.num_outputs + output) * 2) = (unsigned short)round_values(y, 0.0f);
    }
}

// Grid: blocks that take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_product(const __grid_constant__ PackedArgs args) {
    DYNAMIC_SHARED(shared);
    let_next_start();
    u64 policy = cache_policy(false);
    Unit units[AHEAD];
    Rows at;
    i32 load_tile = blockIdx.x, loaded = 0;
    at.find(args, load_tile);
    auto load_next = [&](Unit& unit) {
        if (load_tile >= args.num_tiles) return;
        load_unit(args, unit, at, loaded * WARPS + warp_id(), policy);
        if (++loaded == args.warp_units) {
            loaded = 0, load_tile += gridDim.x;
            at.find(args, load_tile);
        }
    };
#pragma unroll
    for (i32 i = 0; i < AHEAD; i++) load_next(units[i]);
    Token token;
    if (X_KIND == X_SHARED) token.load_gains(args);
    wait_for_earlier_kernels();
    float token_scale = 1.0f;
    if (X_KIND == X_SHARED) {
        token.load_values(args);
        token_scale = token.prepare(args, shared);
    }
    __syncthreads();
    for (i32 tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x) {
        Sums sums;
        sums.clear();
        for (i32 first = 0; first < args.warp_units; first += AHEAD)
#pragma unroll
            for (i32 i = 0; i < AHEAD; i++) {
                multiply_unit(args, units[i], shared, (first + i) * WARPS + warp_id(), sums);
                load_next(units[i]);
            }
        share_sums(sums, shared);
        __syncthreads();
        finish_tile(args, shared, tile, token_scale);
        __syncthreads();  // the sums have been read
    }
}
