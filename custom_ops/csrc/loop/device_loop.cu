// The two kernels around a captured step that repeats on the device: one sets the number of steps,
// the other decides after each step whether another one follows. What they read of the host stands
// in pinned memory, so the host can end the loop at any time without a call.

typedef long long i64;
typedef unsigned long long u64;

extern "C" __device__ void cudaGraphSetConditional(u64 handle, unsigned value);

// Row states, as in scheduler/state.py.
enum { PREFILL = 2, DECODE = 3, FINISHED = 6 };

// Pinned; the first four are written by the host, the last by the device.
struct LoopControl {
    i64 num_read;        // records the host has read
    i64 is_interrupted;  // the host has something for the device
    i64 has_waiting;     // requests wait for a row or for pages
    i64 max_steps;       // steps of this launch at most
    i64 ended_at;        // step counter when the loop was left; -1 while it runs
};

struct LoopArgs {
    u64 handle;                     // of the WHILE node's condition
    volatile LoopControl* control;  // pinned
    i64* steps_left;
    const signed char* row_state;
    const i64* step_counter;  // steps since the start, incremented by the step itself
    int num_rows;
    int max_unread;  // records the ring holds before the host must have read some
};

extern "C" __global__ void ce_loop_begin(LoopArgs args) {
    *args.steps_left = args.control->max_steps;
}

extern "C" __global__ void ce_loop_next(LoopArgs args) {
    int is_finished = 0, is_running = 0;
    for (int row = threadIdx.x; row < args.num_rows; row += blockDim.x) {
        int state = args.row_state[row];
        is_finished |= state == FINISHED;
        is_running |= state == PREFILL || state == DECODE;
    }
    is_finished = __syncthreads_or(is_finished);
    is_running = __syncthreads_or(is_running);
    if (threadIdx.x != 0) return;
    i64 left = *args.steps_left - 1;
    *args.steps_left = left;
    i64 num_unread = *args.step_counter - args.control->num_read;
    bool goes_on = left > 0 && is_running && !args.control->is_interrupted &&
                   !(is_finished && args.control->has_waiting) && num_unread < args.max_unread;
    if (!goes_on) {
        args.control->ended_at = *args.step_counter;
        __threadfence_system();
    }
    cudaGraphSetConditional(args.handle, goes_on ? 1u : 0u);
}
