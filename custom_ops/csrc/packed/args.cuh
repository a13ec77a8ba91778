// What a product with a quantised weight is compiled for, and its arguments. Mirrored in
// custom_ops/quant_packed.py.
#pragma once

#define E4M3 0      // bytes of 8-bit floats
#define INT8 1      // bytes of integers
#define NVFP4 2     // two e2m1 a byte, an e4m3 scale for 16 of them
#define MXFP4 3     // two e2m1 a byte, a power of two for 32 of them
#define INT4 4      // two codes of 0 to 15 a byte, a 16-bit scale for 2^GROUP_BITS of them
#define X_VALUES 0  // x: 16-bit floats of the type that is multiplied
#define X_E4M3 1    // bytes of 8-bit floats
#define X_INT8 2    // bytes of integers
#define X_SHARED 3  // one token, which each block of threads prepares in shared memory
#define PLAIN 0     // a token in shared memory is not quantised, or as below
#define ONE_SCALE 1
#define BLOCK_SCALES 2
#define INTEGERS 3
#define SCALED 4  // not quantised, but divided by a power of two, so that fp16 holds it

#ifndef FORMAT
#define FORMAT E4M3
#endif
#ifndef X_KIND
#define X_KIND X_SHARED
#endif
#ifndef QUANT
#define QUANT PLAIN
#endif
#ifndef HAS_NORM
#define HAS_NORM 0
#endif
#ifndef ROW_BLOCK
#define ROW_BLOCK 0  // rows that share a scale for each 128 columns of 8-bit weights: 1, 128, or 0: no such scales
#endif
#ifndef X_BLOCK_SCALES
#define X_BLOCK_SCALES 0  // whether each token has a scale for each 128 columns
#endif
#ifndef GROUP_BITS
#define GROUP_BITS 7
#endif
#ifndef OFFSETS
#define OFFSETS 0  // whether zeros of INT4 are values, which code 8 means, and not codes
#endif
#ifndef IO_HALF
#define IO_HALF 0  // whether x, out and others are fp16, not bf16; HALF: what is multiplied is
#endif
#ifndef HALF
#define HALF 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef TOKENS
#define TOKENS 8  // padded to a multiple of 8
#endif
#ifndef SIXTEENS
#define SIXTEENS 1  // groups of 16 rows in a tile
#endif
#ifndef WARPS
#define WARPS 8  // that divide the columns
#endif
#ifndef RING
#define RING 0  // whether weights go through shared memory, see ring.cuh, or to registers at once
#endif
#ifndef AHEAD
#define AHEAD 4  // units of each warp on their way
#endif
#ifndef RESIDENT
#define RESIDENT 2  // blocks of threads a multiprocessor, for which registers are left
#endif
#ifndef X_PARTS
#define X_PARTS 2  // pieces of 8 columns, of one token, that a thread prepares
#endif
#include "machine.cuh"

constexpr i32 THREADS = 32 * WARPS;
constexpr bool IS_PACKED = FORMAT >= NVFP4;
constexpr bool HAS_BLOCKS = ROW_BLOCK > 0 || X_BLOCK_SCALES || QUANT == BLOCK_SCALES;
constexpr i32 CHUNK = IS_PACKED ? 32 : 16;  // columns in 16 bytes
constexpr i32 UNIT = 8 * CHUNK;             // columns of 128 bytes, which 4 lanes load in two chunks each
constexpr i32 PAIRS = CHUNK / 2;            // of values of a chunk
constexpr i32 EIGHTS = TOKENS / 8;
constexpr i32 HALVES = GATED ? 2 : 1;
constexpr i32 ROWS = 16 * SIXTEENS;
constexpr i32 OUTPUTS = ROWS / HALVES;  // of a tile
constexpr i32 SUMMED = RING && X_KIND == X_SHARED ? 1 : TOKENS;  // tokens whose sums are shared
constexpr i32 PITCH = SUMMED == 1 ? 1 : TOKENS + 1;              // of the sums of a row
constexpr i32 X_BYTES = X_KIND == X_E4M3 || X_KIND == X_INT8 ? 1 : 2;  // of a value of x
constexpr i32 PIECES = CHUNK * X_BYTES / 16;  // of 16 bytes of x, that go with a chunk
// Whether each lane sums its own columns apart, so that scales of groups may multiply those sums: of the
// 8 tokens of the tensor cores, 4 are the same one, each with the columns of one of 4 lanes, else 0.
constexpr bool LANE_SUMS = RING && IS_PACKED && X_KIND == X_SHARED;
// What each thread copies of a unit through the ring: pieces of 16 bytes of weights, words of 4 bytes
// with their scales, pieces of x.
constexpr i32 CHUNKS = SIXTEENS * 4;
constexpr i32 WORDS = IS_PACKED ? CHUNKS * (FORMAT == INT4 ? 2 : 1) : ROW_BLOCK ? SIXTEENS * 2 : 0;
constexpr i32 X_PIECES = X_KIND == X_SHARED ? 0 : PIECES;
constexpr i32 WORDS_PLACE = THREADS * 16 * CHUNKS;  // in a stage
constexpr i32 PIECES_PLACE = WORDS_PLACE + THREADS * 4 * WORDS;
constexpr i32 STAGE_BYTES = RING ? PIECES_PLACE + THREADS * 16 * 2 * EIGHTS * X_PIECES : 0;
constexpr i32 SUMS_BYTES = WARPS * ROWS * PITCH * 4;
constexpr i32 SUM_TILES = SUMMED == 1 ? 2 : 1;  // whose sums have a place
constexpr i32 SUMS_PLACE = 0;                   // of tiles [WARPS, ROWS, PITCH] fp32
constexpr i32 REDUCE_PLACE = SUMS_PLACE + SUM_TILES * SUMS_BYTES;  // [2, 32] fp32
constexpr i32 RING_PLACE = (REDUCE_PLACE + 256 + 15) / 16 * 16;    // AHEAD stages
constexpr i32 X_PLACE = RING_PLACE + AHEAD * STAGE_BYTES;          // one token of 16-bit values
static_assert(!HAS_BLOCKS || !IS_PACKED, "scales of 128 columns are of bytes: a unit has one");
static_assert(!LANE_SUMS || HALF, "weights without their scales are exact in fp16");
static_assert(X_KIND != X_SHARED || TOKENS == 8, "one token is prepared in shared memory");

struct PackedArgs {
    const char* x;          // [num_tokens, size]
    const float* x_scale;   // by kind of x: [1] or [num_tokens] or [num_tokens, x_scale_columns]; or null
    const char* weight;     // [rows, row_bytes]
    const char* scale;      // of the weight; of 8-bit ones fp32
    const char* zero;       // of INT4: bytes, or null: 8; with OFFSETS values like the scales
    const float* row_scale;  // fp32 of each row, or null; of experts in NVFP4 of each matrix
    const char* bias;       // or null
    const char* norm_weight;
    const char* residual;   // or null
    char* out;              // [num_tokens, num_outputs]
    i64 x_stride;           // in values
    i64 residual_stride;
    i32 num_tokens;
    i32 num_outputs;
    i32 size;
    i32 row_bytes;
    i32 scale_columns;      // scales of a row
    i32 x_scale_step;       // from a token's scale to the next one's: 0 if one serves all
    i32 num_tiles;
    i32 warp_units;         // units of each warp in a tile; without a ring a multiple of AHEAD
    i32 padded_size;        // columns of the units of all warps
    i32 row_scale_step;     // 0 if one serves all rows
    float eps;
    float factor;           // of all sums
};

// The row of the weight in slot `slot` of 16 of a group of a tile; past the last output, the last one's.
DEVICE i32 row_of(const PackedArgs& args, i32 tile, i32 group, i32 slot) {
    i32 first = tile * OUTPUTS + group * (16 / HALVES);
    i32 output = min(first + (GATED ? slot & 7 : slot), args.num_outputs - 1);
    return output + (GATED && slot >= 8 ? args.num_outputs : 0);
}
