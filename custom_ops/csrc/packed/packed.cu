// Products of up to 32 tokens with a quantised weight: the kernel "packed" of `quantized_linear`.
// Launched by custom_ops/quant_packed.py.
//
//     out[t, n] = sum_k value(weight[n, k]) * x[t, k] + bias[n]
//
// Gated: silu of the gate's sum times the value's; plus residual[t, n]. One token may be normed and
// quantised by every block itself; several come so.
//
// A weight goes from memory to shared memory, each thread's pieces to places of its own, and to registers,
// becomes 16-bit floats there, exactly or rounded once, and is the left operand of the tensor cores, 16
// rows at a time. Which columns a lane holds does not matter as long as x follows: a lane copies whole
// pieces of 16 bytes of two rows, and the same columns of its token. The warps of a block divide the
// columns; each has some units on their way, and had them before x was written. Sums are fp32; the scales
// of a row or a token multiply them at the end, those of blocks of 128 columns after each unit, those of
// smaller groups each lane's own sums of one token, or the weights themselves.
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

// The warps take the first of the work in turn, so that others go on with the next tile.
DEVICE void finish_tile(const PackedArgs& args, const char* place, i32 tile, i32 count, float token_scale) {
    for (i32 i = (threadIdx.x + 32 * count) % THREADS; i < OUTPUTS * SUMMED; i += THREADS) {
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

// Grid: blocks that take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_product(const __grid_constant__ PackedArgs args) {
    DYNAMIC_SHARED(shared);
    let_next_start();
    Rows at, load_at;
    i32 load_tile = blockIdx.x, loaded = 0;
    load_at.find(args, load_tile);
    auto copy_next = [&](i32 stage, bool has_x) {
        if (load_tile < args.num_tiles) {
            char* place = shared + RING_PLACE + stage * STAGE_BYTES;
            copy_unit(args, place, load_at, loaded * WARPS + warp_id());
            if (X_PIECES && has_x) copy_x(args, place, loaded * WARPS + warp_id());
            if (++loaded == args.warp_units) {
                loaded = 0, load_tile += gridDim.x;
                load_at.find(args, load_tile);
            }
        }
        commit_copies();
    };
    for (i32 i = 0; i < AHEAD; i++) copy_next(i, false);
    Token token;
    if (X_KIND == X_SHARED) token.load_gains(args);
    wait_for_earlier_kernels();
    float token_scale = 1.0f;
    if (X_KIND == X_SHARED) {
        token.load_values(args);
        token_scale = token.prepare(args, shared);
        __syncthreads();
    }
    if (X_PIECES) {
        for (i32 i = 0; i < AHEAD; i++)
            copy_x(args, shared + RING_PLACE + i * STAGE_BYTES, i % args.warp_units * WARPS + warp_id());
        commit_copies();
        wait_copies<0>();
    }
    i32 stage = 0, count = 0;
    for (i32 tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, count++) {
        Sums sums;
        sums.clear();
        at.find(args, tile);
        for (i32 i = 0; i < args.warp_units; i++) {
            wait_copies<AHEAD - 1>();
            const char* place = shared + RING_PLACE + stage * STAGE_BYTES;
            Unit unit;
            read_unit(args, place, unit, at, i * WARPS + warp_id());
            multiply_unit(args, unit, shared, place, i * WARPS + warp_id(), sums);
            copy_next(stage, true);
            stage = stage + 1 == AHEAD ? 0 : stage + 1;
        }
        char* place = shared + SUMS_PLACE + count % SUM_TILES * SUMS_BYTES;
        share_sums(sums, place);
        __syncthreads();  // also: sums of the tile before have been read
        finish_tile(args, place, tile, count, token_scale);
        if (SUM_TILES == 1) __syncthreads();
    }
    wait_copies<0>();
}
