// The arguments of the decode kernel, and its work list. Mirrored in custom_ops/attention_decode_cuda.py
// and custom_ops/attention_work.py.
#pragma once
#include "device.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // values of a head, a multiple of 16
#endif
#ifndef STAGES
#define STAGES 3  // chunks of a warp that may be on their way
#endif
#ifndef HEAD_TILES
#define HEAD_TILES 1  // a KV head has at most 8 times as many query heads
#endif
#ifndef RESIDENT
#define RESIDENT 2  // blocks a multiprocessor, for which registers are left
#endif
#ifndef HAS_GROUPS
#define HAS_GROUPS 1  // whether the work list may have shared prefixes
#endif
#ifndef HAS_CAP
#define HAS_CAP 0  // whether scores have a soft cap
#endif

constexpr i32 WARPS = 4;
constexpr i32 THREADS = 32 * WARPS;
constexpr i32 CHUNK = 16;                       // positions a warp reads at a time, all of one page
constexpr i32 ROW_BYTES = 2 * HEAD_DIM + 16;    // in shared memory; 8 rows lie in different banks
constexpr i32 CHUNK_BYTES = CHUNK * ROW_BYTES;  // keys or values of a chunk
constexpr i32 DIM_TILES = HEAD_DIM / 16;
constexpr i32 SHARED_TILES = 2;                   // tiles of 8 query rows a warp, of a shared prefix
constexpr i32 MAX_MEMBERS = 8 * SHARED_TILES * WARPS;
constexpr i32 ACC_STRIDE = HEAD_DIM + 4;

struct DecodeArgs {
    const char* q;        // [T, H, D] of 16-bit floats
    const char* k_cache;  // [num_pages, page_size, H_kv, D]
    const char* v_cache;
    const i32* block_table;
    i32* work;
    const i64* positions;  // [T]
    char* out;             // [T, H, D]
    float* partials;       // [partial rows, H, D]
    float* sums;           // [partial rows, H], log2 of the sums of weights
    const float* sinks;    // [H] or null
    i64 table_stride;
    i64 q_token;  // strides, in values
    i64 q_head;
    i32 num_tokens;
    i32 num_kv_heads;
    i32 group;  // query heads of a KV head
    i32 page_shift;
    i32 num_lanes;
    i32 width;  // members of a tile of a shared prefix
    i32 kv_tile;
    i32 lanes;  // where regions of the work list begin
    i32 units;
    i32 members;
    i32 member_candidates;
    i32 merges;
    i32 counters;
    i32 window;
    i32 prefetch;  // chunks a warp asks for before it waits
    i32 is_early;
    float scale;  // of products to log2 scores, without a cap
    float cap_in;  // with a soft cap: into the tanh, and the cap itself
    float cap_out;
};

enum Header { NUM_KV_TILES = 1, NUM_REAL = 4 };
enum Unit { TILE_START, NUM_TILES, KV_START, KV_END, ROW, TOKEN, NUM_MEMBERS, PARTIAL, CANDIDATE };
constexpr i32 UNIT_FIELDS = 12;
enum Merge { MERGE_TOKEN, OWN_ROW, OWN_COUNT, GROUP_ROW, GROUP_COUNT };
constexpr i32 MERGE_FIELDS = 8;

// Places in dynamic shared memory.
struct Shared {
    char* ring;     // [warps, stages, keys and values, chunk]
    float* acc;     // [warps, group, ACC_STRIDE]
    float* tops;    // [warps, 8 * HEAD_TILES]
    float* totals;  // the same
    i32* last;      // [MAX_MEMBERS] what this block merges
};

DEVICE Shared shared_places(char* memory, i32 group) {
    Shared s;
    s.ring = memory;
    s.acc = (float*)(memory + WARPS * STAGES * 2 * CHUNK_BYTES);
    s.tops = s.acc + WARPS * group * ACC_STRIDE;
    s.totals = s.tops + WARPS * 8 * HEAD_TILES;
    s.last = (i32*)(s.totals + WARPS * 8 * HEAD_TILES);
    return s;
}

DEVICE char* ring_place(const Shared& s, i32 warp, i32 stage) {
    return s.ring + (warp * STAGES + stage) * (2 * CHUNK_BYTES);
}
