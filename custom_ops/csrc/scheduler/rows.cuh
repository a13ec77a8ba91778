// Rows in the order of the policy: their ranks, and what each may compute.
#pragma once
#include "common.cuh"

constexpr i64 NOT_RANKED = 0x7fffffffffffffffll;
constexpr i32 CLASS_SHIFT = 57;
constexpr i32 kMaxCandidates = 256;

// What the block keeps of every row, in dynamic shared memory; see `rows_shared_bytes` of
// scheduler_args.py. Arrays by row, by place in a sorted run, or by place in the order.
struct RowsShared {
    i64* key;         // by row: order, NOT_RANKED for rows that stand out of it
    i64* run_key;     // runs of 32, each sorted
    i32* want;        // by row: tokens it could compute now; after the grants: pages it lacks
    i32* run_rank;    // by place in the runs: rank over all
    i32* page_start;  // by place in the order: pages needed before it
    u16* run_row;     // by place in the runs
    u16* row_at;      // by place in the order
};

constexpr i32 kRowBytes = 8 + 8 + 4 + 4 + 4 + 2 + 2;

DEVICE RowsShared rows_shared(char* memory, i32 num_rows) {
    i32 n = (num_rows + 31) & ~31;
    RowsShared rows;
    rows.key = (i64*)memory;
    rows.run_key = rows.key + n;
    rows.want = (i32*)(rows.run_key + n);
    rows.run_rank = rows.want + n;
    rows.page_start = rows.run_rank + n;
    rows.run_row = (u16*)(rows.page_start + n);
    rows.row_at = rows.run_row + n;
    return rows;
}

// Keys of `run` (32, sorted) that are smaller than `key`.
DEVICE i32 smaller_in_run(const i64* run, i64 key) {
    i32 count = 0;
    for (i32 step = 16; step > 0; step >>= 1)
        if (run[count + step - 1] < key) count += step;
    return count + (run[count] < key);
}

// Lists the rows with a key in ascending order in `row_at`; returns how many there are. Keys are
// unique. Every 32 rows are sorted by counting, then each row looks its key up in every other run.
DEVICE i32 order_rows(const State& s, Scratch& scratch, const RowsShared& rows) {
    i32 num_runs = (s.max_rows + 31) >> 5;
    for (i32 run = warp_id(); run < num_runs; run += blockDim.x >> 5) {
        const i64* keys = rows.key + run * 32;
        i64 key = keys[lane_id()];
        i32 rank = 0;
#pragma unroll
        for (i32 i = 0; i < 32; i++) rank += keys[i] < key || (keys[i] == key && i < lane_id());
        rows.run_key[run * 32 + rank] = key;
        rows.run_row[run * 32 + rank] = run * 32 + lane_id();
        rows.run_rank[run * 32 + rank] = rank;
    }
    __syncthreads();
    // A warp's lanes share the run they search.
    for (i32 i = threadIdx.x; i < num_runs * num_runs * 32; i += blockDim.x) {
        i32 place = i % (num_runs * 32), run = i / (num_runs * 32);
        i64 key = rows.run_key[place];
        if (run == place >> 5 || key == NOT_RANKED) continue;
        i32 count = smaller_in_run(rows.run_key + run * 32, key);
        if (count) atomicAdd(&rows.run_rank[place], count);
    }
    __syncthreads();
    i32 num_ranked = 0;
    FOR_EACH(place, num_runs * 32) {
        if (rows.run_key[place] == NOT_RANKED) continue;
        rows.row_at[rows.run_rank[place]] = rows.run_row[place];
        num_ranked++;
    }
    return block_sum(scratch, num_ranked);
}

// Tokens a row could compute now.
DEVICE i32 wanted_tokens(const State& s, i32 row) {
    i8 state = s.state[row];
    if (state != PREFILL && state != DECODE) return 0;
    return max(s.num_tokens[row] - s.num_computed[row] - mask_missing(s, row), 0);
}

DEVICE bool is_candidate(const State& s, i32 row) {
    i8 state = s.state[row];
    return state == WAITING || (state == RETRACTED && s.owned[row] == 0);
}

// Keys of rows past the last one: the arrays are whole runs of 32.
DEVICE void fill_last_run(const State& s, const RowsShared& rows) {
    i32 end = (s.max_rows + 31) & ~31;
    if ((i32)threadIdx.x < end - s.max_rows) rows.key[s.max_rows + threadIdx.x] = NOT_RANKED;
}

// Waiting rows in order, at most `num_candidates`; returns how many.
DEVICE i32 list_candidates(const State& s, Scratch& scratch, const RowsShared& rows, i32* candidates) {
    FOR_EACH(row, s.max_rows) rows.key[row] = is_candidate(s, row) ? row_order(s, row) : NOT_RANKED;
    fill_last_run(s, rows);
    __syncthreads();
    i32 count = min(order_rows(s, scratch, rows), s.num_candidates);
    FOR_EACH(i, count) candidates[i] = rows.row_at[i];
    __syncthreads();
    return count;
}

// Pages promised to rows on the device and not owned yet.
DEVICE i32 reserved_pages(const State& s, Scratch& scratch) {
    i32 sum = 0;
    FOR_EACH(row, s.max_rows)
        if (is_resident(s.state[row])) sum += max(target_pages(s, row) - s.owned[row], 0);
    return block_sum(scratch, sum);
}

DEVICE i32 resident_want(const State& s, Scratch& scratch) {
    i32 sum = 0;
    FOR_EACH(row, s.max_rows) sum += wanted_tokens(s, row);
    return block_sum(scratch, sum);
}

// What the grants of a step add up to.
struct Grants {
    i32 num_ordered;  // rows that can run
    i32 num_pages;    // taken from the ring
    bool is_short;    // some row lacks pages
    i32 num_tokens;
};

// Orders the rows that can run, decode rows first and rows admitted now last, and gives each tokens
// and pages: fills the plan, `row_at`, `page_start`, and `want` with the pages each row lacks.
DEVICE Grants grant(const State& s, Scratch& scratch, const RowsShared& rows, const PlanOut& plan, i32 budget) {
    i32 num_free = *s.num_free;
    FOR_EACH(row, s.max_rows) {
        i8 state = s.state[row];
        bool is_runnable = state == PREFILL || state == DECODE;
        i64 row_class = state == DECODE ? 0 : plan.admitted[row] ? 2 : 1;
        rows.key[row] = is_runnable ? row_order(s, row) + (row_class << CLASS_SHIFT) : NOT_RANKED;
        rows.want[row] = wanted_tokens(s, row);
        if (!is_runnable) plan.give[row] = 0, plan.emit[row] = false, plan.rank[row] = s.max_rows;
    }
    fill_last_run(s, rows);
    __syncthreads();
    Grants grants;
    grants.num_ordered = order_rows(s, scratch, rows);
    i32 wanted = 0, needed = 0, num_served = 0, num_unserved = 0, num_tokens = 0;
    FOR_EACH_TURN(place, grants.num_ordered) {
        bool is_real = place < grants.num_ordered;
        i32 row = is_real ? rows.row_at[place] : 0;
        i32 want = is_real ? rows.want[row] : 0;
        i32 computed = s.num_computed[row], owned = s.owned[row];
        i32 total, before = wanted + block_scan(scratch, want, total);
        wanted += total;
        i32 give = min(max(budget - before, 0), want);
        i32 need = give > 0 ? max(pages_of(s, computed + give) - owned, 0) : 0;
        i32 start = needed + block_scan(scratch, need, total);
        needed += total;
        i32 got = min(max(num_free - start, 0), need);
        give = min(give, max((owned + got) * s.page_size - computed, 0));
        i32 rank = num_served + block_rank(scratch, give > 0, total);
        num_served += total;
        num_unserved += want > 0 && give == 0;
        num_tokens += give;
        if (!is_real) continue;
        rows.page_start[place] = start;
        rows.want[row] = need - got;
        plan.give[row] = give;
        plan.rank[row] = give > 0 ? rank : s.max_rows;
        plan.emit[row] = give > 0 && computed + give == s.num_tokens[row];
    }
    // Two sums in one: the tokens of a step are far below 2^31.
    i64 sums = block_sum(scratch, ((i64)num_unserved << 32) + num_tokens);
    grants.num_tokens = (i32)sums;
    grants.num_pages = min(needed, num_free);
    grants.is_short = needed > num_free;
    if (threadIdx.x == 0) {
        *plan.num_tokens = grants.num_tokens;
        *plan.wanted = wanted;
        *plan.num_unserved = (i32)(sums >> 32);
    }
    return grants;
}

// The resident to retract after this step, or -1: the last in order, if rows before it lack pages
// or nothing was given, and no pages are on their way.
DEVICE i32 choose_victim(const State& s, Scratch& scratch, const RowsShared& rows, const Grants& grants, bool is_release_pending) {
    if (!grants.is_short || is_release_pending) return -1;
    i64 last = MIN_I64;
    FOR_EACH(row, s.max_rows)
        if (is_resident(s.state[row]) && s.owned[row] > 0) last = max(last, row_order(s, row));
    last = block_max(scratch, last);
    i32 victim = -1;
    bool precedes = false;
    FOR_EACH(row, s.max_rows) {
        i64 order = row_order(s, row);
        i8 state = s.state[row];
        if (is_resident(state) && s.owned[row] > 0 && order == last) victim = row;
        precedes |= (state == PREFILL || state == DECODE) && rows.want[row] > 0 && order < last;
    }
    bool is_pressed = __syncthreads_or(precedes) || grants.num_tokens == 0;
    victim = block_max(scratch, victim);
    return is_pressed ? victim : -1;
}
