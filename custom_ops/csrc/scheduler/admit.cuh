// Admission: which candidates get pages and tokens now, and their cached pages into their tables.
// One block. A candidate owns no pages, so its table row is where its matches stand meanwhile.
#pragma once
#include "prefix.cuh"

constexpr i32 MAX_CANDIDATES = 256;
// While charges are counted, the ring position of a free page carries the first candidate that
// matched it in the bits from here on; positions stay far below.
constexpr i32 TOUCH_SHIFT = 50;
constexpr i64 POSITION_MASK = (1ll << TOUCH_SHIFT) - 1;

struct AdmitShared {
    i32 limit[MAX_CANDIDATES];      // pages that may be matched at most
    i32 matched[MAX_CANDIDATES];    // pages found from the start on
    u64 first_key[MAX_CANDIDATES];  // key of the first page not found
    i64 order[MAX_CANDIDATES];
    i32 charged[MAX_CANDIDATES];    // matched pages that leave the free set
    i32 new_pages[MAX_CANDIDATES];  // promised pages beside the matched ones
    i32 want[MAX_CANDIDATES];       // tokens it could compute now
    bool can_fill[MAX_CANDIDATES];  // can compute its next page without a held-back token
    bool is_deferred[MAX_CANDIDATES];
    bool is_admitted[MAX_CANDIDATES];
};

DEVICE void describe_candidate(const State& s, AdmitShared& a, const i32* rows, i32 c) {
    i32 row = rows[c], matched = a.matched[c];
    i32 reachable = s.num_tokens[row] - mask_missing(s, row);
    a.can_fill[c] = (matched + 1) * s.page_size <= reachable;
    bool is_known = a.can_fill[c] || matched < a.limit[c];
    a.first_key[c] = is_known ? page_key(s, page_chain(s, row, matched)) : 0;
    a.order[c] = row_order(s, row);
    a.is_deferred[c] = false;
    a.charged[c] = 0;
    a.new_pages[c] = target_pages(s, row) - matched;
    a.want[c] = reachable - matched * s.page_size;
}

// Marks the candidates whose next page an earlier candidate or a resident row ahead in order is
// about to compute.
DEVICE void find_deferred(const State& s, AdmitShared& a, i32 count) {
    FOR_EACH(c, count) {
        for (i32 e = 0; e < c && a.matched[c] < a.limit[c]; ++e) {
            if (a.can_fill[e] && a.first_key[e] == a.first_key[c]) a.is_deferred[c] = true;
        }
    }
    FOR_EACH(row, s.max_rows) {
        if (s.state[row] != PREFILL || !s.pub_ok[row]) continue;
        i32 next = s.num_computed[row] / s.page_size;
        if ((next + 1) * s.page_size > s.num_tokens[row] - mask_missing(s, row)) continue;
        u64 key = page_key(s, page_chain(s, row, next));
        i64 order = row_order(s, row);
        for (i32 c = 0; c < count; ++c) {
            bool can_use = a.matched[c] < a.limit[c];
            if (can_use && a.first_key[c] == key && order < a.order[c]) a.is_deferred[c] = true;
        }
    }
    __syncthreads();
}

// Calls `visit(candidate, page)` for every matched page of the candidates that `is_chosen` names,
// with whole warps: `page` is 0 in the lanes past the end.
template <class Chosen, class Visit>
DEVICE void for_matched_pages(const State& s, const AdmitShared& a, const i32* rows, i32 count,
                              Chosen is_chosen, Visit visit) {
    i32 num_warps = blockDim.x >> 5, turn = 0;
    for (i32 c = 0; c < count; ++c) {
        if (!is_chosen(c)) continue;
        const i32* table = s.block_table + (i64)rows[c] * s.table_width;
        i32 num_segments = (a.matched[c] + 31) / 32;
        i32 first = warp_id() - turn;
        if (first < 0) first += num_warps;
        for (i32 i = first; i < num_segments; i += num_warps) {
            i32 place = i * 32 + lane_id();
            visit(c, place < a.matched[c] ? table[place] : 0);
        }
        turn = (turn + num_segments) % num_warps;
    }
}

// Counts for each candidate that is not deferred the free pages that it is the first to match.
DEVICE void count_charges(const State& s, AdmitShared& a, const i32* rows, i32 count) {
    auto is_chosen = [&](i32 c) { return !a.is_deferred[c]; };
    for_matched_pages(s, a, rows, count, is_chosen, [&](i32 c, i32 page) {
        if (page == 0 || s.ref[page] > 0) return;
        i64 position = s.ring_pos[page] & POSITION_MASK;
        atomicMax(s.ring_pos + page, position | ((i64)(count - c) << TOUCH_SHIFT));
    });
    __syncthreads();
    for_matched_pages(s, a, rows, count, is_chosen, [&](i32 c, i32 page) {
        bool is_free = page > 0 && s.ref[page] == 0;
        bool is_first = is_free && s.ring_pos[page] >> TOUCH_SHIFT == count - c;
        i32 num = __popc(__ballot_sync(FULL, is_first));
        if (lane_id() == 0 && num > 0) atomicAdd(a.charged + c, num);
    });
    __syncthreads();
    for_matched_pages(s, a, rows, count, is_chosen, [&](i32, i32 page) {
        if (page > 0 && s.ref[page] == 0) s.ring_pos[page] &= POSITION_MASK;
    });
}

// One thread: walks the candidates in order until one does not fit; returns the free pages taken.
DEVICE i32 pass_gate(AdmitShared& a, i32 count, i32 page_room, i32 token_room) {
    i64 charge = 0, want = 0;
    i32 taken = 0;
    bool is_open = true;
    for (i32 c = 0; c < count; ++c) {
        bool is_admitted = false;
        if (!a.is_deferred[c] && is_open) {
            charge += a.charged[c] + a.new_pages[c];
            is_admitted = is_open = charge <= page_room && want < token_room;
            want += a.want[c];
            if (is_admitted) taken += a.charged[c];
        }
        a.is_admitted[c] = is_admitted;
    }
    return taken;
}

// Gives the admitted rows their matched pages and makes them PREFILL.
DEVICE void apply_admitted(const State& s, const AdmitShared& a, const i32* rows, i32 count) {
    auto is_chosen = [&](i32 c) { return a.is_admitted[c]; };
    for_matched_pages(s, a, rows, count, is_chosen, [&](i32, i32 page) {
        if (page == 0) return;
        atomicAdd(s.ref + page, 1);
        s.ring_pos[page] = NO_POSITION;
    });
    FOR_EACH(c, count) {
        if (!a.is_admitted[c]) continue;
        i32 row = rows[c], num_known = a.matched[c] * s.page_size;
        // Forced tokens behind the prompt may be found too.
        if (s.state[row] == WAITING) s.num_cached[row] = min(num_known, s.num_prompt[row]);
        s.owned[row] = a.matched[c];
        s.num_computed[row] = num_known;
        s.pub_ok[row] = s.prefix_caching != 0;
        s.state[row] = PREFILL;
    }
}

// Moves the candidates that fit to PREFILL with their cached pages.
//   rows[count]: the candidates in order, in shared memory; at most MAX_CANDIDATES
//   reserve: pages that residents are promised and do not own
//   resident_want: tokens that residents could compute now
//   admitted: [max_rows], set where a row is admitted and left as it is elsewhere
DEVICE void admit(const State& s, Scratch&, AdmitShared& a, const i32* rows, i32 count, i32 reserve,
                  i32 resident_want, i32 budget, bool* admitted) {
    prefix_match(s, rows, count, a.limit, a.matched);
    bool has_match = false;
    FOR_EACH(c, count) {
        describe_candidate(s, a, rows, c);
        has_match |= a.matched[c] > 0;
    }
    has_match = __syncthreads_or(has_match);
    if (s.prefix_caching) find_deferred(s, a, count);
    if (has_match) count_charges(s, a, rows, count);
    if (threadIdx.x == 0) {
        i32 num_free = *s.num_free;
        i32 taken = pass_gate(a, count, num_free - reserve, budget - resident_want);
        *s.num_free = num_free - taken;
        *s.num_free_cached -= taken;  // a matched page is a published one
    }
    __syncthreads();
    apply_admitted(s, a, rows, count);
    FOR_EACH(c, count) {
        if (a.is_admitted[c]) admitted[rows[c]] = true;
    }
    __syncthreads();
}
