// Combines partial results. A unit that is cut by lanes is finished by the lane that has its last
// segment: the lanes before leave theirs in slots of the work list, which hold 0 until then and again
// afterwards, so that each value says itself that it is there and no block has to fence its stores.
// What prefixes leave is counted. A lane waits only for lanes before it.
#pragma once
#include "load.cuh"

DEVICE void store_result(const DecodeArgs& args, i32 token, i32 head, i32 column, const float (&v)[4]) {
    i64 place = ((i64)token * num_heads(args) + head) * HEAD_DIM + column;
#if QUANTIZED
    *(u32*)(args.out + place) = quantize_four(pack(v[0], v[1]), pack(v[2], v[3]), *args.out_scale);
#else
    int2 packed;
    packed.x = (i32)pack(v[0], v[1]);
    packed.y = (i32)pack(v[2], v[3]);
    *(int2*)(args.out + place * 2) = packed;
#endif
}

// Place of a head's partial result in a lane's slot, or in a row of the scratch.
DEVICE float* slot_of(const DecodeArgs& args, i32 lane_number, i32 head) {
    i32 part = lane_number * num_heads(args) + head;
    return (float*)(args.work + args.slots) + part * PART_SIZE;
}
DEVICE float* partial_of(const DecodeArgs& args, i32 row, i32 head) {
    return args.partials + ((i64)row * num_heads(args) + head) * PART_SIZE;
}

// The same number with bits that are not all 0.
DEVICE float marked(float x) {
    u32 bits = bits_of(x);
    return float_of(bits ? bits : 0x80000000u);
}

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// A head's partial results in the order in which they are combined: of lanes before, of this lane,
// of the prefix.
struct Parts {
    float *slots, *own, *grouped;
    i32 num_slots, num_grouped;
    i64 slot_step, group_step;

    METHOD i32 count() const { return num_slots + 1 + num_grouped; }
    METHOD float* place(i32 i) const {
        if (i < num_slots) return slots + i * slot_step;
        return i == num_slots ? own : grouped + (i - num_slots - 1) * group_step;
    }
};

DEVICE Parts parts_of(const DecodeArgs& args, i32 record, i32 lane_number, i32 head) {
    i32 first_lane = __shfl_sync(FULL, record, FIRST_LANE);
    i32 row = __shfl_sync(FULL, record, PARTIAL) + lane_number;
    i32 group_row = __shfl_sync(FULL, record, GROUP_ROW);
    Parts parts;
    parts.slots = slot_of(args, first_lane, head);
    parts.own = partial_of(args, row, head);
    parts.grouped = partial_of(args, group_row, head);
    parts.num_slots = lane_number - first_lane;
    parts.num_grouped = __shfl_sync(FULL, record, GROUP_COUNT);
    parts.slot_step = num_heads(args) * PART_SIZE;
    parts.group_step = parts.slot_step * args.width;
    return parts;
}

// Leaves a head's slots as they were, `offset` after those of `parts`; each lane of the warp those
// values that it has read.
DEVICE void clear_slots(const Parts& parts, i32 offset) {
    i32 lane = lane_id();
#pragma unroll 1
    for (i32 i = 0; i < parts.num_slots; i++) {
        if (lane * 4 < HEAD_DIM)
            store_relaxed((Float4*)(parts.place(i) + offset + lane * 4), Float4{{0.0f, 0.0f, 0.0f, 0.0f}});
        if (lane == i % 32) store_relaxed(parts.place(i) + offset + HEAD_DIM, 0.0f);
    }
}

// The results of HEADS heads of a token, from `head` on, by a warp, with BATCH loads of each on their
// way; `parts` are those of the first. All parts are marked.
template <int BATCH, int HEADS>
DEVICE void merge_heads(const DecodeArgs& args, const Parts& parts, i32 token, i32 head) {
    i32 last = parts.count() - 1, column = min(lane_id() * 4, HEAD_DIM - 4);
    float top[HEADS], total[HEADS], acc[HEADS][4];
#pragma unroll
    for (i32 h = 0; h < HEADS; h++) {
        top[h] = args.sinks ? args.sinks[head + h] * LOG2E : LOWEST;
        total[h] = args.sinks ? 1.0f : 0.0f;
        for (i32 d = 0; d < 4; d++) acc[h][d] = 0.0f;
    }
#pragma unroll 1
    for (i32 first = 0; first <= last; first += BATCH) {
        i32 mine = first + lane_id() % BATCH;  // past the last part: that one again, without weight
        const float* place = parts.place(min(mine, last));
        Float4 values[HEADS][BATCH];
        float sum[HEADS];
        u32 least;
#pragma unroll 1
        do {
            least = FULL;
#pragma unroll
            for (i32 h = 0; h < HEADS; h++) sum[h] = load_relaxed(place + h * PART_SIZE + HEAD_DIM);
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                const float* other = (const float*)__shfl_sync(FULL, (u64)place, j) + column;
#pragma unroll
                for (i32 h = 0; h < HEADS; h++) values[h][j] = load_relaxed((const Float4*)(other + h * PART_SIZE));
            }
#pragma unroll
            for (i32 h = 0; h < HEADS; h++) {
                least = smaller(least, bits_of(sum[h]));
#pragma unroll
                for (i32 j = 0; j < BATCH; j++)
                    for (i32 d = 0; d < 4; d++) least = smaller(least, bits_of(values[h][j].x[d]));
            }
            if (least == 0) spin();
        } while (__any_sync(FULL, least == 0));
#pragma unroll
        for (i32 h = 0; h < HEADS; h++) {
            if (mine > last || lane_id() >= BATCH) sum[h] = NEGATIVE_INFINITY;
            float higher = larger(top[h], warp_max(sum[h])), shrink = power_of_two(top[h] - higher);
            float weight = power_of_two(sum[h] - higher);
            total[h] = total[h] * shrink + warp_sum(weight);
            for (i32 d = 0; d < 4; d++) acc[h][d] *= shrink;
            top[h] = higher;
#pragma unroll
            for (i32 j = 0; j < BATCH; j++) {
                float w = __shfl_sync(FULL, weight, j);
                for (i32 d = 0; d < 4; d++) acc[h][d] += w * values[h][j].x[d];
            }
        }
    }
#pragma unroll
    for (i32 h = 0; h < HEADS; h++) {
        float factor = reciprocal(total[h]);
        for (i32 d = 0; d < 4; d++) acc[h][d] *= factor;
        if (lane_id() * 4 < HEAD_DIM) store_result(args, token, head + h, column, acc[h]);
        clear_slots(parts, h * PART_SIZE);
    }
}

// The results of `count` heads of a token, from `head` on, by a warp: as many at once as registers
// hold with a batch of loads each.
DEVICE void merge_token(
    const DecodeArgs& args, i32 record, i32 lane_number, i32 head, i32 count) {
    i32 token = __shfl_sync(FULL, record, TOKEN);
#pragma unroll 1
    while (count > 0) {
        Parts parts = parts_of(args, record, lane_number, head);
        bool is_few = parts.count() <= 8;
        i32 done = is_few && count >= 4 ? 4 : count >= 2 ? 2 : 1;
        if (done == 4) {
            merge_heads<8, 4>(args, parts, token, head);
        } else if (done == 2) {
            if (is_few) merge_heads<8, 2>(args, parts, token, head);
            else merge_heads<16, 2>(args, parts, token, head);
        } else {
            if (is_few) merge_heads<8, 1>(args, parts, token, head);
            else merge_heads<16, 1>(args, parts, token, head);
        }
        head += done;
        count -= done;
    }
}

// Counter of a prefix's unit: its finished segments, and in the upper half its merged members.
DEVICE i32* counter_of(const DecodeArgs& args, i32 unit, i32 kv_head) {
    return args.work + args.counters + unit * args.num_kv_heads + kv_head;
}

// How a member leaves its prefix: the last one of a unit clears the counter.
struct Leave {
    i32* counter;
    i32 full, seen;  // seen: looked at late, as it takes time to come

    METHOD void end() const {
        if (counter && seen == full) *counter = 0;
    }
};

// Units of a lane, at places [first, end), that end in it and have results elsewhere, and maybe others
// without. Kept for the end of the lane, so that nothing waits before all is read.
struct Merges {
    i32 first, end;
    i32 record;  // of the last one
    bool is_grouped;
    i32 count, unit, size;  // of the prefix of the unit at place first + thread, if it has one

    METHOD void add(i32 place, i32 unit_record, bool is_member) {
        if (first < 0) first = place;
        end = place + 1;
        record = unit_record;
        is_grouped |= is_member;
        if (!HAS_GROUPS) return;
        i32 of_count = __shfl_sync(FULL, unit_record, GROUP_COUNT), of_unit = __shfl_sync(FULL, unit_record, GROUP_UNIT);
        i32 of_size = __shfl_sync(FULL, unit_record, GROUP_SIZE);
        if (place - first == (i32)threadIdx.x) count = of_count, unit = of_unit, size = of_size;
    }

    // Waits until the unit of a prefix has been read, and counts a member that needs it no more.
    METHOD void wait_for_group(const DecodeArgs& args, i32 kv_head, i32 of_unit, i32 of_count, i32 of_size, Leave& leave) const {
        if (of_count == 0) return;
        i32* counter = counter_of(args, of_unit, kv_head);
        while ((load_acquire(counter) & 0xffff) != of_count) spin();
        leave.end();
        leave = {counter, (of_size - 1) << 16 | of_count, atomicAdd(counter, 1 << 16)};
    }

    // Until all prefixes have been read; counts the members that need them no more. All threads.
    METHOD Leave wait_for_groups(const DecodeArgs& args, i32 kv_head) const {
        Leave leave{nullptr, 0, 0};
        wait_for_group(args, kv_head, unit, count, size, leave);
#pragma unroll 1
        for (i32 place = first + threadIdx.x + THREADS; place < end; place += THREADS) {
            const i32* record = args.work + args.units + place * UNIT_FIELDS;
            i32 of_count = load_fresh(record + GROUP_COUNT), of_size = load_fresh(record + GROUP_SIZE);
            wait_for_group(args, kv_head, load_fresh(record + GROUP_UNIT), of_count, of_size, leave);
        }
        __syncthreads();
        return leave;
    }

    // Writes the units' results. All threads.
    METHOD void run(const DecodeArgs& args, i32 lane_number, i32 kv_head) const {
        __syncthreads();  // this lane's own parts are written
        // heads of a token that a warp takes: few, while there are warps
        i32 heads = min(((end - first) * GROUP + WARPS - 1) / WARPS, min(GROUP, MERGED_HEADS));
        i32 shares = (GROUP + heads - 1) / heads;
        i32 next = record_of(args, warp_id() / shares);
        Leave leave{nullptr, 0, 0};
        if (HAS_GROUPS && is_grouped) leave = wait_for_groups(args, kv_head);
#pragma unroll 1
        for (i32 i = warp_id(); i < (end - first) * shares; i += WARPS) {
            i32 unit_record = next, part = i % shares * heads;
            next = record_of(args, (i + WARPS) / shares);
            if (__shfl_sync(FULL, unit_record, PARTIAL) < 0) continue;
            merge_token(args, unit_record, lane_number, kv_head * GROUP + part, min(heads, GROUP - part));
        }
        leave.end();
    }

    // Of the i-th unit, or the last one.
    METHOD i32 record_of(const DecodeArgs& args, i32 i) const {
        i32 place = min(first + i, end - 1);
        return place == end - 1 ? record : load_record(args, place);
    }
};
