// What a chain of products is compiled for, and its arguments. Mirrored in custom_ops/gemm_chain.py.
#pragma once
#include "gemm_mma/machine.cuh"

#ifndef WARPGROUPS
#define WARPGROUPS 2  // that multiply, each 64 rows of the weight
#endif
#ifndef TOKENS
#define TOKENS 64  // padded: 8, 16, 32, 64, 96 or 128
#endif
#ifndef SLABS
#define SLABS 1  // of 64 columns, that are copied at a time
#endif
#ifndef STAGES
#define STAGES 12  // panels of a weight that shared memory holds: 64 rows of a block of columns
#endif
#ifndef X_STAGES
#define X_STAGES 4  // blocks of x that it holds
#endif
#ifndef SPLIT
#define SPLIT 4  // parts of the columns of a tile, of products that are divided so
#endif
#ifndef RESIDENT
#define RESIDENT 1  // blocks of threads a multiprocessor, for which registers are left
#endif

constexpr i32 SLAB = 64;                      // columns, 128 bytes of a row
constexpr i32 BLOCK = SLAB * SLABS;           // columns that are copied at a time
constexpr i32 PANEL = 64;                     // rows of a product
constexpr i32 CONSUMERS = 128 * WARPGROUPS;   // threads that multiply
constexpr i32 WARPS = CONSUMERS / 32;
constexpr i32 THREADS = CONSUMERS + 128;      // and warps for the weight, for x, for the norm, and none
constexpr i32 EIGHTS = TOKENS / 8;            // groups of 8 tokens
constexpr i32 OWN = (EIGHTS + SPLIT - 1) / SPLIT;  // of which a part of a tile finishes these, at most
constexpr i32 MAX_SEGMENTS = 4;
constexpr i32 W_BYTES = PANEL * BLOCK * 2;
constexpr i32 X_BYTES = TOKENS * BLOCK * 2;
constexpr i32 FACTORS_PLACE = STAGES * W_BYTES + X_STAGES * X_BYTES;
constexpr i32 SQUARES_PLACE = FACTORS_PLACE + TOKENS * 4;
constexpr i32 BARRIERS_PLACE = SQUARES_PLACE + WARPS * TOKENS * 4;

static_assert(STAGES >= WARPGROUPS, "the panels of a block of columns are multiplied together");

// One product: out = f(weight x^T + bias) + residual, of 16-bit floats like everything without a type.
struct Segment {
    TensorMap weight;  // boxes of [rows, SLAB]; gated: of [rows / 16, 2, 8, SLAB]
    TensorMap x;       // boxes of [TOKENS, SLAB]
    const char* bias;  // or null
    const char* residual;      // [num_tokens, num_outputs], or null
    char* out;                 // [num_tokens, num_outputs]
    const char* scale;         // of the norm after this product [num_outputs], or null
    char* scaled;              // where out times that goes, [num_tokens, num_outputs]
    float* squares;            // [tiles, TOKENS], of out
    const float* norm_squares;  // those of the product before; null: x has no norm
    float* partials;           // [tiles, SPLIT, EIGHTS, threads, 4], filled with ABSENT
    i64 residual_stride;       // in values
    i32 num_outputs, size, num_blocks;  // of BLOCK columns, at least `split`
    i32 warpgroups;            // that have rows of a tile
    i32 tiles, split;          // split: 1 or SPLIT
    i32 is_gated, num_squares;  // num_squares: tiles of the product before
    float eps;
    i32 padding[9];

    METHOD i32 rows() const { return warpgroups * PANEL; }
    METHOD i32 outputs() const { return is_gated ? rows() / 2 : rows(); }
};

struct ChainArgs {
    Segment segments[MAX_SEGMENTS];
    u64* arrived;  // by the barrier of all blocks of threads
    i32 num_segments, num_tokens;
    i32 lead;       // blocks still to be asked for when the next kernel may start
    i32 is_paired;  // whether two neighbours of out and the residual may be accessed at once
    i32 padding[10];
};

constexpr u32 ABSENT = 0xffffffffu;  // no sum has these bits

// The part of a segment's columns that a block of threads has, tile after tile.
struct Unit {
    i32 tile, part, begin, count;

    METHOD Unit(const Segment& s, i32 i) {
        i32 unit = blockIdx.x + i * gridDim.x;
        tile = unit / s.split, part = unit - tile * s.split;
        begin = part * s.num_blocks / s.split;
        count = (part + 1) * s.num_blocks / s.split - begin;
    }
};
DEVICE i32 num_units(const Segment& s) {
    return max(0, (s.tiles * s.split - (i32)blockIdx.x + (i32)gridDim.x - 1) / (i32)gridDim.x);
}

// Places in shared memory, as addresses of 32 bits.
struct Shared {
    char* memory;

    METHOD u32 at(i32 place) const { return shared_address(memory + place); }
    METHOD u32 weight(i32 stage) const { return at(stage * W_BYTES); }
    METHOD u32 x(i32 stage) const { return at(STAGES * W_BYTES + stage * X_BYTES); }
    METHOD float* factors() const { return (float*)(memory + FACTORS_PLACE); }  // [TOKENS]
    METHOD float* squares() const { return (float*)(memory + SQUARES_PLACE); }  // [WARPS, TOKENS]
    METHOD u32 barrier(i32 i) const { return at(BARRIERS_PLACE + i * 8); }
    METHOD u32 weight_full(i32 stage) const { return barrier(stage); }
    METHOD u32 weight_empty(i32 stage) const { return barrier(STAGES + stage); }
    METHOD u32 x_full(i32 stage) const { return barrier(2 * STAGES + stage); }
    METHOD u32 x_empty(i32 stage) const { return barrier(2 * STAGES + X_STAGES + stage); }
    METHOD u32 factors_made() const { return barrier(2 * STAGES + 2 * X_STAGES); }
};

// A place in a ring of N stages, and the parity of its phase.
template <int N> struct Turn {
    i32 stage = 0;
    u32 parity = 0;

    METHOD void skip(i32 count) {  // at most N
        stage += count;
        if (stage >= N) stage -= N, parity ^= 1;
    }
    METHOD void next() { skip(1); }
};
