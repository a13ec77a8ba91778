// The second half of a step: sampled tokens, published pages, transitions, and the step's record
// written straight into host memory. One block.
#pragma once
#include "publish.cuh"
#include "token_pages.cuh"

constexpr i32 RECORD_SLOTS = 64;
constexpr i32 MAX_ROWS = 4096;
constexpr i32 PLACES_SHARED = 28 * 1024;

// Places of a record, as in compiled_engine/outbox.py and compiled_engine/scheduler/advance.py.
// A row is gen, flags, num_cached, token.
constexpr i32 NUM_COUNTS = 10;
constexpr i64 FLAG_EMITTED = 1, FLAG_FINISHED = 2, FLAG_FREE = 4, FLAG_FAILED = 8,
              FLAG_RETRACTED = 16;

// Records go round in slots of pinned host memory; the host polls the slot's sequence number.
struct RecordRing {
    i64* rows;          // [RECORD_SLOTS, max_rows + 1, 4], pinned
    i64* counts;        // [RECORD_SLOTS, NUM_COUNTS], pinned
    i64* sequence;      // [RECORD_SLOTS], pinned: 1 + the step whose record stands in the slot
    i64* step_counter;  // on the device: steps advanced so far
};

struct AdvanceArgs {
    State state;
    PlanOut plan;
    RecordRing record;
    const i32* tokens;    // [max_rows + 1], sampled; an id outside the vocabulary ends its row
    const bool* is_stop;  // [max_rows + 1], the token ends its row
    char* scratch;        // PLACE_BYTES * max_publishes, aligned to 16
};

// What a thread knows of the row it works on.
struct RowStep {
    i8 state;
    bool emit;
    bool is_stop;
    bool is_finished;
    bool is_failed;
    bool grammar;
    bool pub_ok;
    bool is_victim;
    i32 token;
    i32 give;
    i32 num_tokens;
    i32 num_computed;
    i32 max_len;
    i32 mask_pos;
    i32 gen;
    i32 num_cached;
};

struct PlanTotals {
    i32 num_unserved;
    i32 wanted;
    i32 num_tokens;
};

// Shared memory of the kernel.
struct AdvanceShared {
    i32 num_decode;  // rows by state
    i32 num_resident;
    i32 num_waiting;
    unsigned short num_completed[MAX_ROWS];  // pages to publish, by row
};

// Read early: only the end needs them, but there they would cost a round of loads.
DEVICE PlanTotals read_totals(const PlanOut& plan) {
    return {*plan.num_unserved, *plan.wanted, *plan.num_tokens};
}

// Everything that is known before the step's own writes, in one round of loads.
DEVICE RowStep read_row(const AdvanceArgs& a, i32 row) {
    const State& s = a.state;
    RowStep r = {};
    if (row >= s.max_rows) return r;
    i32 planned = a.plan.give[row];
    bool emit = a.plan.emit[row];
    r.state = s.state[row];
    r.is_stop = a.is_stop[row];
    r.grammar = s.grammar[row];
    r.pub_ok = s.pub_ok[row];
    r.is_victim = row == *a.plan.victim;
    r.token = a.tokens[row];
    r.num_tokens = s.num_tokens[row];
    r.num_computed = s.num_computed[row];
    r.max_len = s.max_len[row];
    r.mask_pos = s.mask_pos[row];
    r.gen = s.gen[row];
    r.num_cached = s.num_cached[row];
    bool is_runnable = r.state == PREFILL || r.state == DECODE;
    r.give = is_runnable ? planned : 0;
    r.is_failed = r.give > 0 && (u32)r.token >= (u32)s.vocab_size;
    r.emit = is_runnable && emit && !r.is_failed;
    if (planned > 0 && !is_runnable) atomicAdd(s.error + ERROR_TOKENS_TO_IDLE_ROW, 1);
    return r;
}

// Appends the sampled tokens.
DEVICE void append_tokens(const State& s, Scratch& scratch, i32 row, RowStep& r) {
    i32 column = r.num_tokens / s.token_page_size;
    i32 offset = r.num_tokens - column * s.token_page_size;
    if (column >= s.token_table_width) column = s.token_table_width - 1;
    i64 entry = (i64)row * s.token_table_width + column;
    bool needs_page = r.emit && offset == 0;
    if (__syncthreads_or(needs_page)) {
        i32 page = pop_token_page(s, scratch, needs_page);
        if (page > 0) s.token_table[entry] = page;
    }
    if (!r.emit) return;
    s.token_pages[(i64)s.token_table[entry] * s.token_page_size + offset] = r.token;
    r.num_tokens += 1;
    s.num_tokens[row] = r.num_tokens;
    if (r.num_tokens % s.page_size == 0) extend_chain(s, row, r.num_tokens);
}

// Moves the row to its next state.
DEVICE void advance_state(const State& s, i32 row, RowStep& r) {
    i8 before = r.state;
    if (r.emit) {
        bool is_blocked = r.grammar && r.mask_pos < r.num_tokens;
        r.is_finished = r.is_stop || r.num_tokens >= r.max_len;
        r.state = r.is_finished ? FINISHED : is_blocked ? BLOCKED : DECODE;
    }
    if (r.is_failed) {
        r.is_finished = true;
        r.state = FINISHED;
    }
    if (r.is_victim && is_resident(r.state)) {
        r.state = RETRACTED;
        *s.num_retractions += 1;
    }
    if (r.state != before) s.state[row] = r.state;
}

DEVICE void write_row(const AdvanceArgs& a, i32 row, const RowStep& r, i64 slot) {
    i64 flags = (r.emit ? FLAG_EMITTED : 0) | (r.is_finished ? FLAG_FINISHED : 0) |
                (r.state == FREE ? FLAG_FREE : 0) | (r.is_failed ? FLAG_FAILED : 0) |
                (r.is_victim && r.state == RETRACTED ? FLAG_RETRACTED : 0);
    longlong2* out = (longlong2*)a.record.rows + (slot * (a.state.max_rows + 1) + row) * 2;
    out[0] = {r.gen, flags};
    out[1] = {r.num_cached, r.token};
}

DEVICE void count_row(AdvanceShared& shared, i8 state) {
    u32 decode = __ballot_sync(FULL, state == DECODE);
    u32 resident = __ballot_sync(FULL, is_resident(state));
    u32 waiting = __ballot_sync(FULL, state == WAITING || state == RETRACTED);
    if (lane_id() == 0) {
        atomicAdd(&shared.num_decode, __popc(decode));
        atomicAdd(&shared.num_resident, __popc(resident));
        atomicAdd(&shared.num_waiting, __popc(waiting));
    }
}

// All of a step's rows but the pages they completed. Lanes past the last row come along.
DEVICE void advance_row(const AdvanceArgs& a, Scratch& scratch, AdvanceShared& shared, i32 row,
                        i64 slot) {
    const State& s = a.state;
    RowStep r = read_row(a, row);
    append_tokens(s, scratch, row, r);
    if (row < s.max_rows) {
        i32 num_computed = r.num_computed + r.give;
        bool publishes = r.pub_ok && s.prefix_caching && !r.is_failed;
        i32 num_completed = num_computed / s.page_size - r.num_computed / s.page_size;
        shared.num_completed[row] = publishes ? num_completed : 0;
        if (r.give > 0) s.num_computed[row] = num_computed;
        advance_state(s, row, r);
        write_row(a, row, r, slot);
    }
    count_row(shared, r.state);
}

// One thread, behind a barrier after the rows' part: the counts, then the sequence number.
DEVICE void finish_record(const AdvanceArgs& a, const AdvanceShared& shared,
                          const PlanTotals& totals, i64 step) {
    const State& s = a.state;
    i64 slot = step % RECORD_SLOTS;
    i64* out = a.record.counts + slot * NUM_COUNTS;
    out[0] = shared.num_decode;
    out[1] = shared.num_resident;
    out[2] = shared.num_waiting;
    out[3] = totals.num_unserved;
    out[4] = totals.wanted;
    out[5] = totals.num_tokens;
    out[6] = *s.num_free;
    out[7] = *s.num_free_cached;
    out[8] = *s.num_retractions;
    out[9] = (i64)s.error[0] + s.error[1] + s.error[2] + s.error[3] + s.error[4];
    *a.record.step_counter = step + 1;
    // The barrier before ordered the other threads' writes before this fence.
    __threadfence_system();
    *(volatile i64*)(a.record.sequence + slot) = step + 1;
}

DEVICE void advance_step(const AdvanceArgs& a, Scratch& scratch, AdvanceShared& shared,
                         char* places) {
    const State& s = a.state;
    i64 step = *a.record.step_counter, slot = step % RECORD_SLOTS;
    PlanTotals totals = {};
    if (threadIdx.x == 0) {
        totals = read_totals(a.plan);
        shared.num_decode = shared.num_resident = shared.num_waiting = 0;
    }
    FOR_EACH_TURN(row, s.max_rows) advance_row(a, scratch, shared, row, slot);
    __syncthreads();
    if (s.prefix_caching) {
        auto count_of = [&](i32 row) { return (i32)shared.num_completed[row]; };
        auto first_of = [&](i32 row) { return s.num_computed[row] / s.page_size - count_of(row); };
        prefix_publish(s, scratch, first_of, count_of, places, PLACES_SHARED, a.scratch);
    }
    if (threadIdx.x == 0) {
        write_row(a, s.max_rows, {}, slot);
        finish_record(a, shared, totals, step);
    }
}
