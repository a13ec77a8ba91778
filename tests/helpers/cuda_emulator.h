// Runs CUDA kernels on the CPU, for tests: every thread of a block is a fiber, blocks run one after
// another. Fibers switch only at barriers and warp primitives, in an order the caller chooses, so a
// run can be repeated. A missing barrier shows as a result that depends on the order; threads that
// wait at different barriers, or never arrive, end the run with a message.
//
// Rules for kernels: warp primitives with the full mask by all 32 lanes; block sizes are multiples of 32;
// no `__shared__` inside templates; dynamic shared memory by DYNAMIC_SHARED; one struct as the only argument.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define CUDA_EMULATOR 1
#define __global__
#define __device__ static
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emulated_shared")))

struct dim3 { unsigned x, y, z; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(16) longlong2 { long long x, y; };

extern "C" char __start_emulated_shared[] __attribute__((weak));
extern "C" char __stop_emulated_shared[] __attribute__((weak));

namespace emulator {

constexpr int kMaxThreads = 1024, kStackBytes = 96 * 1024, kMaxDynamicShared = 232448;
enum Wait { kReady, kBlock, kWarp, kDone };

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool is_started;
    Wait wait;
    unsigned generation;  // of what it waits for, when it began to wait
    int tag;              // line of the barrier it waits at
    dim3 thread;
};
struct Warp {
    unsigned generation;
    int arrived, tag;
    unsigned long long values[2][32];
};

static Fiber fibers[kMaxThreads];
static Warp warps[kMaxThreads / 32];
static Fiber* current;
static jmp_buf main_context;
static char* stacks;
static char message[512];
static dim3 block_index, block_size, grid_size;
static unsigned block_generation;
static int block_arrived, block_tag;
static unsigned order_state;
static long long block_sum, block_result;
static bool block_and, block_or;
static void (*kernel_call)(const void*);
static const void* kernel_args;
alignas(16) static char dynamic_memory[kMaxDynamicShared];

static void fail(const char* text, int a = 0, int b = 0, int c = 0) {
    if (!message[0]) snprintf(message, sizeof message, text, a, b, c);
    _longjmp(main_context, 1);
}

static __attribute__((noinline)) void yield() {
    if (!_setjmp(current->here)) _longjmp(main_context, 1);
}

static void fiber_main() {
    kernel_call(kernel_args);
    if (block_arrived) fail("thread %d returned while others wait at the barrier of line %d", current->thread.x, block_tag);
    current->wait = kDone;
    _longjmp(main_context, 1);
}

// Waits for the whole block; `value` is summed, anded and ored over it.
static __attribute__((noinline)) void sync_block(int line, long long value) {
    if (block_arrived && block_tag != line) fail("thread %d is at the barrier of line %d, others at line %d", current->thread.x, line, block_tag);
    if (!block_arrived) block_sum = 0, block_and = true, block_or = false;
    block_tag = line;
    block_sum += value != 0, block_and &= value != 0, block_or |= value != 0;
    if (++block_arrived == (int)block_size.x) {
        block_arrived = 0;
        block_generation++;
        block_result = block_sum | ((long long)block_and << 32) | ((long long)block_or << 33);
        return;
    }
    current->wait = kBlock, current->tag = line, current->generation = block_generation;
    yield();
}

// Exchanges one value a lane over the warp; returns the lanes' values.
static __attribute__((noinline)) const unsigned long long* sync_warp(int line, unsigned mask, unsigned long long value) {
    if (mask != 0xffffffffu) fail("a warp primitive of line %d has a partial mask", line);
    Warp& warp = warps[current->thread.x / 32];
    if (warp.arrived && warp.tag != line) fail("thread %d is at the warp primitive of line %d, others at line %d", current->thread.x, line, warp.tag);
    warp.tag = line;
    unsigned generation = warp.generation;
    warp.values[generation & 1][current->thread.x % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
    } else {
        current->wait = kWarp, current->tag = line, current->generation = generation;
        yield();
    }
    return warp.values[generation & 1];
}

static bool can_run(const Fiber& fiber) {
    if (fiber.wait == kBlock) return fiber.generation != block_generation;
    if (fiber.wait == kWarp) return fiber.generation != warps[fiber.thread.x / 32].generation;
    return fiber.wait == kReady;
}

static void resume(Fiber& fiber) {
    current = &fiber;
    fiber.wait = kReady;
    if (_setjmp(main_context)) return;
    if (fiber.is_started) _longjmp(fiber.here, 1);
    fiber.is_started = true;
    setcontext(&fiber.start);
}

static unsigned random_number() {
    order_state = order_state * 1664525u + 1013904223u;
    return order_state >> 8;
}

static bool run_block(int order) {
    int count = block_size.x;
    memset(__start_emulated_shared, 0xA5, __stop_emulated_shared - __start_emulated_shared);
    memset(dynamic_memory, 0xA5, sizeof dynamic_memory);
    memset(warps, 0, sizeof warps);
    block_arrived = 0;
    static int turn[kMaxThreads];
    for (int i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        fiber.is_started = false;
        fiber.wait = kReady;
        fiber.thread = {(unsigned)i, 0, 0};
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stacks + (size_t)i * kStackBytes;
        fiber.start.uc_stack.ss_size = kStackBytes;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
        turn[i] = order == 1 ? count - 1 - i : i;
    }
    for (;;) {
        if (order > 1)
            for (int i = count - 1; i > 0; i--) {
                int j = random_number() % (i + 1), kept = turn[i];
                turn[i] = turn[j], turn[j] = kept;
            }
        int num_done = 0, num_resumed = 0;
        for (int i = 0; i < count; i++) {
            Fiber& fiber = fibers[turn[i]];
            num_done += fiber.wait == kDone;
            if (!can_run(fiber)) continue;
            num_resumed++;
            resume(fiber);
            if (message[0]) return false;
        }
        if (num_done == count) return true;
        if (num_resumed) continue;
        for (int i = 0; i < count; i++)
            if (fibers[i].wait != kDone) {
                snprintf(message, sizeof message, "deadlock: thread %d waits at line %d (%s), %d of %d at the block barrier of line %d",
                         i, fibers[i].tag, fibers[i].wait == kBlock ? "block" : "warp", block_arrived, count, block_tag);
                return false;
            }
    }
}

static int wrong_size(const char* name, size_t have, size_t want) {
    snprintf(message, sizeof message, "%s has %d bytes, not %d", name, (int)have, (int)want);
    return 1;
}

// Returns 0, or 1 with a message.
static int run(void (*call)(const void*), const void* args, unsigned grid, unsigned block, unsigned order) {
    message[0] = 0;
    if (block == 0 || block > kMaxThreads || block % 32) {
        snprintf(message, sizeof message, "%u threads a block", block);
        return 1;
    }
    if (!stacks) stacks = (char*)malloc((size_t)kMaxThreads * kStackBytes);
    kernel_call = call, kernel_args = args;
    grid_size = {grid, 1, 1}, block_size = {block, 1, 1};
    order_state = order;
    for (unsigned i = 0; i < grid; i++) {
        block_index = {order == 1 ? grid - 1 - i : i, 0, 0};
        if (!run_block(order)) return 1;
    }
    return 0;
}

template <class T> static inline unsigned long long to_bits(T value) {
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> static inline T from_bits(unsigned long long bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> static inline T shuffle(int line, unsigned mask, T value, int lane, bool keeps) {
    const unsigned long long* values = sync_warp(line, mask, to_bits(value));
    return keeps || lane < 0 || lane > 31 ? value : from_bits<T>(values[lane]);
}
static inline unsigned ballot(int line, unsigned mask, bool flag) {
    const unsigned long long* values = sync_warp(line, mask, flag);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)(values[i] != 0) << i;
    return bits;
}
template <class T> static inline unsigned match_any(int line, unsigned mask, T value) {
    unsigned long long mine = to_bits(value);
    const unsigned long long* values = sync_warp(line, mask, mine);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)(values[i] == mine) << i;
    return bits;
}
template <class T, class F> static inline T reduce(int line, unsigned mask, T value, F combine) {
    const unsigned long long* values = sync_warp(line, mask, to_bits(value));
    T result = from_bits<T>(values[0]);
    for (int i = 1; i < 32; i++) result = combine(result, from_bits<T>(values[i]));
    return result;
}
static inline int lane() { return current->thread.x % 32; }

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)
#define DYNAMIC_SHARED(name) char* name = emulator::dynamic_memory

#define __syncthreads() emulator::sync_block(__LINE__, 0)
#define __syncthreads_count(p) (emulator::sync_block(__LINE__, (p) ? 1 : 0), (int)(emulator::block_result & 0xffff))
#define __syncthreads_and(p) (emulator::sync_block(__LINE__, (p) ? 1 : 0), (int)(emulator::block_result >> 32 & 1))
#define __syncthreads_or(p) (emulator::sync_block(__LINE__, (p) ? 1 : 0), (int)(emulator::block_result >> 33 & 1))
#define __syncwarp(...) ((void)emulator::sync_warp(__LINE__, 0xffffffffu, 0))
#define __shfl_sync(mask, v, source) emulator::shuffle(__LINE__, mask, v, (source) & 31, false)
#define __shfl_xor_sync(mask, v, bits) emulator::shuffle(__LINE__, mask, v, emulator::lane() ^ (bits), false)
#define __shfl_up_sync(mask, v, delta) emulator::shuffle(__LINE__, mask, v, emulator::lane() - (int)(delta), false)
#define __shfl_down_sync(mask, v, delta) emulator::shuffle(__LINE__, mask, v, emulator::lane() + (int)(delta), false)
#define __ballot_sync(mask, p) emulator::ballot(__LINE__, mask, p)
#define __any_sync(mask, p) (emulator::ballot(__LINE__, mask, p) != 0)
#define __all_sync(mask, p) (emulator::ballot(__LINE__, mask, p) == 0xffffffffu)
#define __match_any_sync(mask, v) emulator::match_any(__LINE__, mask, v)
#define __reduce_add_sync(mask, v) emulator::reduce(__LINE__, mask, v, [](auto a, auto b) { return a + b; })
#define __reduce_min_sync(mask, v) emulator::reduce(__LINE__, mask, v, [](auto a, auto b) { return a < b ? a : b; })
#define __reduce_max_sync(mask, v) emulator::reduce(__LINE__, mask, v, [](auto a, auto b) { return a > b ? a : b; })
#define __reduce_or_sync(mask, v) emulator::reduce(__LINE__, mask, v, [](auto a, auto b) { return a | b; })

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
template <class T> static inline T __ldg(const T* p) { return *p; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }

template <class T> static inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
template <class T> static inline T atomicSub(T* p, T v) { T old = *p; *p = old - v; return old; }
template <class T> static inline T atomicMax(T* p, T v) { T old = *p; if (v > old) *p = v; return old; }
template <class T> static inline T atomicMin(T* p, T v) { T old = *p; if (v < old) *p = v; return old; }
template <class T> static inline T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <class T> static inline T atomicAnd(T* p, T v) { T old = *p; *p = old & v; return old; }
template <class T> static inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
template <class T> static inline T atomicCAS(T* p, T c, T v) { T old = *p; if (old == c) *p = v; return old; }

extern "C" const char* emulator_message() { return emulator::message; }
