// What a product for few tokens is compiled for, and its arguments. Mirrored in custom_ops/gemm_mma.py.
#pragma once
#include "machine.cuh"

#ifndef ROWS
#define ROWS 32  // of the weight, in a tile; gated: the second half are the values' rows
#endif
#ifndef TOKENS
#define TOKENS 8  // padded: 8, 16, 24 or 32
#endif
#ifndef BLOCK
#define BLOCK 128  // columns that are copied at a time
#endif
#ifndef K_WARPS
#define K_WARPS 4  // warps that divide the columns of a block; the others divide its rows
#endif
#ifndef STAGES
#define STAGES 8  // blocks of the weight that shared memory holds
#endif
#ifndef X_STAGES
#define X_STAGES 8  // blocks of x that shared memory holds, at most STAGES
#endif
#ifndef RESIDENT
#define RESIDENT 2  // blocks of threads a multiprocessor, for which registers are left
#endif
#ifndef WHOLE_SLABS
#define WHOLE_SLABS 0  // whether columns are whole slabs, so that a box may have several of them
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef HAS_NORM
#define HAS_NORM 0
#endif
#ifndef HAS_RESIDUAL
#define HAS_RESIDUAL 0
#endif
#ifndef HAS_BULK
#define HAS_BULK (__CUDA_ARCH__ >= 900)  // whether the weight is copied by the tensor memory accelerator
#endif

constexpr i32 WARPS = 4;  // that multiply; one more loads
constexpr i32 CONSUMERS = 32 * WARPS;
constexpr i32 THREADS = CONSUMERS + 32;
constexpr i32 SLAB = 64;  // columns of 128 bytes, within which pieces of 16 bytes are swizzled
constexpr i32 ROW_WARPS = WARPS / K_WARPS;
constexpr i32 GROUPS = ROWS / 16 / ROW_WARPS;      // of 16 rows, that a warp multiplies
constexpr i32 EIGHTS = TOKENS / 8;                 // groups of 8 tokens
constexpr i32 WARP_COLUMNS = BLOCK / K_WARPS;      // of a block, that a warp multiplies
constexpr i32 HALVES = GATED ? 2 : 1;
constexpr i32 OUTPUTS = ROWS / HALVES;              // of a tile
constexpr i32 PITCH = ROWS + 4;                    // of sums of a token; stores of a warp are in different banks
constexpr i32 W_BYTES = ROWS * BLOCK * 2;
constexpr i32 SCALES_PLACE = TOKENS * BLOCK * 2;   // in a block of x, of the norm's weight
constexpr i32 X_BYTES = SCALES_PLACE + (HAS_NORM ? BLOCK * 2 : 0);
constexpr i32 SUMS_BYTES = K_WARPS * TOKENS * PITCH * 4;
constexpr i32 RING_BYTES = STAGES * W_BYTES + X_STAGES * X_BYTES;
constexpr i32 SQUARES_PLACE = RING_BYTES;
constexpr i32 BARRIERS_PLACE = SQUARES_PLACE + K_WARPS * TOKENS * 4;
constexpr i32 ITEMS = (TOKENS * OUTPUTS + CONSUMERS - 1) / CONSUMERS;  // outputs of a thread

static_assert(WARPS % K_WARPS == 0 && ROWS % (16 * ROW_WARPS) == 0, "warps have whole groups of rows");
static_assert(WARP_COLUMNS % 32 == 0 && BLOCK % SLAB == 0, "a warp's columns are whole pairs of steps");
static_assert(X_STAGES <= STAGES, "a block of x is loaded after that of the weight");
static_assert(RING_BYTES >= SUMS_BYTES, "sums fit into the rings");

struct MmaArgs {
    TensorMap map;  // of the weight: boxes of [slabs, HALVES, OUTPUTS, SLAB]
    const char* x;  // [num_tokens, size] of 16-bit floats, like all others
    const char* weight;
    const char* bias;         // or null
    const char* norm_weight;  // [size]
    const char* residual;     // [num_tokens, num_outputs], like `out`
    char* out;
    i64 x_stride;  // in values
    i64 residual_stride;
    i32 num_tokens;
    i32 num_outputs;
    i32 size;
    i32 lead;     // blocks still to be asked for when the next kernel may start
    i32 stagger;  // blocks by which a tile begins after the tile before; the columns go round
    float eps;
    i32 padding[10];
};

// What a block of threads works on: the `count` blocks of columns of a tile, from block `first` on.
struct Part {
    i32 tile, count, first;
};

DEVICE Part part_of(const MmaArgs& args) {
    Part part;
    part.tile = blockIdx.x;
    part.count = (args.size + BLOCK - 1) / BLOCK;
    part.first = (i64)part.tile * args.stagger % part.count;
    return part;
}

// Places in shared memory.
struct Shared {
    char* memory;

    METHOD char* weights(i32 stage) const { return memory + stage * W_BYTES; }
    METHOD char* x(i32 stage) const { return memory + STAGES * W_BYTES + stage * X_BYTES; }
    METHOD float* sums() const { return (float*)memory; }  // in the rings: [K_WARPS, TOKENS, PITCH]
    METHOD float* squares() const { return (float*)(memory + SQUARES_PLACE); }  // [K_WARPS, TOKENS]
    METHOD u32 barrier(i32 i) const { return shared_address(memory + BARRIERS_PLACE + i * 8); }
    METHOD u32 weights_full(i32 stage) const { return barrier(stage); }
    METHOD u32 x_full(i32 stage) const { return barrier(STAGES + stage); }
    METHOD u32 read(i32 stage) const { return barrier(STAGES + X_STAGES + stage); }  // the weight, and x with it
};

// A place in a ring of N stages, and the parity of its phase.
template <int N> struct Turn {
    i32 stage = 0;
    u32 parity = 0;

    METHOD void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};
