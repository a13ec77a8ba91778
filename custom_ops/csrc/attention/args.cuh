// The arguments of the decode kernel, and its work list. Mirrored in custom_ops/attention_decode_cuda.py
// and custom_ops/attention_work.py.
#pragma once
#include "device.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // values of a head, a multiple of 16
#endif
#ifndef STAGES
#define STAGES 2  // chunks of a warp that may be on their way
#endif
#ifndef GROUP
#define GROUP 4  // query heads of a KV head
#endif
#ifndef RESIDENT
#define RESIDENT 2  // blocks a multiprocessor, for which registers are left
#endif
#ifndef HAS_GROUPS
#define HAS_GROUPS 1  // whether the work list may have shared prefixes
#endif
#ifndef PREFIX_CHUNKS
#define PREFIX_CHUNKS 2  // chunks of a shared prefix between two looks at the maxima; divides the warps
#endif
#ifndef KEEPS_ALL
#define KEEPS_ALL 0  // whether L2 keeps what one lane reads as long as a prefix, which several lanes read
#endif
#ifndef QUANTIZED
#define QUANTIZED 0  // whether results are 8-bit floats
#endif
#ifndef HAS_CAP
#define HAS_CAP 0  // whether scores have a soft cap
#endif

constexpr float SLACK = 8.0f;  // log2 by which a score may exceed the maximum that its sums are kept
                               // relative to; 2^8 is far from the ends of 16-bit floats
constexpr i32 WARPS = 4;
constexpr i32 MERGED_HEADS = 4;  // most heads of a token that a warp combines together
constexpr i32 THREADS = 32 * WARPS;
constexpr i32 CHUNK = 16;                       // positions a warp reads at a time, all of one page
constexpr i32 ROW_BYTES = 2 * HEAD_DIM + 16;    // in shared memory; 8 rows lie in different banks
constexpr i32 CHUNK_BYTES = CHUNK * ROW_BYTES;  // keys or values of a chunk
constexpr i32 DIM_TILES = HEAD_DIM / 16;
constexpr i32 HEAD_TILES = (GROUP + 7) / 8;  // tiles of 8 query rows, of one token
constexpr i32 SHARED_TILES = 2;              // tiles of 8 query rows a warp, of a shared prefix
constexpr i32 ACC_STRIDE = HEAD_DIM + 4;
constexpr i32 PART_SIZE = HEAD_DIM + 4;  // floats of a head's partial result: values, then the
                                         // log2 of the sum of weights

struct DecodeArgs {
    const char* q;        // [T, H, D] of 16-bit floats
    const char* k_cache;  // [num_pages, page_size, H_kv, D]
    const char* v_cache;
    const i32* block_table;
    i32* work;
    const i64* positions;  // [T]
    char* out;             // [T, H, D], of the dtype of q, or QUANTIZED: of e4m3
    float* partials;       // [partial rows, H, PART_SIZE]
    const float* sinks;    // [H] or null
    const float* out_scale;  // QUANTIZED: of all results
    i64 table_stride;
    i64 q_token;  // strides, in values
    i64 q_head;
    i32 num_tokens;
    i32 num_kv_heads;
    i32 page_shift;
    i32 width;  // members of a tile of a shared prefix
    i32 kv_tile;  // positions of a tile, and of one of a shared prefix
    i32 group_tile;
    i32 lanes;  // where regions of the work list begin
    i32 units;
    i32 members;
    i32 counters;
    i32 slots;
    i32 window;
    i32 early;     // chunks a warp copies before it waits, if it has that many stages
    i32 prefetch;  // chunks of a shared prefix after those that it then asks L2 for
    i32 is_early;
    float scale;  // of products to log2 scores, without a cap
    float cap_in;  // with a soft cap: into the tanh, and the cap itself
    float cap_out;
};

constexpr i32 LANE_FIELDS = 32;
enum Lane { LANE_UNIT, LANE_TILE, LANE_STOP, LANE_REAL, LANE_RECORD, LANE_PAGES = 20 };
enum Unit {
    TILE_START,
    NUM_TILES,
    KV_START,
    KV_END,
    ROW,
    TOKEN,
    NUM_MEMBERS,
    PARTIAL,
    EARLY_END,
    FIRST_LANE,
    GROUP_ROW,
    GROUP_COUNT,
    GROUP_UNIT,
    GROUP_SIZE
};
constexpr i32 UNIT_FIELDS = 16;

// Places in dynamic shared memory.
struct Shared {
    char* ring;     // [warps, stages, keys and values, chunk]
    float* acc;     // [warps, GROUP, ACC_STRIDE]
    float* tops;    // [warps, 8 * HEAD_TILES]
    float* totals;  // the same
};

DEVICE Shared shared_places(char* memory) {
    Shared s;
    s.ring = memory;
    s.acc = (float*)(memory + WARPS * STAGES * 2 * CHUNK_BYTES);
    s.tops = s.acc + WARPS * GROUP * ACC_STRIDE;
    s.totals = s.tops + WARPS * 8 * HEAD_TILES;
    return s;
}

DEVICE char* ring_place(const Shared& s, i32 warp, i32 stage) {
    return s.ring + (warp * STAGES + stage) * (2 * CHUNK_BYTES);
}

DEVICE i32 num_heads(const DecodeArgs& args) { return args.num_kv_heads * GROUP; }
