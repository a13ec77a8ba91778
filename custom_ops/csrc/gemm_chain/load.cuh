// The warps that load: the weights of all products of a chain without a stop, x when it has been written,
// and the factors of norms.
#pragma once
#include "args.cuh"

#ifndef CUDA_EMULATOR
// Copies a box of a weight [row, column], which is read once.
DEVICE void copy_rows(u32 target, const TensorMap& map, u32 barrier, i32 column, i32 row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "l"(EVICT_FIRST)
        : "memory");
}

// The same of [group, half, row of 8, column], both halves.
DEVICE void copy_groups(u32 target, const TensorMap& map, u32 barrier, i32 column, i32 group) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(0), "r"(group), "l"(EVICT_FIRST)
        : "memory");
}

// Copies a box of x, which all blocks of threads read.
DEVICE void copy_tokens(u32 target, const TensorMap& map, u32 barrier, i32 column) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(0)
        : "memory");
}

// Ordinary stores to global memory before it are seen by copies after it.
DEVICE void order_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE u64 load_count(const u64* p) {
    u64 result;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(result) : "l"(p) : "memory");
    return result;
}
DEVICE void add_count(u64* p) { asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(1ull) : "memory"); }

// Between two looks at what others write; ends a kernel that looks for ever.
struct Patience {
    i32 looks = 0;
    METHOD void wait() {
        if (++looks > 3000000) asm volatile("trap;");
    }
};
// More registers for the threads that multiply, from those that load.
DEVICE void take_registers() {
#if WARPGROUPS == 3 && RESIDENT == 1
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
}
DEVICE void give_registers() {
#if WARPGROUPS == 3 && RESIDENT == 1
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
}
// A barrier of the first `count` threads of a block, beside that of `sync_first`.
DEVICE void sync_waiting(i32 count) { asm volatile("bar.sync 2, %0;" ::"r"(count) : "memory"); }
#endif

// Where all blocks of threads meet between products: how many had arrived before this launch.
struct Meeting {
    u64 before;

    // By all warps but that of the weights; nobody arrives before all have looked.
    METHOD void begin(const ChainArgs& args) {
        before = 0;
        if (args.num_segments == 1) return;
        u64 count = load_count(args.arrived);
        before = count - count % gridDim.x;
        __syncwarp();
        sync_waiting(CONSUMERS + 64);
    }
    METHOD void wait(const ChainArgs& args, i32 number) const {
        Patience patience;
        while (load_count(args.arrived) - before < (u64)number * gridDim.x) patience.wait();
    }
};

DEVICE void make_barriers(const Shared& shared) {
    for (i32 stage = 0; stage < STAGES; stage++) {
        init_barrier(shared.weight_full(stage), 1);
        init_barrier(shared.weight_empty(stage), 4);
    }
    for (i32 stage = 0; stage < X_STAGES; stage++) {
        init_barrier(shared.x_full(stage), 1);
        init_barrier(shared.x_empty(stage), WARPS);
    }
    init_barrier(shared.factors_made(), 1);
    publish_barriers();
}

DEVICE i32 total_blocks(const ChainArgs& args) {
    i32 total = 0;
    for (i32 n = 0; n < args.num_segments; n++)
        for (i32 i = 0; i < num_units(args.segments[n]); i++) total += Unit(args.segments[n], i).count;
    return total;
}

// Copies a panel, 64 rows from row `row` of all tiles on; gated: 32 of the gate and their values.
DEVICE void copy_panel(const Segment& s, u32 target, u32 barrier, i32 block, i32 row) {
    expect_bytes(barrier, W_BYTES);
#pragma unroll
    for (i32 slab = 0; slab < SLABS; slab++) {
        i32 column = block * BLOCK + slab * SLAB;
        u32 place = target + slab * (PANEL * SLAB * 2);
        if (s.is_gated) copy_groups(place, s.weight, barrier, column, row / 16);
        else copy_rows(place, s.weight, barrier, column, row);
    }
}

// By one thread: blocks of the weights of all products, as stages become free.
DEVICE void load_weights(const ChainArgs& args, const Shared& shared) {
    i32 left = total_blocks(args);
    Turn<STAGES> turn;
    if (left <= args.lead) let_next_start();
    for (i32 n = 0; n < args.num_segments; n++) {
        const Segment& s = args.segments[n];
        for (i32 i = 0; i < num_units(s); i++) {
            Unit unit(s, i);
            for (i32 j = 0; j < unit.count; j++) {
                for (i32 panel = 0; panel < s.warpgroups; panel++, turn.next()) {
                    wait_barrier(shared.weight_empty(turn.stage), turn.parity ^ 1);
                    i32 row = (unit.tile * s.warpgroups + panel) * PANEL;
                    copy_panel(s, shared.weight(turn.stage), shared.weight_full(turn.stage), unit.begin + j, row);
                }
                if (--left == args.lead) let_next_start();
            }
        }
    }
}

// By one thread: blocks of x of each product, once all blocks of threads have written it.
DEVICE void load_tokens(const ChainArgs& args, const Shared& shared, const Meeting& meeting) {
    Turn<X_STAGES> turn;
    for (i32 n = 0; n < args.num_segments; n++) {
        const Segment& s = args.segments[n];
        if (n) meeting.wait(args, n);
        order_copies();
        for (i32 i = 0; i < num_units(s); i++) {
            Unit unit(s, i);
            for (i32 j = 0; j < unit.count; j++) {
                wait_barrier(shared.x_empty(turn.stage), turn.parity ^ 1);
                u32 barrier = shared.x_full(turn.stage);
                expect_bytes(barrier, X_BYTES);
#pragma unroll
                for (i32 slab = 0; slab < SLABS; slab++)
                    copy_tokens(shared.x(turn.stage) + slab * TOKENS * (SLAB * 2), s.x, barrier, (unit.begin + j) * BLOCK + slab * SLAB);
                turn.next();
            }
        }
    }
}

// By a warp: what each token's products are multiplied by, for products whose x has a norm.
DEVICE void make_factors(const ChainArgs& args, const Shared& shared, const Meeting& meeting) {
    for (i32 n = 1; n < args.num_segments; n++) {
        const Segment& s = args.segments[n];
        if (!s.norm_squares) continue;
        meeting.wait(args, n);
        for (i32 token = lane_id(); token < TOKENS; token += 32) {
            float sum = 0.0f;
#pragma unroll 8
            for (i32 tile = 0; tile < s.num_squares; tile++) sum += load_relaxed(s.norm_squares + tile * TOKENS + token);
            shared.factors()[token] = rsqrtf(sum / s.size + s.eps);
        }
        __syncwarp();
        if (lane_id() == 0) arrive_barrier(shared.factors_made());
    }
}
