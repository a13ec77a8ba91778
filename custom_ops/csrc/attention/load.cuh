// Walks a lane's units, and copies their chunks to shared memory ahead of the arithmetic.
#pragma once
#include "args.cuh"

// What a lane reads of one unit. The same in all threads of a warp.
struct Segment {
    i32 begin, end;  // positions
    i32 first_chunk, end_chunk;
    i32 next_tile;  // in the line of tiles
    i32 row, token, num_members, partial, early_end, first_lane, group_count;

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

// Tiles [tile, stop) of a unit, whose field i is in lane `first` + i.
DEVICE Segment segment_of(const DecodeArgs& args, i32 record, i32 first, i32 tile, i32 stop) {
    Segment s;
    i32 start = __shfl_sync(FULL, record, first + TILE_START);
    i32 kv_start = __shfl_sync(FULL, record, first + KV_START);
    i32 kv_end = __shfl_sync(FULL, record, first + KV_END);
    s.next_tile = start + __shfl_sync(FULL, record, first + NUM_TILES);
    s.row = __shfl_sync(FULL, record, first + ROW);
    s.token = __shfl_sync(FULL, record, first + TOKEN);
    s.num_members = __shfl_sync(FULL, record, first + NUM_MEMBERS);
    s.partial = __shfl_sync(FULL, record, first + PARTIAL);
    s.early_end = __shfl_sync(FULL, record, first + EARLY_END);
    s.first_lane = __shfl_sync(FULL, record, first + FIRST_LANE);
    s.group_count = __shfl_sync(FULL, record, first + GROUP_COUNT);
    i32 size = s.num_members > 0 ? args.group_tile : args.kv_tile;
    s.begin = kv_start + (tile - start) * size;
    s.end = min(kv_end, kv_start + (stop - start) * size);
    if (args.window > 0 && s.num_members == 0) s.begin = max(s.begin, kv_end - args.window);
    s.first_chunk = s.begin / CHUNK;
    s.end_chunk = s.begin < s.end ? (s.end + CHUNK - 1) / CHUNK : s.first_chunk;
    return s;
}

// The unit that a lane is at.
struct Walk {
    Segment segment;
    i32 place, record;  // of the unit; field i in lane i
    i32 stop;           // end of the lane's tiles

    METHOD bool is_last() const { return segment.next_tile >= stop; }
    // May lie past the last unit, not past the list.
    METHOD i32 next_record(const DecodeArgs& args) const { return load_record(args, place + 1); }
    METHOD Segment following(const DecodeArgs& args, i32 next) const {
        return segment_of(args, next, 0, segment.next_tile, stop);
    }
    METHOD void go_to(i32 next, const Segment& there) {
        place++;
        record = next;
        segment = there;
    }
};

// Runs ahead of a warp's arithmetic, a step at a time.
struct Loader {
    Segment segment;
    i32 place, stop;  // unit; end of the lane's tiles
    i32 step, num_steps;
    i32 pages;      // lane i: page of step i of the current 32, if the next does not have it
    i32 near;       // lane LANE_PAGES + i: page `near_page` + i of the row
    i32 near_page;

    METHOD bool is_near(i32 page) const { return (u32)(page - near_page) < LANE_FIELDS - LANE_PAGES; }

    METHOD void load_pages(const DecodeArgs& args) {
        i32 chunk = segment.first_chunk + warp_id() + (step + lane_id()) * WARPS;
        const i32* entries = args.block_table + segment.row * args.table_stride;
        i32 page = chunk >> (args.page_shift - 4);
        pages = chunk < segment.end_chunk && !is_near(page) ? load_fresh(entries + page) : 0;
    }

    // `record` is the lane's.
    METHOD void begin(const DecodeArgs& args, i32 record, i32 tile, i32 last_tile) {
        place = __shfl_sync(FULL, record, LANE_UNIT);
        stop = last_tile;
        segment = segment_of(args, record, LANE_RECORD, tile, stop);
        i32 start = __shfl_sync(FULL, record, LANE_RECORD + TILE_START);
        i32 kv_start = __shfl_sync(FULL, record, LANE_RECORD + KV_START);
        i32 size = segment.num_members > 0 ? args.group_tile : args.kv_tile;
        near = record;
        near_page = (kv_start + (tile - start) * size) >> args.page_shift;
        step = 0;
        num_steps = segment.steps(warp_id());
        load_pages(args);
    }

    // Page of the chunk of step `at`, one of the current 32.
    METHOD i32 page_of(const DecodeArgs& args, i32 chunk, i32 at) const {
        i32 page = chunk >> (args.page_shift - 4);
        if (is_near(page)) return __shfl_sync(FULL, near, LANE_PAGES + page - near_page);
        return __shfl_sync(FULL, pages, at % 32);
    }

    METHOD i64 first_row(const DecodeArgs& args, i32 page, i32 chunk) const {
        i32 inside = (chunk * CHUNK) & ((1 << args.page_shift) - 1);
        return ((i64)page << args.page_shift) + inside;
    }

    METHOD i32 chunk_of(i32 at) const { return segment.first_chunk + warp_id() + at * WARPS; }

    // Asks the second-level cache for the chunks that come next in the unit. Caches are coherent, so
    // this may be early for any of them. Of use for a prefix, which several lanes read.
    METHOD void prefetch_chunks(const DecodeArgs& args, i32 kv_head) const {
        constexpr i32 sectors = HEAD_DIM / 16;  // of 32 bytes, in a row
        i32 row_bytes = args.num_kv_heads * HEAD_DIM * 2;
        i32 last = min(min(step + args.prefetch, num_steps), (step | 31) + 1);
#pragma unroll 1
        for (i32 i = step; i < last; i++) {
            i32 chunk = chunk_of(i), page = page_of(args, chunk, i);
            i64 start = first_row(args, page, chunk) * row_bytes + kv_head * (HEAD_DIM * 2);
#pragma unroll 1
            for (i32 sector = lane_id(); sector < CHUNK * sectors; sector += 32) {
                i32 row = sector / sectors, position = chunk * CHUNK + row;
                i64 place = start + row * row_bytes + sector % sectors * 32;
                if (position < segment.begin || position >= segment.end) continue;
                prefetch(args.k_cache + place);
                prefetch(args.v_cache + place);
            }
        }
    }

    // Goes to the next step that there is; false if the lane has no more.
    METHOD bool find_step(const DecodeArgs& args) {
        while (step == num_steps) {
            if (segment.next_tile >= stop) return false;
            place++;
            i32 record = load_record(args, place);
            segment = segment_of(args, record, 0, segment.next_tile, stop);
            step = 0;
            num_steps = segment.steps(warp_id());
            near_page = -LANE_FIELDS;
            load_pages(args);
        }
        if (step > 0 && step % 32 == 0) load_pages(args);
        return true;
    }

    // Whether the step that was found reads only what earlier steps of the engine wrote.
    METHOD bool is_early() const { return min((chunk_of(step) + 1) * CHUNK, segment.end) <= segment.early_end; }

    // Starts the copies of the step that was found.
    METHOD void issue(const DecodeArgs& args, char* target, i32 kv_head) {
        i32 chunk = chunk_of(step), page = page_of(args, chunk, step);
        if (chunk < segment.end_chunk) copy_chunk(args, target, chunk, page, kv_head);
        step++;
    }

    METHOD void copy_chunk(const DecodeArgs& args, char* target, i32 chunk, i32 page, i32 kv_head) const {
        constexpr i32 pieces = HEAD_DIM / 8;  // of 16 bytes, in a row
        i32 row_bytes = args.num_kv_heads * HEAD_DIM * 2;
        i64 start = first_row(args, page, chunk) * row_bytes + kv_head * (HEAD_DIM * 2);
        const char *k = args.k_cache + start, *v = args.v_cache + start;
        u64 policy = cache_policy(KEEPS_ALL || (HAS_GROUPS && segment.num_members > 0));
        i32 low = segment.begin - chunk * CHUNK, high = segment.end - chunk * CHUNK;
#pragma unroll
        for (i32 i = 0; i < CHUNK * pieces / 32; i++) {
            i32 piece = lane_id() + 32 * i, row = piece / pieces, column = piece % pieces * 16;
            i32 offset = row * row_bytes + column, place = row * ROW_BYTES + column;
            i32 bytes = row >= low && row < high ? 16 : 0;  // zeros elsewhere: what lies there may be NaN
            copy_async(target + place, k + offset, bytes, policy);
            copy_async(target + CHUNK_BYTES + place, v + offset, bytes, policy);
        }
    }
};
