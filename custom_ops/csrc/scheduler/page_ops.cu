// The parts of a plan that work on pages and the inbox, as kernels of their own: for tests and
// measurements.
#include "inbox.cuh"
#include "release.cuh"
#include "rows.cuh"
#include "take.cuh"

struct ReleaseArgs {
    State state;
    bool* is_pending;
};

extern "C" __global__ void __launch_bounds__(1024, 1) scheduler_page_release(const __grid_constant__ ReleaseArgs args) {
    __shared__ Scratch scratch;
    __shared__ ReleaseShared shared;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    bool is_pending = release(args.state, scratch, shared);
    if (threadIdx.x == 0) *args.is_pending = is_pending;
}

struct TakeArgs {
    State state;
    const i32* offset;  // [max_rows + 1], place of the row's first page among those taken
    const i32* count;   // [max_rows + 1], pages the row gets
};

extern "C" __global__ void __launch_bounds__(1024, 1) scheduler_page_take(const __grid_constant__ TakeArgs args) {
    __shared__ Scratch scratch;
    DYNAMIC_SHARED(memory);
    const State& s = args.state;
    RowsShared rows = rows_shared(memory, s.max_rows);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    i32 total = 0;
    FOR_EACH(row, s.max_rows) {
        total += args.count[row];
        rows.key[row] = args.count[row] ? args.offset[row] : NOT_RANKED;
    }
    fill_last_run(s, rows);
    total = block_sum(scratch, total);
    i32 num_rows = order_rows(s, scratch, rows);
    FOR_EACH(place, num_rows) rows.page_start[place] = args.offset[rows.row_at[place]];
    __syncthreads();
    if (total) take(s, scratch, rows.row_at, rows.page_start, num_rows, total);
    compact(s, scratch);
}

struct ApplyInboxArgs {
    State state;
    Inbox inbox;
};

extern "C" __global__ void __launch_bounds__(1024, 1) scheduler_apply_inbox(const __grid_constant__ ApplyInboxArgs args) {
    __shared__ Scratch scratch;
    __shared__ InboxShared shared;
    wait_for_earlier_kernels();
    let_next_kernel_start();
    if (!__syncthreads_or(has_entry(args.inbox))) return;
    apply_inbox(args.state, scratch, args.inbox, shared);
}
