// The first half of a step in one block: inbox, release, match, admit, budget, pages, victim.
//
// Whatever a step has no need of is left out: a steady decode step reads its rows once, orders them
// and takes a page for those that fill one.
#include "admit.cuh"
#include "inbox.cuh"
#include "release.cuh"
#include "rows.cuh"
#include "take.cuh"

struct PlanArgs {
    State state;
    Inbox inbox;
    PlanOut plan;
    const i32* budget;
};

// What rows need of this step, ored over the rows a thread looks at.
enum Need { NEEDS_RELEASE = 1, NEEDS_ADMISSION = 2 };

// Starts the loads of what every step reads, so that later ones find it near.
DEVICE void prefetch(const State& s) {
    FOR_EACH(row, s.max_rows) {
        touch(s.state + row);
        touch(s.owned + row);
        touch(s.num_tokens + row);
        touch(s.num_computed + row);
        touch(s.grammar + row);
        touch(s.mask_pos + row);
        touch(s.priority + row);
        touch(s.arrival + row);
    }
    if (threadIdx.x == 0) {
        touch(s.head);
        touch(s.tail);
        touch(s.num_free);
    }
}

// Lets rows go on whose grammar mask has come, and says what the rows need.
DEVICE i32 look_at_rows(const State& s) {
    i32 needs = 0;
    FOR_EACH(row, s.max_rows) {
        if (s.state[row] == BLOCKED && !mask_missing(s, row)) s.state[row] = DECODE;
        if (awaits_release(s, row)) needs |= NEEDS_RELEASE;
        if (is_candidate(s, row)) needs |= NEEDS_ADMISSION;
    }
    return needs;
}

extern "C" __global__ void __launch_bounds__(1024) scheduler_plan(const __grid_constant__ PlanArgs args) {
    // The parts run one after another and share this memory.
    union Parts {
        ReleaseShared release;
        InboxShared inbox;
    };
    __shared__ Scratch scratch;
    __shared__ Parts parts;
    __shared__ AdmitShared admit_shared;
    __shared__ i32 candidates[kMaxCandidates];
    DYNAMIC_SHARED(memory);
    const State& s = args.state;
    RowsShared rows = rows_shared(memory, s.max_rows);
    wait_for_earlier_kernels();
    let_next_kernel_start();
    prefetch(s);
    i32 budget = min(*args.budget, s.max_tokens);
    FOR_EACH(row, s.max_rows + 1) args.plan.admitted[row] = false;
    i32 needs = look_at_rows(s);
    if (__syncthreads_or(has_entry(args.inbox))) {
        apply_inbox(s, scratch, args.inbox, parts.inbox);
        needs = look_at_rows(s);
    }
    bool is_release_pending = false;
    if (__syncthreads_or(needs & NEEDS_RELEASE)) {
        is_release_pending = release(s, scratch, parts.release);
        needs = look_at_rows(s);
    }
    if (__syncthreads_or(needs & NEEDS_ADMISSION)) {
        i32 count = list_candidates(s, scratch, rows, candidates);
        i32 reserve = reserved_pages(s, scratch), want = resident_want(s, scratch);
        admit(s, scratch, admit_shared, candidates, count, reserve, want, budget, args.plan.admitted);
    }
    Grants grants = grant(s, scratch, rows, args.plan, budget);
    if (grants.num_pages) take(s, scratch, rows.row_at, rows.page_start, grants.num_ordered, grants.num_pages);
    i32 victim = choose_victim(s, scratch, rows, grants, is_release_pending);
    compact(s, scratch);
    if (threadIdx.x == 0) {
        *args.plan.victim = victim;
        // The dump row never has tokens.
        args.plan.give[s.max_rows] = 0;
        args.plan.emit[s.max_rows] = false;
        args.plan.rank[s.max_rows] = s.max_rows;
    }
}
