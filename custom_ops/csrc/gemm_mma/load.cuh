// The warp that loads: the weight, which needs no other kernel, and x. Blocks lie in shared memory as
// [slab, row, 128 bytes], the pieces of 16 bytes of a row swizzled by its number.
#pragma once
#include "args.cuh"

#ifndef CUDA_EMULATOR
#if __CUDA_ARCH__ >= 900
// Copies a box of the weight [slab, half, row, column], which is read once.
DEVICE void copy_box(u32 target, const TensorMap& map, u32 barrier, i32 column, i32 row, i32 slab) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(0), "r"(slab), "l"(EVICT_FIRST)
        : "memory");
}
#endif

// One arrival when all copies that this thread has started are done.
DEVICE void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#if __CUDA_ARCH__ < 900
DEVICE void wait_at(u32 barrier, u32 parity) {
    u32 is_over = 0;
    while (!is_over)
        asm volatile(
            "{\n"
            ".reg .pred over;\n"
            "mbarrier.test_wait.parity.shared.b64 over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, over;\n"
            "}"
            : "=r"(is_over)
            : "r"(barrier), "r"(parity)
            : "memory");
}
#else
DEVICE void wait_at(u32 barrier, u32 parity) { wait_barrier(barrier, parity); }
#endif
#endif

// By the warp that loads, before a barrier of the block.
DEVICE void make_barriers(const Shared& shared) {
    for (i32 i = lane_id(); i < 2 * STAGES + X_STAGES; i += 32)
        init_barrier(shared.barrier(i), i >= STAGES + X_STAGES ? WARPS : i < STAGES && HAS_BULK ? 1 : 32);
#if HAS_BULK
    publish_barriers();
#endif
}

DEVICE i32 first_row(const MmaArgs& args, i32 tile, i32 half) { return tile * OUTPUTS + half * args.num_outputs; }

// Copies rows of a matrix, 16 bytes a lane; zeros past `num_rows` and past the columns.
template <int COUNT>
DEVICE void copy_piecewise(char* target, const char* source, i64 stride, i32 num_rows, i32 column, i32 size) {
    i32 row = lane_id() >> 3, piece = lane_id() & 7;
    bool has_column = column + piece * 8 < size;
    char* place = target + row * 128;
#pragma unroll
    for (i32 first = 0; first < COUNT; first += 4, row += 4, place += 512) {
        bool is_there = has_column && row < num_rows;
        const char* from = source + (is_there ? (row * stride + column + piece * 8) * 2 : 0);
        copy_async(place + ((piece ^ (row & 7)) << 4), from, is_there ? 16 : 0);
    }
}

DEVICE void start_weights(const MmaArgs& args, char* target, u32 barrier, i32 tile, i32 column) {
#if HAS_BULK
    if (lane_id()) return;
    expect_bytes(barrier, W_BYTES);
    u32 place = shared_address(target);
    if (WHOLE_SLABS)
        copy_box(place, args.map, barrier, 0, tile * OUTPUTS, column / SLAB);
    else
#pragma unroll
        for (i32 slab = 0; slab < BLOCK / SLAB; slab++)
            copy_box(place + slab * (ROWS * 128), args.map, barrier, column + slab * SLAB, tile * OUTPUTS, 0);
#else
    for (i32 slab = 0; slab < BLOCK / SLAB; slab++)
        for (i32 half = 0; half < HALVES; half++, target += OUTPUTS * 128) {
            i32 row = first_row(args, tile, half), num_rows = args.num_outputs * HALVES - row;
            const char* source = num_rows > 0 ? args.weight + (i64)row * args.size * 2 : args.weight;
            copy_piecewise<OUTPUTS>(target, source, args.size, num_rows, column + slab * SLAB, args.size);
        }
    arrive_after_copies(barrier);
#endif
}

// A position on the round of a tile's blocks.
struct Line {
    i32 index, block;

    METHOD void next(const Part& part) {
        index++, block++;
        if (block == part.count) block = 0;
    }
    METHOD i32 column() const { return block * BLOCK; }
};

DEVICE Line start_of(const Part& part) { return {0, part.first}; }

// Loads the weight's blocks in turn.
struct Weights {
    Line at;      // what comes next
    i32 trigger;  // the block after which the next kernel may start
    Turn<STAGES> turn;

    METHOD void begin(const MmaArgs& args, const Part& part) {
        at = start_of(part);
        trigger = part.count - 1 - args.lead;
        if (trigger < 0) let_next_start();
    }
    METHOD void load(const MmaArgs& args, const Part& part, const Shared& shared) {
        start_weights(args, shared.weights(turn.stage), shared.weights_full(turn.stage), part.tile, at.column());
        if (at.index == trigger) let_next_start();
        at.next(part);
        turn.next();
    }
};

// The norm's weight of a block, zeros past the end.
DEVICE void copy_scales(const MmaArgs& args, char* target, i32 column) {
    for (i32 piece = lane_id(); piece < BLOCK / 8; piece += 32) {
        bool is_there = column + piece * 8 < args.size;
        copy_async(target + piece * 16, args.norm_weight + (is_there ? column + piece * 8 : 0) * 2, is_there ? 16 : 0);
    }
}

// The same for x and the norm's weight.
struct Tokens {
    Line at;
    Turn<X_STAGES> turn;

    METHOD void load(const MmaArgs& args, const Part& part, const Shared& shared) {
        char* place = shared.x(turn.stage);
#pragma unroll
        for (i32 slab = 0; slab < BLOCK / SLAB; slab++)
            copy_piecewise<TOKENS>(place + slab * TOKENS * 128, args.x, args.x_stride, args.num_tokens,
                                   at.column() + slab * SLAB, args.size);
        if (HAS_NORM) copy_scales(args, place + SCALES_PLACE, at.column());
        arrive_after_copies(shared.x_full(turn.stage));
        at.next(part);
        turn.next();
    }
};

// The ring of the weight is filled before any other kernel is waited for.
DEVICE void load_blocks(const MmaArgs& args, const Part& part, const Shared& shared) {
    i32 total = part.count;
    Weights weights;
    weights.begin(args, part);
    while (weights.at.index < min(total, STAGES)) weights.load(args, part, shared);
    wait_for_earlier_kernels();
    Tokens tokens = {start_of(part)};
    while (tokens.at.index < min(total, X_STAGES)) tokens.load(args, part, shared);
    Turn<STAGES> read;
    for (; tokens.at.index < total; read.next()) {
        wait_at(shared.read(read.stage), read.parity);
        if (weights.at.index < total) weights.load(args, part, shared);
        tokens.load(args, part, shared);
    }
    commit_copies();
    wait_copies<0>();
}
