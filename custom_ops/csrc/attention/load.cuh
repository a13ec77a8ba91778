// Walks a lane's units, and copies their chunks to shared memory ahead of the arithmetic.
#pragma once
#include "args.cuh"

// What a lane reads of one unit. The same in all threads of a warp.
struct Segment {
    i32 begin, end;  // positions
    i32 first_chunk, end_chunk;
    i32 next_tile;  // in the line of tiles
    i32 row, token, num_members, partial, candidate;

    // Steps that a warp takes: in a shared prefix all warps take the same number of steps.
    METHOD i32 steps(i32 warp) const {
        i32 count = end_chunk - first_chunk, last = num_members > 0 ? WARPS - 1 : WARPS - 1 - warp;
        return count > 0 ? (count + last) / WARPS : 0;
    }
};

// Field i of a unit in lane i.
DEVICE i32 load_record(const DecodeArgs& args, i32 place) {
    i32 lane = lane_id();
    return lane < UNIT_FIELDS ? load_fresh(args.work + args.units + place * UNIT_FIELDS + lane) : 0;
}

DEVICE Segment segment_of(const DecodeArgs& args, i32 record, i32 tile, i32 stop) {
    Segment s;
    i32 start = __shfl_sync(FULL, record, TILE_START);
    i32 kv_start = __shfl_sync(FULL, record, KV_START);
    i32 kv_end = __shfl_sync(FULL, record, KV_END);
    s.next_tile = start + __shfl_sync(FULL, record, NUM_TILES);
    s.row = __shfl_sync(FULL, record, ROW);
    s.token = __shfl_sync(FULL, record, TOKEN);
    s.num_members = __shfl_sync(FULL, record, NUM_MEMBERS);
    s.partial = __shfl_sync(FULL, record, PARTIAL);
    s.candidate = __shfl_sync(FULL, record, CANDIDATE);
    s.begin = kv_start + (tile - start) * args.kv_tile;
    s.end = min(kv_end, kv_start + (stop - start) * args.kv_tile);
    if (args.window > 0 && s.num_members == 0) s.begin = max(s.begin, kv_end - args.window);
    s.first_chunk = s.begin / CHUNK;
    s.end_chunk = s.begin < s.end ? (s.end + CHUNK - 1) / CHUNK : s.first_chunk;
    return s;
}

// Runs ahead of a warp's arithmetic: each call of `issue` starts the copies of its next step.
struct Loader {
    Segment segment;
    i32 place, stop;  // unit; end of the lane's tiles
    i32 step, num_steps;
    i32 pages;  // lane i: page of step i of the current 32

    METHOD void load_pages(const DecodeArgs& args) {
        i32 chunk = segment.first_chunk + warp_id() + (step + lane_id()) * WARPS;
        const i32* entries = args.block_table + segment.row * args.table_stride;
        i32 page = chunk >> (args.page_shift - 4);
        pages = chunk < segment.end_chunk ? load_fresh(entries + page) : 0;
    }

    METHOD void begin(const DecodeArgs& args, i32 first_place, i32 tile, i32 last_tile) {
        place = first_place;
        stop = last_tile;
        segment = segment_of(args, load_record(args, place), tile, stop);
        step = 0;
        num_steps = segment.steps(warp_id());
        load_pages(args);
    }

    METHOD i64 first_row(const DecodeArgs& args, i32 page, i32 chunk) const {
        i32 inside = (chunk * CHUNK) & ((1 << args.page_shift) - 1);
        return ((i64)page << args.page_shift) + inside;
    }

    // Asks the second-level cache for the first chunks of the first unit.
    METHOD void prefetch_chunks(const DecodeArgs& args, i32 kv_head) const {
        constexpr i32 sectors = HEAD_DIM / 16;  // of 32 bytes, in a row
        i32 row_bytes = args.num_kv_heads * HEAD_DIM * 2;
        for (i32 i = 0; i < min(min(args.prefetch, num_steps), 32); i++) {
            i32 page = __shfl_sync(FULL, pages, i), chunk = segment.first_chunk + warp_id() + i * WARPS;
            i64 start = first_row(args, page, chunk) * row_bytes + kv_head * (HEAD_DIM * 2);
            for (i32 sector = lane_id(); sector < CHUNK * sectors; sector += 32) {
                i32 row = sector / sectors, position = chunk * CHUNK + row;
                i64 place = start + row * row_bytes + sector % sectors * 32;
                if (position < segment.begin || position >= segment.end) continue;
                prefetch(args.k_cache + place);
                prefetch(args.v_cache + place);
            }
        }
    }

    METHOD bool find_step(const DecodeArgs& args) {
        while (step == num_steps) {
            if (segment.next_tile >= stop) return false;
            place++;
            i32 record = load_record(args, place);
            segment = segment_of(args, record, segment.next_tile, stop);
            step = 0;
            num_steps = segment.steps(warp_id());
            load_pages(args);
        }
        return true;
    }

    METHOD void issue(const DecodeArgs& args, char* target, i32 kv_head) {
        if (find_step(args)) {
            if (step > 0 && step % 32 == 0) load_pages(args);
            i32 chunk = segment.first_chunk + warp_id() + step * WARPS;
            i32 page = __shfl_sync(FULL, pages, step % 32);
            if (chunk < segment.end_chunk) copy_chunk(args, target, chunk, page, kv_head);
            step++;
        }
        commit_copies();
    }

    METHOD void copy_chunk(const DecodeArgs& args, char* target, i32 chunk, i32 page, i32 kv_head) const {
        constexpr i32 pieces = HEAD_DIM / 8;  // of 16 bytes, in a row
        i32 row_bytes = args.num_kv_heads * HEAD_DIM * 2;
        i64 start = first_row(args, page, chunk) * row_bytes + kv_head * (HEAD_DIM * 2);
        const char *k = args.k_cache + start, *v = args.v_cache + start;
        i32 low = segment.begin - chunk * CHUNK, high = segment.end - chunk * CHUNK;
#pragma unroll
        for (i32 i = 0; i < CHUNK * pieces / 32; i++) {
            i32 piece = lane_id() + 32 * i, row = piece / pieces, column = piece % pieces * 16;
            i32 offset = row * row_bytes + column, place = row * ROW_BYTES + column;
            i32 bytes = row >= low && row < high ? 16 : 0;  // zeros elsewhere: what lies there may be NaN
            copy_async(target + place, k + offset, bytes);
            copy_async(target + CHUNK_BYTES + place, v + offset, bytes);
        }
    }
};
