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

// A head of a candidate, on its way to its result.
struct Merged {
    i32 own_row, own_count, group_row, count;
    i32 token, head;
    float top, total, acc[4];

    METHOD void begin(const DecodeArgs& args, const Shared& shared, i32 pair, bool is_there, i32 kv_head) {
        i32 entry = is_there ? pair / args.group : 0;
        const i32* record = shared.pending + shared.due[entry] * MERGE_FIELDS;
        token = record[MERGE_TOKEN];
        own_row = record[OWN_ROW], own_count = record[OWN_COUNT], group_row = record[GROUP_ROW];
        count = is_there ? own_count + record[GROUP_COUNT] : 0;
        head = kv_head * args.group + pair - entry * args.group;
        top = LOWEST, total = 0.0f;
        if (args.sinks && is_there) top = args.sinks[head] * LOG2E, total = 1.0f;
        for (i32 d = 0; d < 4; d++) acc[d] = 0.0f;
    }

    METHOD i64 place(const DecodeArgs& args, i32 i) const {
        i64 row = i < own_count ? own_row + i : group_row + (i - own_count) * args.width;
        return row * (args.num_kv_heads * args.group) + head;
    }
};

// The results of PAIRS heads of candidates, by a warp: all that they need of BATCH partial results
// each is on its way at once.
template <int PAIRS, int BATCH>
DEVICE void merge_pairs(const DecodeArgs& args, const Shared& shared, i32 first, i32 num_pairs, i32 kv_head) {
    Merged pairs[PAIRS];
    i32 longest = 0, column = lane_id() * 4;
    bool has_column = column < HEAD_DIM;
#pragma unroll
    for (i32 p = 0; p < PAIRS; p++) {
        pairs[p].begin(args, shared, first + p, first + p < num_pairs, kv_head);
        longest = max(longest, pairs[p].count);
    }
    for (i32 batch = 0; batch < longest; batch += BATCH) {
        Float4 parts[PAIRS][BATCH];
        float sums[PAIRS];
        i32 mine = batch + lane_id();
#pragma unroll
        for (i32 p = 0; p < PAIRS; p++) {
            bool has_sum = lane_id() < BATCH && mine < pairs[p].count;
            sums[p] = has_sum ? load_fresh(args.sums + pairs[p].place(args, mine)) : NEGATIVE_INFINITY;
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                const float* source = args.partials + pairs[p].place(args, batch + j) * HEAD_DIM + column;
                parts[p][j] = Float4{{0.0f, 0.0f, 0.0f, 0.0f}};
                if (batch + j < pairs[p].count && has_column) parts[p][j] = load_fresh((const Float4*)source);
            }
        }
#pragma unroll
        for (i32 p = 0; p < PAIRS; p++) {
            Merged& pair = pairs[p];
            float higher = larger(pair.top, warp_max(sums[p])), shrink = power_of_two(pair.top - higher);
            float weight = power_of_two(sums[p] - higher);
            pair.total = pair.total * shrink + warp_sum(weight);
            pair.top = higher;
            for (i32 d = 0; d < 4; d++) pair.acc[d] *= shrink;
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                float w = __shfl_sync(FULL, weight, j);
                for (i32 d = 0; d < 4; d++) pair.acc[d] += w * parts[p][j].x[d];
            }
        }
    }
#pragma unroll
    for (i32 p = 0; p < PAIRS; p++) {
        if (first + p >= num_pairs || !has_column) continue;
        for (i32 d = 0; d < 4; d++) pairs[p].acc[d] /= pairs[p].total;
        store_result(args, pairs[p].token, pairs[p].head, column, pairs[p].acc);
    }
}

// Field i of a merge in lane i.
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

// Counts all partial results that this block has left since the last time, and makes the results that
// lack no other.
DEVICE void settle(const DecodeArgs& args, const Shared& shared, i32 num_pending, i32 kv_head) {
    if (threadIdx.x == 0) *shared.num_due = 0;
    __syncthreads();  // also: all of them are written
    if (threadIdx.x < num_pending) {
        const i32* record = shared.pending + threadIdx.x * MERGE_FIELDS;
        i32 count = record[OWN_COUNT] + record[GROUP_COUNT];
        if (is_last(args, record[MERGE_CANDIDATE], kv_head, count))
            shared.due[atomicAdd(shared.num_due, 1)] = threadIdx.x;
    }
    __syncthreads();
    i32 num_pairs = *shared.num_due * args.group;
    if (num_pairs <= WARPS) {
        if (warp_id() < num_pairs) merge_pairs<1, 24>(args, shared, warp_id(), num_pairs, kv_head);
        return;
    }
    for (i32 first = warp_id() * 2; first < num_pairs; first += WARPS * 2)
        merge_pairs<2, 12>(args, shared, first, num_pairs, kv_head);
}
