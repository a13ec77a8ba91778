// Products of up to 32 tokens with a weight: the kernel "mma" of `fused_linear`.
// Launched by custom_ops/gemm_mma.py.
//
//     out[t, n] = rstd[t] * sum_k weight[n, k] * (x[t, k] * g[k]) + bias[n]
//
// rstd[t] from the sum of x[t, k]^2 in the same loop; gated: silu of the gate's sum times the value's;
// plus residual[t, n]. x * g is rounded to 16 bits for the tensor cores; everything else is fp32,
// rounded once.
//
// The weight is the left operand, 16 rows at a time, so a tile may have any multiple of 16 rows: few
// enough that every multiprocessor gets its equal share of the weight in one stretch. One warp keeps a
// ring of the weight's blocks full, and began to fill it before x was written, and one of blocks of x;
// four multiply. With small tiles, several blocks of threads a multiprocessor, some load while others
// begin or end, and the next kernel fills what place they leave.
#include "args.cuh"
#include "load.cuh"
#include "multiply.cuh"

DEVICE float sum_of_parts(const float* first, i32 step) {
    float sum = 0.0f;
#pragma unroll
    for (i32 k = 0; k < K_WARPS; k++) sum += first[k * step];
    return sum;
}

// One of the outputs of the tile that a thread finishes.
struct Place {
    i32 token, inside, output;
    bool is_there;
};

DEVICE Place place_of(const MmaArgs& args, i32 tile, i32 item) {
    Place at;
    i32 number = item * CONSUMERS + threadIdx.x;
    at.token = number / OUTPUTS;
    at.inside = number % OUTPUTS;
    at.output = tile * OUTPUTS + at.inside;
    at.is_there = at.token < args.num_tokens && at.output < args.num_outputs;
    return at;
}

DEVICE u32 load_residual(const MmaArgs& args, const Place& at) {
    return load_fresh_half(args.residual + (at.token * args.residual_stride + at.output) * 2);
}

// The residual of the outputs that a thread finishes, loaded ahead where it has few.
struct Residual {
    static constexpr bool IS_AHEAD = HAS_RESIDUAL && ITEMS <= 8;
    u32 values[IS_AHEAD ? ITEMS : 1];

    METHOD void load(const MmaArgs& args, i32 tile) {
        if (IS_AHEAD)
#pragma unroll
            for (i32 i = 0; i < ITEMS; i++) {
                Place at = place_of(args, tile, i);
                values[i] = at.is_there ? load_residual(args, at) : 0;
            }
    }
};

// Norm, bias, gate and residual of complete sums, and the store.
DEVICE void store_output(const MmaArgs& args, const Shared& shared, const Place& at, u32 residual) {
    const float* sums = shared.sums() + at.token * PITCH + at.inside;
    float factor = 1.0f;
    if (HAS_NORM) {
        float squares = sum_of_parts(shared.squares() + at.token, TOKENS);
        factor = rsqrtf(squares / args.size + args.eps);
    }
    float y = sum_of_parts(sums, TOKENS * PITCH) * factor;
    if (args.bias) y += widen(load_fresh_half(args.bias + at.output * 2));
    if (GATED) {
        float value = sum_of_parts(sums + OUTPUTS, TOKENS * PITCH) * factor;
        if (args.bias) value += widen(load_fresh_half(args.bias + (at.output + args.num_outputs) * 2));
        y = y / (1.0f + power_of_two(-LOG2E * y)) * value;
    }
    if (HAS_RESIDUAL) y += widen(residual);
    *(unsigned short*)(args.out + ((i64)at.token * args.num_outputs + at.output) * 2) = (unsigned short)pack(y, 0.0f);
}

DEVICE void finish_tile(const MmaArgs& args, const Shared& shared, const Sums& sums, const Residual& residual, i32 tile) {
    sync_first(CONSUMERS);  // the rings have been read
    share_sums(sums, shared);
    sync_first(CONSUMERS);
#pragma unroll
    for (i32 i = 0; i < ITEMS; i++) {
        Place at = place_of(args, tile, i);
        if (!at.is_there) continue;
        u32 added = residual.values[Residual::IS_AHEAD ? i : 0];
        if (HAS_RESIDUAL && !Residual::IS_AHEAD) added = load_residual(args, at);
        store_output(args, shared, at, added);
    }
}

DEVICE void multiply_tile(const MmaArgs& args, const Part& part, const Shared& shared) {
    if (HAS_RESIDUAL) wait_for_earlier_kernels();
    Turn<STAGES> weights_turn;
    Turn<X_STAGES> x_turn;
    Residual residual;
    residual.load(args, part.tile);
    Sums sums;
    sums.clear();
    for (i32 block = 0; block < part.count; block++, weights_turn.next(), x_turn.next()) {
        wait_at(shared.x_full(x_turn.stage), x_turn.parity);
        wait_at(shared.weights_full(weights_turn.stage), weights_turn.parity);
        multiply_block(sums, shared.weights(weights_turn.stage), shared.x(x_turn.stage));
        __syncwarp();
        if (lane_id() == 0) arrive_barrier(shared.read(weights_turn.stage));
    }
    finish_tile(args, shared, sums, residual, part.tile);
}

// Grid: the tiles.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    few_tokens_product(const __grid_constant__ MmaArgs args) {
    TILED_SHARED(memory);
    Shared shared = {memory};
    Part part = part_of(args);
    if (warp_id() == WARPS) {
#if HAS_BULK
        prefetch_map(args.map);
#endif
        make_barriers(shared);
    }
    __syncthreads();
    if (warp_id() < WARPS)
        multiply_tile(args, part, shared);
    else
        load_blocks(args, part, shared);
}
