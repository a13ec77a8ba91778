// Products of up to 128 tokens with one weight after another, in one launch, for Hopper.
// Launched by custom_ops/gemm_chain.py.
//
//     out[t, n] = f(rstd[t] * sum_k weight[n, k] * x[t, k] + bias[n]) + residual[t, n]
//
// The memory must never rest. One block of threads a multiprocessor keeps a ring of shared memory full of
// weights, from those of the first product, before x has been written, to those of the last: the ring does
// not wait where products meet, and holds what the memory gives while a product ends and the next begins.
// There all blocks of threads meet at a counter.
//
// The weight is the left operand of the tensor cores, 64 rows a product; the tokens are the other. All
// blocks of threads read all of x, and with 128 tokens that would be as much as the weight: where rows are
// few, SPLIT blocks divide the columns of a tile. Each leaves its sums in global memory, where nothing but
// ABSENT has been, and adds the others' for its part of the tokens, in the same order whoever comes first.
//
// A norm between two products: the first stores out * g as well, and sums of squares; the second
// multiplies its sums by rstd. Gate and value: copies put 8 rows of the gate in front of the 8 rows of
// their values, so that a thread has both sums of an output.
#include "finish.cuh"
#include "load.cuh"
#include "products.cuh"

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

// The places in both rings of the block that is multiplied next; the weight's: of its first panel.
struct Turns {
    Turn<STAGES> weight;
    Turn<X_STAGES> x;

    METHOD Turn<STAGES> panel() const {
        Turn<STAGES> turn = weight;
        turn.skip(warp_id() / 4);
        return turn;
    }
};

DEVICE void release(const Shared& shared, i32 stage, i32 x_stage) {
    if (lane_id() == 0) {
        arrive_barrier(shared.weight_empty(stage));
        arrive_barrier(shared.x_empty(x_stage));
    }
    __syncwarp();
}

DEVICE void start_block(const Shared& shared, i32 stage, i32 x_stage, Sums& sums, bool adds) {
    start_products();
#pragma unroll
    for (i32 slab = 0; slab < SLABS; slab++) {
        u64 weight = describe_rows(shared.weight(stage) + slab * (PANEL * SLAB * 2));
        u64 x = describe_rows(shared.x(x_stage) + slab * (TOKENS * SLAB * 2));
#pragma unroll
        for (i32 k = 0; k < SLAB / 16; k++) add_product(sums.values, weight + k * 2, x + k * 2, adds || slab + k > 0);
    }
    commit_products();
}

// The tensor cores always have the next block to go on with: a block is given back one block late.
DEVICE void multiply_unit(const Segment& s, const Shared& shared, i32 count, Turns& turns, Sums& sums) {
    i32 late = 0, x_late = 0;
    for (i32 i = 0; i < count; i++) {
        Turn<STAGES> panel = turns.panel();
        wait_barrier(shared.x_full(turns.x.stage), turns.x.parity);
        wait_barrier(shared.weight_full(panel.stage), panel.parity);
        start_block(shared, panel.stage, turns.x.stage, sums, i > 0);
        wait_products<1>();
        if (i > 0) release(shared, late, x_late);
        late = panel.stage, x_late = turns.x.stage;
        turns.weight.skip(s.warpgroups), turns.x.next();
    }
    wait_products<0>();
    sums.settle_all();
    if (count > 0) release(shared, late, x_late);
}

// By warps without rows in this product.
DEVICE void skip_unit(const Segment& s, const Shared& shared, i32 count, Turns& turns) {
    for (i32 i = 0; i < count; i++) {
        wait_barrier(shared.x_full(turns.x.stage), turns.x.parity);
        if (lane_id() == 0) arrive_barrier(shared.x_empty(turns.x.stage));
        __syncwarp();
        turns.weight.skip(s.warpgroups), turns.x.next();
    }
}

DEVICE void finish_alone(const ChainArgs& args, const Segment& s, const Shared& shared, i32 tile, const Sums& sums) {
    constexpr i32 AT_ONCE = EIGHTS < 4 ? EIGHTS : 4;
    Rows rows = rows_of(s, tile);
#pragma unroll
    for (i32 first = 0; first < EIGHTS; first += AT_ONCE) {
        Added added[AT_ONCE];
#pragma unroll
        for (i32 i = 0; i < AT_ONCE; i++) added[i].load(args, s, rows, first + i);
#pragma unroll
        for (i32 i = 0; i < AT_ONCE; i++) {
            float four[4];
            sums.load_four(four, first + i);
            finish_eighth(args, s, shared, rows, first + i, four, added[i]);
        }
    }
    if (s.scale) store_squares(s, shared, tile, 0, EIGHTS);
}

DEVICE float* partial_place(const Segment& s, i32 tile, i32 part, i32 eighth) {
    i32 threads = 128 * s.warpgroups;
    return s.partials + ((i64)((tile * SPLIT + part) * EIGHTS + eighth) * threads + threadIdx.x) * 4;
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
DEVICE void finish_together(const ChainArgs& args, const Segment& s, const Shared& shared, const Unit& unit, const Sums& sums) {
    Float4 own[OWN];
    i32 begin = unit.part * EIGHTS / SPLIT, end = (unit.part + 1) * EIGHTS / SPLIT;
#pragma unroll
    for (i32 eighth = 0; eighth < EIGHTS; eighth++) {
        Float4 four;
        sums.load_four(four.x, eighth);
#pragma unroll
        for (i32 i = 0; i < OWN; i++)
            if (eighth == begin + i) own[i] = four;
        if (eighth < begin || eighth >= end) store_relaxed((Float4*)partial_place(s, unit.tile, unit.part, eighth), four);
    }
    Rows rows = rows_of(s, unit.tile);
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
                else take_partial(partial_place(s, unit.tile, part, eighth), v);
#pragma unroll
                for (i32 j = 0; j < 4; j++) four[j] += v.x[j];
            }
            __syncwarp();
            finish_eighth(args, s, shared, rows, eighth, four, added[i % DEPTH]);
        }
        if (i < OWN && begin + i < end) {
            added[i % DEPTH].load(args, s, rows, begin + i);
#pragma unroll
            for (i32 part = 0; part < SPLIT; part++)
                if (part != unit.part) theirs[i % DEPTH][part] = load_relaxed((const Float4*)partial_place(s, unit.tile, part, begin + i));
        }
    }
    if (s.scale) store_squares(s, shared, unit.tile, begin, end);
}

DEVICE void multiply_segment(const ChainArgs& args, const Segment& s, const Shared& shared, Turns& turns, bool& has_factors) {
    bool is_active = warp_id() < 4 * s.warpgroups;
    for (i32 i = 0; i < num_units(s); i++) {
        Unit unit(s, i);
        if (!is_active) {
            skip_unit(s, shared, unit.count, turns);
            continue;
        }
        Sums sums;
        multiply_unit(s, shared, unit.count, turns, sums);
        if (s.norm_squares && !has_factors) {
            wait_barrier(shared.factors_made(), 0);
            has_factors = true;
        }
        if (s.split > 1) finish_together(args, s, shared, unit, sums);
        else finish_alone(args, s, shared, unit.tile, sums);
    }
}

DEVICE void multiply_all(const ChainArgs& args, const Shared& shared) {
    Turns turns;
    bool has_factors = false;
    for (i32 n = 0; n < args.num_segments; n++) {
        multiply_segment(args, args.segments[n], shared, turns, has_factors);
        if (n + 1 == args.num_segments) break;
        order_copies();
        sync_waiting(CONSUMERS);  // not the barrier of warps that have rows: others are here already
        if (threadIdx.x == 0) {
            __threadfence();
            add_count(args.arrived);
        }
    }
}

// Grid: with several products, as many blocks as run at once; one: any number.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_chain(const __grid_constant__ ChainArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(CUDA_EMULATOR)
    TILED_SHARED(memory);
    Shared shared = {memory};
    i32 warp = __shfl_sync(FULL, (i32)threadIdx.x / 32, 0);
    if (warp == WARPS && lane_id() == 0) {
        prefetch_map(args.segments[0].weight);
        make_barriers(shared);
    }
    __syncthreads();
    Meeting meeting;
    if (warp < WARPS) {
        take_registers();
        wait_for_earlier_kernels();
        meeting.begin(args);
        multiply_all(args, shared);
    } else {
        give_registers();
        if (warp == WARPS) {
            if (lane_id() == 0) load_weights(args, shared);
        } else if (warp < WARPS + 3) {
            wait_for_earlier_kernels();
            meeting.begin(args);
            if (warp == WARPS + 2) make_factors(args, shared, meeting);
            else if (lane_id() == 0) load_tokens(args, shared, meeting);
        }
    }
#endif
}
