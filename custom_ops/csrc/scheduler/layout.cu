// Grants to the step's flattened inputs; see compiled_engine/layout.py. A block lays out a run of
// tokens and finds the rows' places for itself; the first block writes the per-sequence outputs.
#include "common.cuh"

struct LayoutArgs {
    State state;
    PlanOut plan;
    i64* token_ids;       // [num_tokens]
    i64* positions;       // [num_tokens]
    i64* token_rows;      // [num_tokens]
    i64* slot_mapping;    // [num_tokens]
    i32* seq_rows;        // [max_rows]
    i32* seq_lens;        // [max_rows]
    i32* query_start_loc; // [max_rows + 1]
    i64* logits_indices;  // [max_rows]
    i32 num_tokens;
};

// The rows with tokens, by rank: arrays of [max_rows].
struct Sequences {
    i32* row;
    i32* length;    // 0 where unused
    i32* computed;  // tokens with KV before this step
    i32* end;       // tokens of the step up to and with this row
};

DEVICE void list_sequences(const LayoutArgs& a, Scratch& scratch, const Sequences& q) {
    const State& s = a.state;
    FOR_EACH(i, s.max_rows) {
        q.row[i] = s.max_rows;
        q.length[i] = q.computed[i] = 0;
    }
    __syncthreads();
    FOR_EACH(row, s.max_rows) {
        i32 give = a.plan.give[row], rank = a.plan.rank[row], computed = s.num_computed[row];
        if (give <= 0) continue;
        q.row[rank] = row;
        q.length[rank] = give;
        q.computed[rank] = computed;
    }
    __syncthreads();
    i32 before = 0;
    FOR_EACH_TURN(i, s.max_rows) {
        i32 total, length = i < s.max_rows ? q.length[i] : 0;
        i32 start = block_scan(scratch, length, total);
        if (i < s.max_rows) q.end[i] = before + start + length;
        before += total;
    }
    __syncthreads();
}

DEVICE void write_sequences(const LayoutArgs& a, const Sequences& q) {
    FOR_EACH(i, a.state.max_rows) {
        i32 length = q.length[i];
        a.seq_rows[i] = q.row[i];
        a.seq_lens[i] = length > 0 ? q.computed[i] + length : 0;
        a.query_start_loc[i + 1] = q.end[i];
        a.logits_indices[i] = length > 0 ? q.end[i] - 1 : 0;
    }
    if (threadIdx.x == 0) a.query_start_loc[0] = 0;
}

DEVICE void write_token(const LayoutArgs& a, const Sequences& q, i32 token) {
    const State& s = a.state;
    i32 low = 0, high = s.max_rows - 1;  // the first sequence that ends behind the token
    while (low < high) {
        i32 middle = (low + high) >> 1;
        if (q.end[middle] > token) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    i64 row = s.max_rows, position = 0, id = 0, slot = -1;
    if (token < q.end[low]) {
        row = q.row[low];
        i32 place = q.computed[low] + token - (q.end[low] - q.length[low]);
        i32 store = place / s.token_page_size, column = place / s.page_size;
        i64 stored = s.token_table[row * s.token_table_width + store];
        i64 page = s.block_table[row * s.table_width + column];
        id = s.token_pages[stored * s.token_page_size + (place - store * s.token_page_size)];
        slot = page * s.page_size + (place - column * s.page_size);
        position = place;
    }
    a.token_ids[token] = id;
    a.positions[token] = position;
    a.token_rows[token] = row;
    a.slot_mapping[token] = slot;
}

extern "C" __global__ void __launch_bounds__(1024) scheduler_layout(const __grid_constant__ LayoutArgs a) {
    __shared__ Scratch scratch;
    DYNAMIC_SHARED(memory);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    i32* arrays = (i32*)memory;
    i32 rows = a.state.max_rows;
    Sequences sequences = {arrays, arrays + rows, arrays + 2 * rows, arrays + 3 * rows};
    list_sequences(a, scratch, sequences);
    if (blockIdx.x == 0) write_sequences(a, sequences);
    i32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token < a.num_tokens) write_token(a, sequences, token);
}
