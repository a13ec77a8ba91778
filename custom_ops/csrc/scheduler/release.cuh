// Gives back the pages of the first rows, by index, that ended or were retracted.
#pragma once
#include "common.cuh"

constexpr i32 kMaxReleases = 256;

struct ReleaseShared {
    i32 row[kMaxReleases];    // released rows, ascending
    i32 start[kMaxReleases];  // pages of the rows before it in the list
    i32 token_start[kMaxReleases];
    i32 num_rows, num_pages, num_token_pages;
};

DEVICE bool has_ended(i8 state) { return state == FINISHED || state == ABORTING; }
DEVICE bool awaits_release(const State& s, i32 row) {
    i8 state = s.state[row];
    return has_ended(state) || (state == RETRACTED && s.owned[row] > 0);
}

// Fills the list; returns how many rows await release, listed or not.
DEVICE i32 list_releases(const State& s, Scratch& scratch, ReleaseShared& shared) {
    i32 num_pending = 0;
    FOR_EACH_TURN(row, s.max_rows) {
        bool is_pending = row < s.max_rows && awaits_release(s, row);
        i32 total, rank = num_pending + block_rank(scratch, is_pending, total);
        if (is_pending && rank < s.max_releases) shared.row[rank] = row;
        num_pending += total;
    }
    __syncthreads();
    i32 num_rows = min(num_pending, s.max_releases);
    i32 num_pages = 0, num_token_pages = 0;
    FOR_EACH_TURN(i, num_rows) {
        i32 row = i < num_rows ? shared.row[i] : -1;
        i32 pages = row < 0 ? 0 : s.owned[row];
        bool is_freed = row >= 0 && has_ended(s.state[row]);
        i32 token_pages = is_freed ? (s.num_tokens[row] + s.token_page_size - 1) / s.token_page_size : 0;
        i32 total, token_total;
        i32 start = block_scan(scratch, pages, total);
        i32 token_start = block_scan(scratch, token_pages, token_total);
        if (row >= 0) shared.start[i] = num_pages + start, shared.token_start[i] = num_token_pages + token_start;
        num_pages += total, num_token_pages += token_total;
    }
    if (threadIdx.x == 0) shared.num_rows = num_rows, shared.num_pages = num_pages, shared.num_token_pages = num_token_pages;
    __syncthreads();
    return num_pending;
}

// Element `e` of the walk over (row ascending, page descending).
DEVICE i32 released_page(const State& s, const ReleaseShared& shared, i32 e) {
    i32 i = entry_of(shared.start, shared.num_rows, e), row = shared.row[i];
    return s.block_table[(i64)row * s.table_width + s.owned[row] - 1 - (e - shared.start[i])];
}

// Pages whose last reference went enter the ring at their last touch in the walk: published ones at
// the tail, the others before the head. The last touch is found in `ring_pos`, which is
// NO_POSITION for every page in use.
DEVICE void release_pages(const State& s, Scratch& scratch, const ReleaseShared& shared) {
    i64 head = *s.head, tail = *s.tail;
    FOR_EACH(e, shared.num_pages) {
        i32 page = released_page(s, shared, e);
        atomicAdd(&s.ref[page], -1);
        atomicMax(&s.ring_pos[page], (i64)e);
    }
    __syncthreads();
    i32 num_published = 0, num_private = 0;
    FOR_EACH_TURN(e, shared.num_pages) {
        i32 page = e < shared.num_pages ? released_page(s, shared, e) : 0;
        bool is_last = e < shared.num_pages && s.ring_pos[page] == e;
        bool is_free = is_last && s.ref[page] == 0;
        bool is_published = is_free && s.uid[page] > 0;
        // Both ranks in one scan: at most 1024 a turn.
        i32 total, rank = block_scan(scratch, is_published ? 1 : is_free ? 1 << 16 : 0, total);
        i64 position = is_published ? tail + num_published + (rank & 0xffff) : head - 1 - num_private - (rank >> 16);
        if (is_free) s.ring[ring_place(s, position)] = page;
        if (is_last) s.ring_pos[page] = is_free ? position : NO_POSITION;
        num_published += total & 0xffff, num_private += total >> 16;
    }
    if (threadIdx.x == 0) {
        *s.head = head - num_private;
        *s.tail = tail + num_published;
        *s.num_free += num_published + num_private;
        *s.num_free_cached += num_published;
    }
}

DEVICE void release_token_pages(const State& s, const ReleaseShared& shared) {
    i32 num_free = *s.num_free_token_pages;
    FOR_EACH(e, shared.num_token_pages) {
        i32 i = entry_of(shared.token_start, shared.num_rows, e), row = shared.row[i];
        i32 column = e - shared.token_start[i];
        s.free_token_pages[num_free + e] = s.token_table[(i64)row * s.token_table_width + column];
    }
    __syncthreads();
    if (threadIdx.x == 0) *s.num_free_token_pages = num_free + shared.num_token_pages;
}

// Returns whether some row still awaits its release. Ends with a barrier.
DEVICE bool release(const State& s, Scratch& scratch, ReleaseShared& shared) {
    i32 num_pending = list_releases(s, scratch, shared);
    release_pages(s, scratch, shared);
    release_token_pages(s, shared);
    FOR_EACH(i, shared.num_rows) {
        i32 row = shared.row[i];
        s.owned[row] = 0;
        s.num_computed[row] = 0;
        if (has_ended(s.state[row])) s.state[row] = FREE;
    }
    __syncthreads();
    return num_pending > s.max_releases;
}
