// The scheduler's state on the device, and what one block needs to work on it.
//
// One block of up to 1024 threads does all the work of a step, so ordering between threads is
// __syncthreads and nothing else. Everything is integer and every tie is broken by row, page or list
// order: the result does not depend on which thread comes first. No headers: NVRTC has none.
// The structs are mirrored in custom_ops/scheduler_args.py, field by field.
#pragma once

typedef signed char i8;
typedef unsigned short u16;
typedef int i32;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef CUDA_EMULATOR
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#endif

#define DEVICE __device__ __forceinline__

enum RowState : i8 { FREE, WAITING, PREFILL, DECODE, BLOCKED, RETRACTED, FINISHED, ABORTING };

enum ErrorKind {
    ERROR_SUBMIT_TO_USED_ROW,
    ERROR_MASK_WITHOUT_GRAMMAR,
    ERROR_TOKENS_TO_IDLE_ROW,
    ERROR_NO_TOKEN_PAGE,
    ERROR_FORCED_ELSEWHERE,
};

constexpr i64 NO_POSITION = -1;
constexpr u32 FULL = 0xffffffffu;
constexpr i64 MIN_I64 = (i64)(1ull << 63);

// Shapes as in compiled_engine/scheduler/state.py. Rows are [max_rows + 1], the last is the dump row
// of the dense form: kernels neither read nor write it.
struct State {
    i8* state;
    i32* priority;
    i64* arrival;
    i32* gen;
    i64* salt;
    i32* num_prompt;
    i32* max_len;
    bool* grammar;
    i32* score_from;
    i32* num_tokens;
    i32* num_computed;
    i32* mask_pos;
    bool* pub_ok;
    i32* num_cached;
    i32* owned;
    i32* block_table;  // [rows, table_width]
    i32* ref;
    i64* uid;
    i64* parent_uid;
    i32* index_slot;
    i32* page_tokens;  // [num_pages, page_size]
    i32* ring;
    i64* ring_pos;
    i64* head;
    i64* tail;
    i64* uid_next;
    i64* tkey;   // [index_buckets, index_ways]
    i32* tpage;  // the same
    i32* num_free;         // pages with ref 0
    i32* num_free_cached;  // of these, published ones
    i32* token_table;      // [rows, token_table_width]
    i32* token_pages;      // [num_token_pages + 1, token_page_size]
    i64* chain;            // [num_token_pages + 1, token_page_size / page_size]
    i32* free_token_pages;
    i32* num_free_token_pages;
    i64* place_steps;
    i64* num_retractions;
    i32* error;
    i32 max_rows;
    i32 num_pages;
    i32 page_size;
    i32 table_width;
    i32 max_tokens;
    i32 num_candidates;
    i32 max_releases;
    i32 index_buckets;
    i32 index_ways;
    i32 key_bits;
    i32 token_page_size;
    i32 num_token_pages;
    i32 token_table_width;
    i32 ring_size;
    i32 max_publishes;
    i32 prefix_caching;
    i32 vocab_size;
};

// What a step computes; see Plan in compiled_engine/scheduler/plan.py. Rows are [max_rows + 1].
struct PlanOut {
    i32* give;
    bool* emit;
    i32* rank;
    i32* victim;
    bool* admitted;
    i32* num_tokens;
    i32* wanted;
    i32* num_unserved;
};

// ---- Block-wide helpers. All threads of the block call them; all get the result. ----

// Shared memory of the helpers: declare one `__shared__ Scratch scratch;` in the kernel.
struct Scratch {
    i64 partial[32];
    i64 total;
};

DEVICE i32 lane_id() { return threadIdx.x & 31; }
DEVICE i32 warp_id() { return threadIdx.x >> 5; }

// Before anything an earlier kernel wrote is touched; a no-op below sm_90 and in the emulator.
DEVICE void wait_for_earlier_kernels() {
#if !defined(CUDA_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_start() {
#if !defined(CUDA_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Starts a load and does not wait for it: a later one finds the line in the nearest cache.
template <class T>
DEVICE void touch(const T* address) {
#ifndef CUDA_EMULATOR
    u32 ignored;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(ignored) : "l"(address));
#endif
}

// Sum over the block. Two barriers.
template <class T>
DEVICE T block_sum(Scratch& scratch, T value) {
    for (i32 step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(FULL, value, step);
    if (lane_id() == 0) scratch.partial[warp_id()] = value;
    __syncthreads();
    T sum = lane_id() < (i32)(blockDim.x >> 5) ? (T)scratch.partial[lane_id()] : (T)0;
    for (i32 step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL, sum, step);
    __syncthreads();
    return sum;
}

template <class T>
DEVICE T block_max(Scratch& scratch, T value) {
    for (i32 step = 16; step > 0; step >>= 1) {
        T other = __shfl_xor_sync(FULL, value, step);
        value = other > value ? other : value;
    }
    if (lane_id() == 0) scratch.partial[warp_id()] = value;
    __syncthreads();
    T best = (T)scratch.partial[lane_id() < (i32)(blockDim.x >> 5) ? lane_id() : 0];
    for (i32 step = 16; step > 0; step >>= 1) {
        T other = __shfl_xor_sync(FULL, best, step);
        best = other > best ? other : best;
    }
    __syncthreads();
    return best;
}

// Exclusive prefix sum by thread index; `total` becomes the sum over the block. Two barriers.
template <class T>
DEVICE T block_scan(Scratch& scratch, T value, T& total) {
    T inclusive = value;
    for (i32 step = 1; step < 32; step <<= 1) {
        T other = __shfl_up_sync(FULL, inclusive, step);
        if (lane_id() >= step) inclusive += other;
    }
    if (lane_id() == 31) scratch.partial[warp_id()] = inclusive;
    __syncthreads();
    T partial = lane_id() < (i32)(blockDim.x >> 5) ? (T)scratch.partial[lane_id()] : (T)0;
    T warps = partial;
    for (i32 step = 1; step < 32; step <<= 1) {
        T other = __shfl_up_sync(FULL, warps, step);
        if (lane_id() >= step) warps += other;
    }
    total = __shfl_sync(FULL, warps, 31);
    T before = __shfl_sync(FULL, warps - partial, warp_id());
    __syncthreads();
    return before + inclusive - value;
}

// Rank of this thread among those with `flag`, by thread index. Two barriers.
DEVICE i32 block_rank(Scratch& scratch, bool flag, i32& total) {
    u32 votes = __ballot_sync(FULL, flag);
    i32 inside = __popc(votes & ((1u << lane_id()) - 1));
    if (lane_id() == 0) scratch.partial[warp_id()] = __popc(votes);
    __syncthreads();
    i32 partial = lane_id() < (i32)(blockDim.x >> 5) ? (i32)scratch.partial[lane_id()] : 0;
    i32 warps = partial;
    for (i32 step = 1; step < 32; step <<= 1) {
        i32 other = __shfl_up_sync(FULL, warps, step);
        if (lane_id() >= step) warps += other;
    }
    total = __shfl_sync(FULL, warps, 31);
    i32 before = __shfl_sync(FULL, warps - partial, warp_id());
    __syncthreads();
    return before + inside;
}

// The list entry that element `e` of a flat walk belongs to: the last one that starts at or before e.
DEVICE i32 entry_of(const i32* start, i32 count, i32 e) {
    i32 low = 0, high = count;  // the answer is in [low, high)
    while (high - low > 1) {
        i32 middle = (low + high) >> 1;
        if (start[middle] <= e) low = middle;
        else high = middle;
    }
    return low;
}

// Loops over i in [0, count), spread over the block. No barrier.
#define FOR_EACH(i, count) for (i32 i = threadIdx.x; i < (count); i += blockDim.x)
// The same, but every thread of the block makes every turn, so that the body may use barriers; lanes
// past the end have i >= count.
#define FOR_EACH_TURN(i, count) for (i32 i = threadIdx.x, turn_##i = 0; turn_##i < (count); i += blockDim.x, turn_##i += blockDim.x)

// ---- Keys and small state helpers. ----

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;
constexpr u64 PAGE_STEP = 0xD1B54A32D192ED03ull;

DEVICE u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
DEVICE u64 root_sum(i64 salt) { return mix((u64)salt + GOLDEN); }
// What one token at place j of its page adds to the page's content.
DEVICE u64 token_term(i32 token, i32 place) { return mix((u64)(i64)token + (u64)(place + 1) * GOLDEN); }
// What a page with this content sum adds to the chain.
DEVICE u64 page_term(u64 content, i32 page) { return mix(content + (u64)(page + 1) * PAGE_STEP); }
DEVICE u64 page_key(const State& s, u64 chain) {
    u64 key = mix(chain);
    return s.key_bits >= 64 ? key : key & ((1ull << s.key_bits) - 1);
}

DEVICE i32 pages_of(const State& s, i32 tokens) { return (tokens + s.page_size - 1) / s.page_size; }
DEVICE i32 ring_place(const State& s, i64 position) { return (i32)(position & (s.ring_size - 1)); }
DEVICE i64 row_order(const State& s, i32 row) { return ((i64)s.priority[row] << 40) + s.arrival[row]; }
// The row's next token needs a grammar mask that is not here yet.
DEVICE bool mask_missing(const State& s, i32 row) { return s.grammar[row] && s.mask_pos[row] < s.num_tokens[row]; }
DEVICE bool is_resident(i8 state) { return state >= PREFILL && state <= BLOCKED; }
DEVICE bool is_live(i8 state) { return state >= WAITING && state <= RETRACTED; }
// Pages a row is promised: its tokens and one page more, never more than it can fill.
DEVICE i32 target_pages(const State& s, i32 row) {
    i32 tokens = s.num_tokens[row] + s.page_size, most = s.max_len[row] - 1;
    return pages_of(s, tokens < most ? tokens : most);
}
