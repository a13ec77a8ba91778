// Combines partial results. Who arrives last at a token and KV head reads all of them in their order,
// so the result does not depend on who that is.
#pragma once
#include "args.cuh"

DEVICE void store_result(const DecodeArgs& args, i32 token, i32 head, i32 column, const float (&v)[4]) {
    i64 place = ((i64)token * (args.num_kv_heads * args.group) + head) * HEAD_DIM + column;
    int2 packed;
    packed.x = (i32)pack(v[0], v[1]);
    packed.y = (i32)pack(v[2], v[3]);
    *(int2*)(args.out + place * 2) = packed;
}

// The result of one head of a candidate, by a warp.
DEVICE void merge_head(const DecodeArgs& args, i32 record, i32 head) {
    constexpr i32 BATCH = 24;  // loads on their way
    i32 token = __shfl_sync(FULL, record, MERGE_TOKEN);
    i32 own_row = __shfl_sync(FULL, record, OWN_ROW), own_count = __shfl_sync(FULL, record, OWN_COUNT);
    i32 group_row = __shfl_sync(FULL, record, GROUP_ROW);
    i32 count = own_count + __shfl_sync(FULL, record, GROUP_COUNT);
    i32 num_heads = args.num_kv_heads * args.group, column = lane_id() * 4;
    bool has_column = column < HEAD_DIM;
    float top = LOWEST, total = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (args.sinks) {
        top = args.sinks[head] * LOG2E;
        total = 1.0f;
    }
    for (i32 first = 0; first < count; first += 32) {
        i32 mine = first + lane_id();
        i32 row = mine < own_count ? own_row + mine : group_row + (mine - own_count) * args.width;
        float sum = mine < count ? load_fresh(args.sums + row * num_heads + head) : NEGATIVE_INFINITY;
        float weight = 0.0f;
        for (i32 batch = 0; batch < 32 && first + batch < count; batch += BATCH) {
            Float4 parts[BATCH];
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                i32 i = first + batch + j;
                i64 other = i < own_count ? own_row + i : group_row + (i - own_count) * args.width;
                const float* source = args.partials + (other * num_heads + head) * HEAD_DIM + column;
                parts[j] = Float4{{0.0f, 0.0f, 0.0f, 0.0f}};
                if (batch + j < 32 && i < count && has_column) parts[j] = load_fresh((const Float4*)source);
            }
            if (batch == 0) {  // here, so that the loads above are on their way
                float higher = larger(top, warp_max(sum)), shrink = power_of_two(top - higher);
                weight = power_of_two(sum - higher);
                total = total * shrink + warp_sum(weight);
                for (i32 d = 0; d < 4; d++) acc[d] *= shrink;
                top = higher;
            }
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                float w = __shfl_sync(FULL, weight, (batch + j) & 31);
                for (i32 d = 0; d < 4; d++) acc[d] += w * parts[j].x[d];
            }
        }
    }
    for (i32 d = 0; d < 4; d++) acc[d] /= total;
    if (has_column) store_result(args, token, head, column, acc);
}

DEVICE i32 load_merge(const DecodeArgs& args, i32 candidate) {
    const i32* record = args.work + args.merges + candidate * MERGE_FIELDS;
    return lane_id() < MERGE_FIELDS ? load_fresh(record + lane_id()) : 0;
}

// Counts this block's partial result of a candidate; true if it was the last of `count`.
DEVICE bool is_last(const DecodeArgs& args, i32 candidate, i32 kv_head, i32 count) {
    i32* counter = args.work + args.counters + candidate * args.num_kv_heads + kv_head;
    if (arrive(counter) != count - 1) return false;
    *counter = 0;  // for the next layer
    return true;
}

// The results of a KV head's query heads, by the whole block.
DEVICE void merge_heads(const DecodeArgs& args, i32 record, i32 kv_head) {
    for (i32 h = warp_id(); h < args.group; h += WARPS) merge_head(args, record, kv_head * args.group + h);
}
