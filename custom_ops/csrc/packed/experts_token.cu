// Products of a mixture of experts with weights in 4-bit floats for one token: the kernel "packed_token" of
// `experts`. Launched by custom_ops/moe_packed_token.py, once for each of the two products.
//
// As ring.cu has it: weights come through a ring in shared memory and the token lies there too, as fp16
// divided by a power of two. The first product's tiles are those of all chosen experts. A tile of the
// second one has rows of all chosen experts, one expert's columns behind the other's, and the sum over
// them is weighted, with the residual if there is one: nothing is left to add up.
//
// The second product reads the choice and starts to copy weights before its wait: the first one lets it
// start only when the choice is there.
#ifndef FORMAT
#define FORMAT MXFP4
#endif
#define X_KIND X_SHARED
#define QUANT SCALED
#define RING 1
#ifndef HALF
#define HALF 1
#endif
#include "experts.cuh"
#include "product.cuh"
#include "ring.cuh"

#ifndef TOP_K
#define TOP_K 4  // experts chosen, at most 32
#endif

struct ExpertTokenArgs {
    PackedArgs product;    // of one expert; weight, scale and bias of the first one
    const i32* ids;        // [TOP_K] experts
    const float* weights;  // [TOP_K]
    float alpha;
    float limit;
    i32 rows;        // of an expert's weight
    i32 slot_units;  // units of its row
};

// Lane l has the l-th chosen expert.
struct Chosen {
    i32 expert;
    float weight, scaled;  // by the scale of the second product's matrix

    METHOD void load(const ExpertTokenArgs& args) {
        i32 slot = min(lane_id(), TOP_K - 1);
        expert = load_fresh(args.ids + slot);
        weight = float_of((u32)load_fresh((const i32*)args.weights + slot));
        scaled = DOWN ? weight * global_scale(args.product, expert, 0) : weight;
    }
    METHOD i32 expert_of(i32 slot) const { return __shfl_sync(FULL, expert, slot); }
    METHOD float weight_of(i32 slot) const { return __shfl_sync(FULL, weight, slot); }
    METHOD float scaled_weight_of(i32 slot) const { return __shfl_sync(FULL, scaled, slot); }
};

// Which chosen expert a unit belongs to, the last one behind the end, where x is zero.
DEVICE i32 slot_of(const ExpertTokenArgs& args, i32 item, i32 number) {
    return DOWN ? min(number / args.slot_units, TOP_K - 1) : item / args.product.num_tiles;
}

DEVICE void load_token(const ExpertTokenArgs& args, Token& token) {
#pragma unroll
    for (i32 i = 0; i < X_PARTS; i++) {
        i32 slot = DOWN ? token.column(i) / (args.slot_units * UNIT) : 0;
        i32 column = token.column(i) - slot * args.slot_units * UNIT;
        token.values[i] = Quad{{0, 0, 0, 0}};
        if (slot < TOP_K && column < args.product.size)
            token.values[i] = *(const Quad*)(args.product.x + (slot * args.product.x_stride + column) * 2);
    }
}

// The output of a tile that the thread finishes, or none; the warps take turns.
DEVICE i32 output_of(i32 count) { return (threadIdx.x + 32 * count) % THREADS; }

// The biases of the output that a thread will finish, as they lie in memory, and scales of the first product.
struct Biases {
    unsigned short values[DOWN ? TOP_K : 2];
    float scales[2];

    METHOD void load(const ExpertTokenArgs& args, const Chosen& chosen, i32 item, i32 tile, i32 inside) {
        const PackedArgs& product = args.product;
        i32 output = tile * OUTPUTS + inside;
#pragma unroll
        for (i32 i = 0; i < (DOWN ? TOP_K : 2); i++) {
            i64 expert = chosen.expert_of(DOWN ? i : item / product.num_tiles);
            values[i] = 0;
            if (!DOWN) scales[i] = global_scale(product, expert, i);
            if (!product.bias || inside >= OUTPUTS || output >= product.num_outputs) continue;
            i64 row = expert * args.rows + output + (DOWN ? 0 : i * product.num_outputs);
            values[i] = *(const unsigned short*)(product.bias + row * 2);
        }
    }
};

DEVICE float sum_of(const char* place, i32 slot) {
    float sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < WARPS; w++) sum += ((const float*)place)[w * ROWS + slot];
    return sum;
}

DEVICE void finish_tile(const ExpertTokenArgs& args, const Chosen& chosen, const char* place, i32 item, i32 tile, i32 inside, const Biases& biases, float scale) {
    float weights[DOWN ? TOP_K : 1];
#pragma unroll
    for (i32 i = 0; i < (DOWN ? TOP_K : 1); i++) weights[i] = chosen.weight_of(i);
    i32 output = tile * OUTPUTS + inside;
    if (inside >= OUTPUTS || output >= args.product.num_outputs) return;
    float y;
    if (DOWN) {
        y = sum_of(place, inside) * scale;
#pragma unroll
        for (i32 i = 0; i < (DOWN ? TOP_K : 1); i++) y += weights[i] * widen_value(biases.values[i]);
        if (args.product.residual) y += widen_value(*(const unsigned short*)(args.product.residual + (i64)output * 2));
    } else {
        i32 slot = inside / 8 * 16 + inside % 8;
        float gate = sum_of(place, slot) * (scale * biases.scales[0]) + widen_value(biases.values[0]);
        float up = sum_of(place, slot + 8) * (scale * biases.scales[1]) + widen_value(biases.values[1]);
        y = activate(args, gate, up);
    }
    i64 row = DOWN ? 0 : item / args.product.num_tiles;
    *(unsigned short*)(args.product.out + (row * args.product.num_outputs + output) * 2) = (unsigned short)round_values(y, 0.0f);
}

// Grid: blocks that take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) expert_token(const __grid_constant__ ExpertTokenArgs args) {
    DYNAMIC_SHARED(shared);
    const PackedArgs& product = args.product;
    Token token;
    if (!DOWN) wait_for_earlier_kernels();
    let_next_start();
    Chosen chosen;
    chosen.load(args);
    if (!DOWN) load_token(args, token);
    i32 num_items = product.num_tiles * (DOWN ? 1 : TOP_K), load_item = blockIdx.x, loaded = 0;
    Rows at, load_at;
    load_at.find(product, load_item % product.num_tiles);
    auto copy_next = [&](i32 stage) {
        if (load_item < num_items) {
            i32 number = loaded * WARPS + warp_id(), slot = slot_of(args, load_item, number);
            i64 row = (i64)chosen.expert_of(slot) * args.rows;
            PackedArgs own = product;
            own.weight += row * product.row_bytes;
            own.scale += row * product.scale_columns;
            copy_unit(own, shared + RING_PLACE + stage * STAGE_BYTES, load_at, number - (DOWN ? slot * args.slot_units : 0));
            if (++loaded == product.warp_units) {
                loaded = 0, load_item += gridDim.x;
                load_at.find(product, load_item % product.num_tiles);
            }
        }
        commit_copies();
    };
    for (i32 i = 0; i < AHEAD; i++) copy_next(i);
    if (DOWN) {
        wait_for_earlier_kernels();
        load_token(args, token);
    }
    float scale = token.prepare(product, shared) * product.factor;
    __syncthreads();
    i32 stage = 0, count = 0;
    for (i32 item = blockIdx.x; item < num_items; item += gridDim.x, count++) {
        i32 tile = item % product.num_tiles, inside = output_of(count);
        Biases biases;
        biases.load(args, chosen, item, tile, inside);
        Sums sums;
        sums.clear();
        at.find(product, tile);
        for (i32 i = 0; i < product.warp_units; i++) {
            i32 number = i * WARPS + warp_id(), slot = slot_of(args, item, number);
            wait_copies<AHEAD - 1>();
            const char* place = shared + RING_PLACE + stage * STAGE_BYTES;
            Unit unit;
            read_unit(product, place, unit, at, number - (DOWN ? slot * args.slot_units : 0));
            Sums part;
            part.clear();
            multiply_unit(product, unit, shared, place, number, part);
            float weight = DOWN ? chosen.scaled_weight_of(slot) : 1.0f;
#pragma unroll
            for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
                for (i32 j = 0; j < 4; j += 2) sums.x[m][0][j] += weight * part.x[m][0][j];
            copy_next(stage);
            stage = stage + 1 == AHEAD ? 0 : stage + 1;
        }
        char* place = shared + SUMS_PLACE + count % SUM_TILES * SUMS_BYTES;
        share_sums(sums, place);
        __syncthreads();  // also: sums of the tile before have been read
        finish_tile(args, chosen, place, item, tile, inside, biases, scale);
    }
    wait_copies<0>();
}
