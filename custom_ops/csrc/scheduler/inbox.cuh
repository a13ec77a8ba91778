// One step's submits, prompt pieces, aborts and masks, written into the state.
#pragma once
#include "token_pages.cuh"

constexpr i32 kMaxPieces = 256;

// The first column of each table is 1 for a real entry; see Inbox in scheduler/inbox.py.
struct Inbox {
    const i64* submits;       // real, row, gen, arrival, priority, salt, num_prompt, max_len, grammar,
                              // score_from
    const i64* pieces;        // real, row, index of the token page, length, salt
    const i32* piece_tokens;  // [max_pieces, token_page_size]
    const i64* aborts;        // real, row, gen
    const i64* masks;         // real, row, gen, position, number of forced tokens
    const i32* forced_tokens; // [max_masks, max_forced]
    i32 max_submits;
    i32 max_pieces;
    i32 max_aborts;
    i32 max_masks;
    i32 max_forced;
};

struct InboxShared {
    i32 page[kMaxPieces];   // token page of each piece, 0 = none
    u64 total[kMaxPieces];  // sum of its page terms
    u64 offset[kMaxPieces];
};

// Whether a real entry is among what this thread looks at.
DEVICE bool has_entry(const Inbox& inbox) {
    bool found = false;
    FOR_EACH(i, inbox.max_submits) found |= inbox.submits[i * 10] == 1;
    FOR_EACH(i, inbox.max_pieces) found |= inbox.pieces[i * 5] == 1;
    FOR_EACH(i, inbox.max_aborts) found |= inbox.aborts[i * 3] == 1;
    FOR_EACH(i, inbox.max_masks) found |= inbox.masks[i * 5] == 1;
    return found;
}

// Takes one token page for each piece of a FREE row, in order, while there are any.
DEVICE void pop_piece_pages(const State& s, Scratch& scratch, const Inbox& inbox, InboxShared& shared) {
    i32 num_free = *s.num_free_token_pages, num_wanted = 0;
    FOR_EACH_TURN(i, inbox.max_pieces) {
        const i64* piece = inbox.pieces + i * 5;
        bool is_real = i < inbox.max_pieces && piece[0] == 1 && s.state[piece[1]] == FREE;
        i32 total, rank = num_wanted + block_rank(scratch, is_real, total);
        num_wanted += total;
        if (i >= inbox.max_pieces) continue;
        i32 page = is_real && rank < num_free ? s.free_token_pages[num_free - 1 - rank] : 0;
        shared.page[i] = page;
        if (page) s.token_table[piece[1] * s.token_table_width + piece[2]] = page;
    }
    if (threadIdx.x == 0) {
        *s.num_free_token_pages = num_free - min(num_wanted, num_free);
        s.error[ERROR_NO_TOKEN_PAGE] += max(num_wanted - num_free, 0);
    }
    __syncthreads();
}

// Copies the tokens of all pieces, and puts each full page's term where its chain sum will stand.
DEVICE void copy_pieces(const State& s, const Inbox& inbox, const InboxShared& shared) {
    i32 size = s.token_page_size, per_store = size / s.page_size;
    FOR_EACH(i, inbox.max_pieces * size) {
        i32 page = shared.page[i / size];
        if (page) s.token_pages[(i64)page * size + i % size] = inbox.piece_tokens[i];
    }
    FOR_EACH(i, inbox.max_pieces * per_store) {
        i32 lane = i / per_store, place = i % per_store, page = shared.page[lane];
        if (!page) continue;
        const i64* piece = inbox.pieces + lane * 5;
        const i32* tokens = inbox.piece_tokens + lane * size + place * s.page_size;
        u64 content = 0;
        for (i32 j = 0; j < s.page_size; j++) content += token_term(tokens[j], j);
        bool is_full = (i64)(place + 1) * s.page_size <= piece[3];
        u64 term = is_full ? page_term(content, (i32)piece[2] * per_store + place) : 0;
        s.chain[(i64)page * per_store + place] = (i64)term;
    }
    __syncthreads();
}

// Turns the terms of each piece into sums from its start, a warp a piece.
DEVICE void sum_pieces(const State& s, const Inbox& inbox, InboxShared& shared) {
    i32 per_store = s.token_page_size / s.page_size;
    for (i32 i = warp_id(); i < inbox.max_pieces; i += blockDim.x >> 5) {
        if (!shared.page[i]) continue;
        i64* chain = s.chain + (i64)shared.page[i] * per_store;
        u64 sum = 0;
        for (i32 first = 0; first < per_store; first += 32) {
            i32 place = first + lane_id();
            u64 value = place < per_store ? (u64)chain[place] : 0;
            for (i32 step = 1; step < 32; step <<= 1) {
                u64 other = __shfl_up_sync(FULL, value, step);
                if (lane_id() >= step) value += other;
            }
            if (place < per_store) chain[place] = (i64)(sum + value);
            sum += __shfl_sync(FULL, value, 31);
        }
        if (lane_id() == 0) shared.total[i] = sum;
    }
    __syncthreads();
}

// Adds to each piece what stands before it: earlier pieces of this step, and the row's start.
DEVICE void link_pieces(const State& s, const Inbox& inbox, InboxShared& shared) {
    i32 per_store = s.token_page_size / s.page_size;
    FOR_EACH(i, inbox.max_pieces) {
        if (!shared.page[i]) continue;
        const i64* piece = inbox.pieces + i * 5;
        i64 row = piece[1], first = piece[2];
        u64 before = 0;
        for (i32 j = 0; j < inbox.max_pieces; j++) {
            const i64* other = inbox.pieces + j * 5;
            if (!shared.page[j] || other[1] != row) continue;
            if (other[2] < piece[2]) before += shared.total[j];
            first = min(first, other[2]);
        }
        if (first == 0) before += root_sum(piece[4]);
        else {
            i32 previous = s.token_table[row * s.token_table_width + first - 1];
            before += (u64)s.chain[(i64)previous * per_store + per_store - 1];
        }
        shared.offset[i] = before;
    }
    __syncthreads();
    FOR_EACH(i, inbox.max_pieces * per_store) {
        i32 page = shared.page[i / per_store];
        i64* link = s.chain + (i64)page * per_store + i % per_store;
        if (page) *link = (i64)((u64)*link + shared.offset[i / per_store]);
    }
}

DEVICE void apply_submits(const State& s, const Inbox& inbox) {
    FOR_EACH(i, inbox.max_submits) {
        const i64* entry = inbox.submits + i * 10;
        if (entry[0] != 1) continue;
        i64 row = entry[1];
        if (s.state[row] != FREE) {
            atomicAdd(&s.error[ERROR_SUBMIT_TO_USED_ROW], 1);
            continue;
        }
        s.state[row] = WAITING;
        s.gen[row] = (i32)entry[2];
        s.arrival[row] = entry[3];
        s.priority[row] = (i32)entry[4];
        s.salt[row] = entry[5];
        s.num_prompt[row] = (i32)entry[6];
        s.max_len[row] = (i32)entry[7];
        s.grammar[row] = entry[8] != 0;
        s.score_from[row] = (i32)entry[9];
        s.num_tokens[row] = (i32)entry[6];
        s.num_computed[row] = 0;
        s.mask_pos[row] = -1;
        s.pub_ok[row] = false;
        s.num_cached[row] = 0;
    }
    __syncthreads();
}

DEVICE void apply_aborts(const State& s, const Inbox& inbox) {
    FOR_EACH(i, inbox.max_aborts) {
        const i64* entry = inbox.aborts + i * 3;
        if (entry[0] != 1) continue;
        i64 row = entry[1];
        if (s.gen[row] == entry[2] && is_live(s.state[row])) s.state[row] = ABORTING;
    }
    __syncthreads();
}

// Whether the mask `entry` is for the row's request and its forced tokens for the row's next position.
DEVICE bool takes_mask(const State& s, const i64* entry) {
    i64 row = entry[1];
    if (entry[0] != 1 || s.gen[row] != entry[2] || !is_live(s.state[row])) return false;
    return s.grammar[row] && (entry[4] == 0 || s.num_tokens[row] + entry[4] == entry[3]);
}

DEVICE void count_wrong_masks(const State& s, const Inbox& inbox) {
    FOR_EACH(i, inbox.max_masks) {
        const i64* entry = inbox.masks + i * 5;
        i64 row = entry[1];
        if (entry[0] != 1 || s.gen[row] != entry[2] || !is_live(s.state[row])) continue;
        if (!s.grammar[row]) atomicAdd(&s.error[ERROR_MASK_WITHOUT_GRAMMAR], 1);
        else if (!takes_mask(s, entry)) atomicAdd(&s.error[ERROR_FORCED_ELSEWHERE], 1);
    }
}

// Appends the forced tokens of one mask and the links of the pages they complete. One thread: they
// are few, and steps with any are rare.
DEVICE void append_forced(const State& s, const Inbox& inbox, i32 i) {
    const i64* entry = inbox.masks + i * 5;
    i32 row = (i32)entry[1], count = (i32)entry[4], start = s.num_tokens[row];
    const i32* table = s.token_table + (i64)row * s.token_table_width;
    for (i32 j = 0; j < count; ++j) {
        i32 column = (start + j) / s.token_page_size, place = (start + j) % s.token_page_size;
        s.token_pages[(i64)table[column] * s.token_page_size + place] =
            inbox.forced_tokens[i * inbox.max_forced + j];
    }
    i32 first = start / s.page_size, end = (start + count) / s.page_size;
    for (i32 page = first; page < end; ++page) extend_chain(s, row, (page + 1) * s.page_size);
    s.num_tokens[row] = start + count;
    if (s.state[row] == BLOCKED) s.state[row] = PREFILL;
}

// Forced tokens of all masks: token pages in the order of the masks, then the tokens.
DEVICE void apply_forced(const State& s, Scratch& scratch, const Inbox& inbox) {
    bool has_forced = false;
    FOR_EACH(i, inbox.max_masks) has_forced |= inbox.masks[i * 5] == 1 && inbox.masks[i * 5 + 4] > 0;
    if (!__syncthreads_or(has_forced)) return;
    i32 size = s.token_page_size;
    FOR_EACH_TURN(i, inbox.max_masks) {
        const i64* entry = inbox.masks + i * 5;
        bool is_fresh = false;
        i32 last = 0;
        if (i < inbox.max_masks && takes_mask(s, entry) && entry[4] > 0) {
            i32 start = s.num_tokens[entry[1]];
            last = ((i32)entry[3] - 1) / size;
            is_fresh = start % size == 0 || start / size != last;
        }
        i32 page = pop_token_page(s, scratch, is_fresh);
        if (page > 0) s.token_table[entry[1] * s.token_table_width + last] = page;
        __syncthreads();
    }
    FOR_EACH(i, inbox.max_masks) {
        const i64* entry = inbox.masks + i * 5;
        if (takes_mask(s, entry) && entry[4] > 0) append_forced(s, inbox, i);
    }
    __syncthreads();
}

DEVICE void apply_masks(const State& s, Scratch& scratch, const Inbox& inbox) {
    count_wrong_masks(s, inbox);
    FOR_EACH(i, inbox.max_masks) {
        const i64* entry = inbox.masks + i * 5;
        if (takes_mask(s, entry)) atomicMax(&s.mask_pos[entry[1]], (i32)entry[3]);
    }
    __syncthreads();
    apply_forced(s, scratch, inbox);
}

DEVICE void apply_inbox(const State& s, Scratch& scratch, const Inbox& inbox, InboxShared& shared) {
    pop_piece_pages(s, scratch, inbox, shared);
    copy_pieces(s, inbox, shared);
    sum_pieces(s, inbox, shared);
    link_pieces(s, inbox, shared);
    apply_submits(s, inbox);
    apply_aborts(s, inbox);
    apply_masks(s, scratch, inbox);
}
