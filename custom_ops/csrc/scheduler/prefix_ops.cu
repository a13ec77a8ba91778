// Single operations of the prefix index, one block each; whole steps call their device functions.
#include "admit.cuh"
#include "publish.cuh"

struct MatchArgs {
    State state;
    const i64* rows;  // [num_candidates], the dump row where unused; these rows own no pages
    i64* pages;       // [num_candidates, table_width], 0 from the first miss on
    i64* matched;     // [num_candidates]
};

struct AdmitArgs {
    State state;
    const i32* budget;  // tokens of the step
    bool* admitted;     // [max_rows + 1]
};

struct PublishArgs {
    State state;
    const i64* first;  // [max_rows + 1], pages to publish, half open
    const i64* last;
    char* scratch;     // PLACE_BYTES * max_publishes, aligned to 16
};

struct Candidates {
    i32 rows[MAX_CANDIDATES];
    i32 count;
    AdmitShared admit;
};

extern "C" __global__ void __launch_bounds__(1024) scheduler_prefix_match(const __grid_constant__ MatchArgs args) {
    __shared__ Candidates c;
    const State& s = args.state;
    wait_for_earlier_kernels();
    FOR_EACH(i, s.num_candidates) c.rows[i] = (i32)args.rows[i];
    __syncthreads();
    i32 count = 0;
    while (count < s.num_candidates && c.rows[count] < s.max_rows) ++count;
    prefix_match(s, c.rows, count, c.admit.limit, c.admit.matched);
    FOR_EACH(i, s.num_candidates) args.matched[i] = i < count ? c.admit.matched[i] : 0;
    for (i32 i = 0; i < s.num_candidates; ++i) {
        i32 matched = i < count ? c.admit.matched[i] : 0;
        FOR_EACH(place, s.table_width) {
            i64 at = (i64)c.rows[i] * s.table_width + place;
            args.pages[(i64)i * s.table_width + place] = place < matched ? s.block_table[at] : 0;
        }
    }
}

DEVICE bool waits(const State& s, i32 row) {
    return s.state[row] == WAITING || (s.state[row] == RETRACTED && s.owned[row] == 0);
}

// The first waiting rows in order.
DEVICE void list_candidates(const State& s, Candidates& c) {
    if (threadIdx.x == 0) c.count = 0;
    __syncthreads();
    FOR_EACH(row, s.max_rows) {
        if (!waits(s, row)) continue;
        i32 rank = 0;
        i64 order = row_order(s, row);
        for (i32 other = 0; other < s.max_rows; ++other) {
            rank += waits(s, other) && row_order(s, other) < order;
        }
        if (rank >= s.num_candidates) continue;
        c.rows[rank] = row;
        atomicAdd(&c.count, 1);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(1024) scheduler_admit(const __grid_constant__ AdmitArgs args) {
    __shared__ Scratch scratch;
    __shared__ Candidates c;
    const State& s = args.state;
    wait_for_earlier_kernels();
    list_candidates(s, c);
    i32 promised = 0, wanted = 0;
    FOR_EACH(row, s.max_rows + 1) {
        args.admitted[row] = false;
        if (row == s.max_rows || !is_resident(s.state[row])) continue;
        promised += max(0, target_pages(s, row) - s.owned[row]);
        i32 want = s.num_tokens[row] - s.num_computed[row] - mask_missing(s, row);
        if (s.state[row] != BLOCKED) wanted += max(0, want);
    }
    i32 reserve = block_sum(scratch, promised), resident_want = block_sum(scratch, wanted);
    admit(s, scratch, c.admit, c.rows, c.count, reserve, resident_want, *args.budget, args.admitted);
}

extern "C" __global__ void __launch_bounds__(1024) scheduler_prefix_publish(const __grid_constant__ PublishArgs args) {
    __shared__ Scratch scratch;
    const State& s = args.state;
    wait_for_earlier_kernels();
    auto first_of = [&](i32 row) { return (i32)args.first[row]; };
    auto count_of = [&](i32 row) { return max(0, (i32)(args.last[row] - args.first[row])); };
    prefix_publish(s, scratch, first_of, count_of, nullptr, 0, args.scratch);
}
