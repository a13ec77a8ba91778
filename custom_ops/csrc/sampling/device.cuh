// What the sampling kernel needs of the machine: clusters of blocks, order of floats, packed maxima.
// No headers: NVRTC has none. A test that runs the kernel on a CPU brings its own spelling of the
// first part.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

#ifndef KIND
#define KIND 1  // of the logits: 0 fp32, 1 bf16, 2 fp16
#endif
#ifndef CLUSTER
#define CLUSTER 8  // blocks that share a row
#endif
#ifndef BLOCK
#define BLOCK 1024  // threads of a block
#endif
#ifndef RESIDENT
#define RESIDENT 1  // blocks a multiprocessor, for which registers are left
#endif
#ifndef LOG_BINS
#define LOG_BINS 9  // of a histogram
#endif

constexpr u32 FULL = 0xffffffffu;
constexpr i32 WARPS = BLOCK / 32;
constexpr i32 BINS = 1 << LOG_BINS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.3895313892515355e38f;  // what -inf counts as: the lowest bf16 value
constexpr float SCALED_LOWEST = -1.0e30f;          // scaled logits below this are equal
static_assert(BLOCK >= BINS && BLOCK % 32 == 0 && CLUSTER <= 16 && LOG_BINS >= 6, "sizes");

#ifndef CUDA_EMULATOR

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#define CLUSTER_SIZE __cluster_dims__(CLUSTER, 1, 1)

struct __align__(16) Quad {
    u32 x[4];
};

DEVICE i32 block_thread() { return (i32)threadIdx.x; }
DEVICE i32 cluster_index() { return (i32)(blockIdx.x / CLUSTER); }
DEVICE i32 num_clusters() { return (i32)(gridDim.x / CLUSTER); }
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The same place in the shared memory of a block of the cluster.
template <class T> DEVICE T* peer(T* place, u32 rank) {
    u64 address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"((u64)place), "r"(rank));
    return (T*)address;
}
DEVICE void block_sync() { __syncthreads(); }
DEVICE void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float widen_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

#endif

DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Unsigned integers of the order of floats; no NaN.
DEVICE u32 order_of(float x) {
    u32 bits = (u32)__float_as_int(x);
    return bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
}
DEVICE float value_of(u32 order) { return __int_as_float((i32)(order & 0x80000000u ? order ^ 0x80000000u : ~order)); }

// A value and an id such that the maximum is the largest value's, and of equal ones the lowest id's.
DEVICE u64 packed(float x, i32 id) { return (u64)order_of(x + 0.0f) << 32 | (u32)~id; }
DEVICE float packed_value(u64 pair) { return value_of((u32)(pair >> 32)); }
DEVICE i32 packed_id(u64 pair) { return (i32)~(u32)pair; }

// A row that holds a NaN: larger than every other pair, and its id is -1, which is no token.
constexpr u64 NAN_PAIR = 0xffffffff00000000ull;

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// Largest of a warp, in every lane.
DEVICE u64 warp_largest(u64 mine) {
#pragma unroll
    for (i32 bits = 16; bits; bits >>= 1) mine = larger(mine, __shfl_xor_sync(FULL, mine, bits));
    return mine;
}
