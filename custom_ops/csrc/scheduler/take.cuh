// Takes free pages from the ring for rows that grow, and keeps the ring short.
#pragma once
#include "common.cuh"

// Takes a page out of the index if it is published; it is nobody's then.
DEVICE void unpublish(const State& s, i32 page, i32 slot) {
    if (slot < 0) return;
    s.tpage[slot] = 0;
    s.tkey[slot] = 0;
    s.uid[page] = 0;
    s.parent_uid[page] = 0;
    s.index_slot[page] = -1;
}

// Gives the ring's first `total` valid entries to rows: entry e to the row at the last place of
// `start` [count] that is at or before e, behind the pages it owns. There are enough free pages.
// Ends with a barrier.
DEVICE void take(const State& s, Scratch& scratch, const u16* row_at, const i32* start, i32 count, i32 total) {
    i64 tail = *s.tail, first = *s.head;
    for (i32 num_found = 0; num_found < total && first < tail; first += blockDim.x) {
        i64 position = first + threadIdx.x;
        i32 page = position < tail ? s.ring[ring_place(s, position)] : 0;
        // Loads that wait for the page only, all at once.
        i32 slot = s.index_slot[page];
        bool is_valid = position < tail && s.ring_pos[page] == position;
        i32 turn_total, e = num_found + block_rank(scratch, is_valid, turn_total);
        bool is_taken = is_valid && e < total;
        if (is_taken) {
            i32 place = entry_of(start, count, e), row = row_at[place];
            s.block_table[(i64)row * s.table_width + s.owned[row] + e - start[place]] = page;
            s.ref[page] = 1;
            s.ring_pos[page] = NO_POSITION;
            unpublish(s, page, slot);
            if (e == total - 1) *s.head = position + 1;
        }
        u32 cached = __ballot_sync(FULL, is_taken && slot >= 0);
        if (cached && lane_id() == 0) atomicAdd(s.num_free_cached, -__popc(cached));
        num_found += turn_total;
    }
    if (threadIdx.x == 0) *s.num_free -= total;
    __syncthreads();
    FOR_EACH(place, count) {
        i32 end = place + 1 < count ? min(start[place + 1], total) : total;
        i32 got = end - min(start[place], total);
        if (got) s.owned[row_at[place]] += got;
    }
    __syncthreads();
}

// Rewrites the valid entries at the tail, in order, when dead ones might fill the ring.
DEVICE void compact(const State& s, Scratch& scratch) {
    i64 head = *s.head, tail = *s.tail;
    if (tail - head <= s.ring_size - s.num_pages) return;
    i64 num_moved = 0;
    // What is written in a turn stands where entries were read in this turn or before: the ring
    // never holds more than its size.
    for (i64 first = head; first < tail; first += blockDim.x) {
        i64 position = first + threadIdx.x;
        i32 page = position < tail ? s.ring[ring_place(s, position)] : 0;
        bool is_valid = position < tail && s.ring_pos[page] == position;
        i32 total, rank = block_rank(scratch, is_valid, total);
        if (is_valid) {
            i64 target = tail + num_moved + rank;
            s.ring[ring_place(s, target)] = page;
            s.ring_pos[page] = target;
        }
        num_moved += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) *s.head = tail, *s.tail = tail + num_moved;
    __syncthreads();
}
