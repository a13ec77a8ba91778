// Linear layers of 9 to 128 tokens at memory speed, for Hopper; see custom_ops/gemm_wide.py.
//
//     out[t, n] = f(sum_k weight[n, k] * x[t, k] + bias[n]) + residual[t, n]
//
// The weight is the left operand of the tensor cores, 64 rows a product; the tokens are the other. One
// warp copies blocks of columns of a tile's rows, and of x, into a ring in shared memory; the others
// multiply. The ring is full of weights before x has been written. All warps that multiply use every
// stage in turn: one that skipped a stage's use could take the phase before the last for the last one,
// as they have one parity.
//
// Where rows are few, SPLIT blocks divide the columns of a tile. Each leaves its sums in global memory,
// where nothing but ABSENT has been, and adds the others' for its part of the tokens, in the same order
// whoever comes first.
//
// Gate and value: copies put 8 rows of the gate in front of the 8 rows of their values, so that a
// thread has both sums of an output.
#include "finish.cuh"
#include "load.cuh"
#include "products.cuh"

#ifndef CUDA_EMULATOR
// Between two looks at what others write; ends a kernel that looks for ever.
struct Patience {
    i32 looks = 0;
    METHOD void wait() {
        if (++looks > 3000000) asm volatile("trap;");
    }
};
#endif

// Of the 64 rows of a warpgroup and all tokens.
struct Sums {
    float values[TOKENS / 2];

    METHOD void settle_all() {
#pragma unroll
        for (i32 i = 0; i < TOKENS / 2; i++) settle(values[i]);
    }
    METHOD void load_four(float (&four)[4], i32 eighth) const {
#pragma unroll
        for (i32 i = 0; i < 4; i++) four[i] = values[eighth * 4 + i];
    }
};

DEVICE void release(const Shared& shared, i32 stage) {
    if (lane_id() == 0) arrive_barrier(shared.empty(stage));
    __syncwarp();
}

DEVICE void start_block(const Shared& shared, i32 stage, Sums& sums, bool adds) {
    start_products();
#pragma unroll
    for (i32 slab = 0; slab < SLABS; slab++) {
        u64 weight = describe_rows(shared.weight(stage) + (slab * ROWS + warp_id() / 4 * PANEL) * (SLAB * 2));
        u64 x = describe_rows(shared.x(stage) + slab * (TOKENS * SLAB * 2));
#pragma unroll
        for (i32 k = 0; k < SLAB / 16; k++) add_product(sums.values, weight + k * 2, x + k * 2, adds || slab + k > 0);
    }
    commit_products();
}

// The tensor cores always have the next block to go on with: a stage is given back one block late.
DEVICE void multiply_unit(const Shared& shared, i32 count, Turn& turn, Sums& sums) {
    i32 late = 0;
    for (i32 i = 0; i < count; i++) {
        wait_barrier(shared.full(turn.stage), turn.parity);
        start_block(shared, turn.stage, sums, i > 0);
        wait_products<1>();
        if (i > 0) release(shared, late);
        late = turn.stage;
        turn.next();
    }
    wait_products<0>();
    sums.settle_all();
    release(shared, late);
}

DEVICE void finish_alone(const WideArgs& args, i32 tile, const Sums& sums) {
    constexpr i32 AT_ONCE = EIGHTS < 4 ? EIGHTS : 4;
    Rows rows = rows_of(args, tile);
#pragma unroll
    for (i32 first = 0; first < EIGHTS; first += AT_ONCE) {
        Added added[AT_ONCE];
#pragma unroll
        for (i32 i = 0; i < AT_ONCE; i++) added[i].load(args, rows, first + i);
#pragma unroll
        for (i32 i = 0; i < AT_ONCE; i++) {
            float four[4];
            sums.load_four(four, first + i);
            finish_eighth(args, rows, first + i, four, added[i]);
        }
    }
}

DEVICE float* partial_place(const WideArgs& args, i32 tile, i32 part, i32 eighth) {
    return args.partials + ((i64)((tile * SPLIT + part) * EIGHTS + eighth) * CONSUMERS + threadIdx.x) * 4;
}

DEVICE bool is_absent(const Float4& v) {
    return bits_of(v.x[0]) == ABSENT || bits_of(v.x[1]) == ABSENT || bits_of(v.x[2]) == ABSENT || bits_of(v.x[3]) == ABSENT;
}

// Takes the sums of another part, when they are there, and leaves the place as it was.
DEVICE void take_partial(float* place, Float4& v) {
    Patience patience;
    while (is_absent(v)) {
        patience.wait();
        v = load_relaxed((const Float4*)place);
    }
    Float4 nothing;
    for (i32 i = 0; i < 4; i++) nothing.x[i] = float_of(ABSENT);
    store_relaxed((Float4*)place, nothing);
}

// Adds the sums of all parts of a tile, for this part's tokens; leaves those of the other tokens.
DEVICE void finish_together(const WideArgs& args, const Unit& unit, const Sums& sums) {
    Float4 own[OWN];
    i32 begin = unit.part * EIGHTS / SPLIT, end = (unit.part + 1) * EIGHTS / SPLIT;
#pragma unroll
    for (i32 eighth = 0; eighth < EIGHTS; eighth++) {
        Float4 four;
        sums.load_four(four.x, eighth);
#pragma unroll
        for (i32 i = 0; i < OWN; i++)
            if (eighth == begin + i) own[i] = four;
        if (eighth < begin || eighth >= end) store_relaxed((Float4*)partial_place(args, unit.tile, unit.part, eighth), four);
    }
    Rows rows = rows_of(args, unit.tile);
    constexpr i32 DEPTH = OWN < 2 ? OWN : 2;  // groups of tokens that are asked for ahead
    Added added[DEPTH];
    Float4 theirs[DEPTH][SPLIT];
#pragma unroll
    for (i32 i = 0; i < OWN + DEPTH; i++) {
        if (i >= DEPTH && begin + i - DEPTH < end) {
            i32 eighth = begin + i - DEPTH;
            float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (i32 part = 0; part < SPLIT; part++) {
                Float4& v = theirs[i % DEPTH][part];
                if (part == unit.part) v = own[i - DEPTH];
                else take_partial(partial_place(args, unit.tile, part, eighth), v);
#pragma unroll
                for (i32 j = 0; j < 4; j++) four[j] += v.x[j];
            }
            __syncwarp();
            finish_eighth(args, rows, eighth, four, added[i % DEPTH]);
        }
        if (i < OWN && begin + i < end) {
            added[i % DEPTH].load(args, rows, begin + i);
#pragma unroll
            for (i32 part = 0; part < SPLIT; part++)
                if (part != unit.part) theirs[i % DEPTH][part] = load_relaxed((const Float4*)partial_place(args, unit.tile, part, begin + i));
        }
    }
}

DEVICE void multiply_all(const WideArgs& args, const Shared& shared) {
    Turn turn;
    for (i32 i = 0; i < num_units(args); i++) {
        Unit unit(args, i);
        Sums sums;
        multiply_unit(shared, unit.count, turn, sums);
        if (SPLIT > 1) finish_together(args, unit, sums);
        else finish_alone(args, unit.tile, sums);
    }
}

// Grid: as many blocks as run at once, or as there are units; at least SPLIT.
extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_product(const __grid_constant__ WideArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATOR)
    TILED_SHARED(memory);
    Shared shared = {shared_address(memory)};
    bool is_loading = threadIdx.x == CONSUMERS;
    i32 total = total_blocks(args);
    if (is_loading) {
        make_barriers(shared);
        load_first(args, shared, total);
    }
    __syncthreads();
    wait_for_earlier_kernels();
    if (is_loading) {
        order_copies();
        load_all(args, shared, total);
    } else if (threadIdx.x < CONSUMERS) {
        multiply_all(args, shared);
    }
#endif
}
