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
#include "finish.cuh"

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
                multiply_unit(args, units[i], shared, shared, (first + i) * WARPS + warp_id(), sums);
                load_next(units[i]);
            }
        share_sums(sums, shared + SUMS_PLACE);
        __syncthreads();
        finish_tile(args, shared + SUMS_PLACE, tile, 0, token_scale);
        __syncthreads();  // the sums have been read
    }
}
