// The warp that loads: the weight's blocks at once, those of x when they have been written.
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
#endif

DEVICE void make_barriers(const Shared& shared) {
    for (i32 stage = 0; stage < STAGES; stage++) {
        init_barrier(shared.full(stage), 2);
        init_barrier(shared.empty(stage), WARPS);
    }
    publish_barriers();
}

// Copies the tile's rows of a block of columns.
DEVICE void copy_weight(const WideArgs& args, const Shared& shared, i32 tile, i32 block, i32 stage) {
    u32 barrier = shared.full(stage);
    expect_bytes(barrier, W_BYTES);
#pragma unroll
    for (i32 slab = 0; slab < SLABS; slab++) {
        i32 column = block * BLOCK + slab * SLAB;
        u32 place = shared.weight(stage) + slab * (ROWS * SLAB * 2);
        if (GATED) copy_groups(place, args.weight, barrier, column, tile * (ROWS / 16));
        else copy_rows(place, args.weight, barrier, column, tile * ROWS);
    }
}

// Copies a block of columns of all tokens.
DEVICE void copy_x(const WideArgs& args, const Shared& shared, i32 block, i32 stage) {
    u32 barrier = shared.full(stage);
    expect_bytes(barrier, X_BYTES);
#pragma unroll
    for (i32 slab = 0; slab < SLABS; slab++) {
        i32 column = block * BLOCK + slab * SLAB;
        copy_tokens(shared.x(stage) + slab * TOKENS * (SLAB * 2), args.x, barrier, column);
    }
}

// A way through all blocks of columns of all units of a block of threads.
struct Walk {
    i32 number, left;  // of the unit; blocks of it
    i32 tile, block;

    METHOD void begin(const WideArgs& args, i32 i) {
        Unit unit(args, i);
        number = i, left = unit.count, tile = unit.tile, block = unit.begin;
    }
    METHOD void next(const WideArgs& args) {
        block++;
        if (--left == 0 && number + 1 < num_units(args)) begin(args, number + 1);
    }
};

DEVICE i32 total_blocks(const WideArgs& args) {
    i32 total = 0;
    for (i32 i = 0; i < num_units(args); i++) total += Unit(args, i).count;
    return total;
}

// By one thread, before anybody waits for what an earlier kernel writes: fills the ring with weights.
DEVICE void load_first(const WideArgs& args, const Shared& shared, i32 total) {
    Walk walk;
    walk.begin(args, 0);
    for (i32 i = 0; i < min(total, STAGES); i++, walk.next(args)) copy_weight(args, shared, walk.tile, walk.block, i);
}

// By one thread: all of x, and the other weights, as stages become free.
DEVICE void load_all(const WideArgs& args, const Shared& shared, i32 total) {
    Walk walk;
    Turn turn;
    walk.begin(args, 0);
    for (i32 i = 0; i < total; i++, walk.next(args), turn.next()) {
        if (i >= STAGES) {
            wait_barrier(shared.empty(turn.stage), turn.parity ^ 1);
            copy_weight(args, shared, walk.tile, walk.block, turn.stage);
        }
        copy_x(args, shared, walk.block, turn.stage);
    }
}
