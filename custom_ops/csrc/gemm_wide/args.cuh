// What a wide product is compiled for, and its arguments. Mirrored in custom_ops/gemm_wide.py.
#pragma once
#include "gemm_mma/machine.cuh"

#ifndef WARPGROUPS
#define WARPGROUPS 2  // that multiply, each 64 rows of the weight
#endif
#ifndef TOKENS
#define TOKENS 64  // padded: 16, 32, 64, 96 or 128
#endif
#ifndef SLABS
#define SLABS 1  // of 64 columns, that are copied at a time
#endif
#ifndef STAGES
#define STAGES 4  // blocks of columns that shared memory holds, of the weight and of x
#endif
#ifndef SPLIT
#define SPLIT 1  // blocks of threads that divide the columns of a tile
#endif
#ifndef GATED
#define GATED 0
#endif

constexpr i32 SLAB = 64;                     // columns, 128 bytes of a row
constexpr i32 BLOCK = SLAB * SLABS;          // columns that are copied at a time
constexpr i32 PANEL = 64;                    // rows of a warpgroup
constexpr i32 ROWS = PANEL * WARPGROUPS;     // of a tile
constexpr i32 OUTPUTS = GATED ? ROWS / 2 : ROWS;
constexpr i32 CONSUMERS = 128 * WARPGROUPS;  // threads that multiply
constexpr i32 WARPS = CONSUMERS / 32;
constexpr i32 THREADS = CONSUMERS + 32;      // and a warp that loads
constexpr i32 EIGHTS = TOKENS / 8;           // groups of 8 tokens
constexpr i32 OWN = (EIGHTS + SPLIT - 1) / SPLIT;  // of which a part of a tile finishes these, at most
constexpr i32 W_BYTES = ROWS * BLOCK * 2;
constexpr i32 X_BYTES = TOKENS * BLOCK * 2;
constexpr i32 BARRIERS_PLACE = STAGES * (W_BYTES + X_BYTES);
constexpr u32 ABSENT = 0xffffffffu;          // no sum has these bits

// out = f(weight x^T + bias) + residual, of 16-bit floats like everything without a type.
struct WideArgs {
    TensorMap weight;  // boxes of [ROWS, SLAB]; gated: of [ROWS / 16, 2, 8, SLAB]
    TensorMap x;       // boxes of [TOKENS, SLAB]
    const char* bias;  // or null
    const char* residual;  // [num_tokens, num_outputs], or null
    char* out;             // [num_tokens, num_outputs]
    float* partials;       // [tiles, SPLIT, EIGHTS, CONSUMERS, 4], filled with ABSENT
    i64 residual_stride;   // in values
    i32 num_tokens, num_outputs;
    i32 num_blocks;  // of BLOCK columns, at least SPLIT
    i32 num_tiles;
    i32 is_paired;   // whether two neighbours of out and the residual may be accessed at once
};

// The part of the columns that a block of threads has of a tile.
struct Unit {
    i32 tile, part, begin, count;

    METHOD Unit(const WideArgs& args, i32 i) {
        i32 unit = blockIdx.x + i * gridDim.x;
        tile = unit / SPLIT, part = unit - tile * SPLIT;
        begin = part * args.num_blocks / SPLIT;
        count = (part + 1) * args.num_blocks / SPLIT - begin;
    }
};
DEVICE i32 num_units(const WideArgs& args) {
    return (args.num_tiles * SPLIT - (i32)blockIdx.x + (i32)gridDim.x - 1) / (i32)gridDim.x;
}

// Places in shared memory, as addresses of 32 bits.
struct Shared {
    u32 memory;

    METHOD u32 weight(i32 stage) const { return memory + stage * W_BYTES; }
    METHOD u32 x(i32 stage) const { return memory + STAGES * W_BYTES + stage * X_BYTES; }
    METHOD u32 full(i32 stage) const { return memory + BARRIERS_PLACE + stage * 8; }
    METHOD u32 empty(i32 stage) const { return memory + BARRIERS_PLACE + (STAGES + stage) * 8; }
};

// A place in the ring of stages, and the parity of its phase.
struct Turn {
    i32 stage = 0;
    u32 parity = 0;

    METHOD void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
