// The prefix index on the device: asking for pages, matching candidates, admitting them.
// Everything here is called by all threads of one block; `publish.cuh` is the writing half.
#pragma once
#include "common.cuh"

// Where one page's tokens and its chain sum stand in the token store.
struct PageView {
    const i32* tokens;
    i64* link;
};

DEVICE PageView page_view(const State& s, i32 row, i32 page) {
    i32 per_store = s.token_page_size / s.page_size;
    i32 column = page / per_store, place = page - column * per_store;
    i64 stored = s.token_table[(i64)row * s.token_table_width + column];
    PageView view;
    view.tokens = s.token_pages + stored * s.token_page_size + place * s.page_size;
    view.link = s.chain + stored * per_store + place;
    return view;
}

DEVICE u64 page_chain(const State& s, i32 row, i32 page) {
    return (u64)*page_view(s, row, page).link;
}

// The page that stands in the index under `key`, 0 if none does.
DEVICE i32 lookup(const State& s, u64 key) {
    i64 bucket = (i64)(key & (u64)(s.index_buckets - 1)) * s.index_ways;
    const i64* keys = s.tkey + bucket;
    const i32* pages = s.tpage + bucket;
    i32 found = 0;
#pragma unroll 8
    for (i32 way = 0; way < s.index_ways; ++way) {
        i32 page = pages[way];
        bool is_equal = (u64)keys[way] == key;
        if (page > 0 && is_equal) found = page;
    }
    return found;
}

struct alignas(16) Quad {
    i32 x, y, z, w;
};

DEVICE bool equal_tokens(const i32* a, const i32* b, i32 count) {
    i32 differ = 0;
    if (count % 4 == 0) {  // both start at a multiple of 16 bytes then
        const Quad* wide_a = (const Quad*)a;
        const Quad* wide_b = (const Quad*)b;
#pragma unroll 4
        for (i32 i = 0; i < count / 4; ++i) {
            Quad x = wide_a[i], y = wide_b[i];
            differ |= (x.x ^ y.x) | (x.y ^ y.y) | (x.z ^ y.z) | (x.w ^ y.w);
        }
    } else {
        for (i32 i = 0; i < count; ++i) differ |= a[i] ^ b[i];
    }
    return differ == 0;
}

DEVICE void copy_tokens(i32* target, const i32* source, i32 count) {
    if (count % 4 == 0) {
#pragma unroll 4
        for (i32 i = 0; i < count / 4; ++i) ((Quad*)target)[i] = ((const Quad*)source)[i];
    } else {
        for (i32 i = 0; i < count; ++i) target[i] = source[i];
    }
}

// Publication number of what stands before a row's first page.
DEVICE i64 root_uid(const State& s, i32 row) { return -(s.salt[row] + 1); }

// ---------------------------------------------------------------------------------- match

constexpr i32 MATCH_STRIDE = 31;  // of a warp's 32 lanes, 0 looks up the page before, for its uid

// One warp, up to 31 pages of one candidate from `base` on: lowers `*matched` to the first miss.
DEVICE void match_segment(const State& s, i32 row, i32 base, i32 limit, i32* matched) {
    i32 lane = lane_id();
    i32 page = base - 1 + lane;
    i32 found = 0;
    i64 uid = 0, parent = 0;
    PageView view;
    view.tokens = nullptr;
    bool is_asked = page >= 0 && page < limit;
    if (is_asked) {
        view = page_view(s, row, page);
        found = lookup(s, page_key(s, (u64)*view.link));
    }
    if (found > 0) {
        uid = s.uid[found];
        parent = s.parent_uid[found];
    }
    i64 before = __shfl_up_sync(FULL, uid, 1);
    if (page == 0) before = root_uid(s, row);
    if (lane == 0 || !is_asked) return;
    const i32* kept = s.page_tokens + (i64)found * s.page_size;
    if (found > 0 && parent == before && equal_tokens(view.tokens, kept, s.page_size)) {
        s.block_table[(i64)row * s.table_width + page] = found;
    } else {
        atomicMin(matched, page);
    }
}

// Finds the cached prefix of each candidate and leaves its pages in the row's table, which must own
// none: entries from `matched` on are rubbish.
//   rows[count]: candidates; limit[count], matched[count]: written; all in shared memory
DEVICE void prefix_match(const State& s, const i32* rows, i32 count, i32* limit, i32* matched) {
    FOR_EACH(c, count) {
        i32 reusable = min(s.num_tokens[rows[c]] - 1, s.score_from[rows[c]]);
        limit[c] = reusable > 0 ? reusable / s.page_size : 0;
        matched[c] = s.prefix_caching ? limit[c] : 0;
    }
    __syncthreads();
    if (!s.prefix_caching) return;
    i32 num_warps = blockDim.x >> 5;
    i32 turn = 0;  // segments of the candidates before this one, modulo the warps
    for (i32 c = 0; c < count; ++c) {
        i32 num_segments = (limit[c] + MATCH_STRIDE - 1) / MATCH_STRIDE;
        i32 first = warp_id() - turn;
        if (first < 0) first += num_warps;
        for (i32 i = first; i < num_segments; i += num_warps) {
            // A stale value costs a look-up too many and changes nothing; one lane reads for all.
            i32 first_miss = __shfl_sync(FULL, *(volatile i32*)(matched + c), 0);
            if (i * MATCH_STRIDE > first_miss) break;
            match_segment(s, rows[c], i * MATCH_STRIDE, limit[c], matched + c);
        }
        turn = (turn + num_segments) % num_warps;
    }
    __syncthreads();
}
