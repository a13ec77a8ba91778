// Publishing the pages that a step completed. One block.
//
// The step's pages are a list of places in (row, page) order. Equal keys: the smallest list index
// leads. All ties are broken by list index, so every rank of a group builds the same index.
#pragma once
#include "prefix.cuh"

// A page that this step completed. The list stands in shared memory where it fits, else in a
// scratch buffer.
struct Place {
    u64 key;
    i64 canonical_uid;  // publication number of the page's content once the step is through
    i64 first_parent;   // at `start`: the same of what stands before the row's first place
    i32 row;
    i32 page;       // index in the row's table
    i32 own;        // page id the row computed
    i32 found;      // page in the index under its key, 0 = none
    i32 leader;     // list index of its leader, -1 if its key is in the index
    i32 way;        // a leader's way in its bucket
    i32 start;      // list index of its row's first place
    i32 first_bad;  // at `start`: list index of the row's first failure
};

constexpr i32 PLACE_BYTES = sizeof(Place);

// Looks every place up in the index.
DEVICE void find_places(const State& s, Place* p, i32 count) {
    FOR_EACH(k, count) {
        i32 row = p[k].row, page = p[k].page;
        u64 key = page_key(s, page_chain(s, row, page));
        i32 found = lookup(s, key);
        p[k].own = s.block_table[(i64)row * s.table_width + page];
        p[k].key = key;
        p[k].found = found;
        p[k].first_bad = count;
        if (p[k].start == k) {
            i32 before = page > 0 ? s.block_table[(i64)row * s.table_width + page - 1] : 0;
            p[k].first_parent = page > 0 ? s.uid[before] : root_uid(s, row);
        }
    }
    __syncthreads();
}

// Chooses leaders and says which publication number each place ends up under.
DEVICE void find_leaders(const State& s, Place* p, i32 count, i64 uid_next) {
    FOR_EACH(k, count) {
        i32 found = p[k].found, leader = -1;
        if (found == 0) {
            u64 key = p[k].key;
            leader = 0;
            while (p[leader].key != key) ++leader;  // ends at `k`
        }
        p[k].canonical_uid = found > 0 ? s.uid[found] : uid_next + leader;
        p[k].leader = leader;
    }
    __syncthreads();
}

// Publication number of what stands before place `k`, after this step's swaps.
DEVICE i64 parent_of(Place* p, i32 k) {
    return p[k].start == k ? p[k].first_parent : p[k - 1].canonical_uid;
}

// The way a leader goes to: the n-th empty one of its bucket for the n-th leader there; -1 if full.
DEVICE i32 free_way(const State& s, Place* p, i32 k) {
    u64 mask = (u64)(s.index_buckets - 1), key = p[k].key;
    i32 rank = 0;
    for (i32 j = 0; j < k; ++j) rank += p[j].leader == j && ((p[j].key ^ key) & mask) == 0;
    const i32* pages = s.tpage + (i64)(key & mask) * s.index_ways;
    i32 result = -1;
#pragma unroll 8
    for (i32 way = 0; way < s.index_ways; ++way) {
        if (pages[way] == 0 && rank-- == 0) result = way;
    }
    return result;
}

DEVICE const i32* place_tokens(const State& s, Place* p, i32 k) {
    return page_view(s, p[k].row, p[k].page).tokens;
}

// Whether place `k` may stand under its key, for itself alone; leaders get their `way`.
DEVICE bool is_place_ok(const State& s, Place* p, i32 k) {
    i32 found = p[k].found, leader = p[k].leader;
    if (leader == k) {
        p[k].way = free_way(s, p, k);
        return p[k].way >= 0;
    }
    i64 parent = found > 0 ? s.parent_uid[found] : parent_of(p, leader);
    const i32* kept = s.page_tokens + (i64)found * s.page_size;
    if (found == 0) kept = place_tokens(s, p, leader);
    return parent == parent_of(p, k) && equal_tokens(place_tokens(s, p, k), kept, s.page_size);
}

DEVICE void mark_bad(const State& s, Place* p, i32 k) {
    atomicMin(&p[p[k].start].first_bad, k);
    s.pub_ok[p[k].row] = false;
}

DEVICE void find_failures(const State& s, Place* p, i32 count) {
    bool has_bad = false;
    FOR_EACH(k, count) {
        if (is_place_ok(s, p, k)) continue;
        has_bad = true;
        mark_bad(s, p, k);
    }
    if (!__syncthreads_or(has_bad)) return;
    // Rare, and then cautious: after any failure in this step nobody follows a leader.
    FOR_EACH(k, count) {
        if (p[k].found == 0 && p[k].leader != k) mark_bad(s, p, k);
    }
    __syncthreads();
}

DEVICE void insert_page(const State& s, Place* p, i32 k) {
    i32 own = p[k].own;
    i64 slot = (i64)(p[k].key & (u64)(s.index_buckets - 1)) * s.index_ways + p[k].way;
    s.uid[own] = p[k].canonical_uid;
    s.parent_uid[own] = parent_of(p, k);
    s.index_slot[own] = (i32)slot;
    s.tkey[slot] = (i64)p[k].key;
    s.tpage[slot] = own;
    copy_tokens(s.page_tokens + (i64)own * s.page_size, place_tokens(s, p, k), s.page_size);
}

// Puts the published page into the row's table; its own copy becomes free, the `rank`-th to do so.
// Returns whether the published page leaves the free set by that.
DEVICE bool swap_page(const State& s, Place* p, i32 k, i64 position) {
    i32 own = p[k].own, canonical = p[k].found > 0 ? p[k].found : p[p[k].leader].own;
    s.block_table[(i64)p[k].row * s.table_width + p[k].page] = canonical;
    s.ring_pos[canonical] = NO_POSITION;
    bool was_free = atomicAdd(s.ref + canonical, 1) == 0;
    s.ref[own] = 0;
    s.ring[ring_place(s, position)] = own;
    s.ring_pos[own] = position;
    return was_free;
}

DEVICE void store_places(const State& s, Scratch& scratch, Place* p, i32 count) {
    bool has_swap = false;
    FOR_EACH(k, count) {
        if (k >= p[p[k].start].first_bad) continue;
        if (p[k].leader == k) {
            insert_page(s, p, k);
        } else {
            has_swap = true;
        }
    }
    if (!__syncthreads_or(has_swap)) return;
    i64 head = *s.head;
    i32 num_swapped = 0, num_reused = 0;
    FOR_EACH_TURN(k, count) {
        bool is_swapped = k < count && p[k].leader != k && k < p[p[k].start].first_bad;
        i32 total, rank = num_swapped + block_rank(scratch, is_swapped, total);
        num_reused += is_swapped && swap_page(s, p, k, head - 1 - rank);
        num_swapped += total;
    }
    num_reused = block_sum(scratch, num_reused);
    if (threadIdx.x == 0) {
        *s.head = head - num_swapped;
        *s.num_free += num_swapped - num_reused;
        *s.num_free_cached -= num_reused;
    }
}

// Publishes `count_of(row)` pages of each row, from its page `first_of(row)` on. Has no barrier at
// its end; the scalars it changes are thread 0's.
//   shared[shared_bytes]: memory for the list of places; `global`: the same for longer lists,
//   PLACE_BYTES * max_publishes
template <class First, class Count>
DEVICE void prefix_publish(const State& s, Scratch& scratch, First first_of, Count count_of,
                           char* shared, i32 shared_bytes, char* global) {
    i64 uid_next = *s.uid_next;
    i32 num_mine = 0;
    FOR_EACH(row, s.max_rows) num_mine += count_of(row);
    i32 count = block_sum(scratch, num_mine);
    if (threadIdx.x == 0) *s.uid_next = uid_next + s.max_publishes;
    if (count == 0) return;
    Place* p = (Place*)(count * PLACE_BYTES <= shared_bytes ? shared : global);
    i32 before = 0;
    FOR_EACH_TURN(row, s.max_rows) {
        i32 total, num = row < s.max_rows ? count_of(row) : 0;
        i32 start = before + block_scan(scratch, num, total);
        for (i32 i = 0; i < num; ++i) {
            p[start + i].row = row;
            p[start + i].page = first_of(row) + i;
            p[start + i].start = start;
        }
        before += total;
    }
    __syncthreads();
    find_places(s, p, count);
    find_leaders(s, p, count, uid_next);
    find_failures(s, p, count);
    store_places(s, scratch, p, count);
}
