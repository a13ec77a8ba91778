// The machine of csrc/sampling/device.cuh for a CPU, on top of cuda_emulator.h. A cluster is emulated
// as one block of CLUSTER * BLOCK fibers; each of its blocks has its own part of shared memory and
// its own barrier, and some run behind the others, so that a missing barrier of the cluster shows.
#pragma once
#include <math.h>

#undef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) char* name = emulator::dynamic_memory + cluster_rank() * emulator::kBlockBytes
#define CLUSTER_SIZE

struct __align__(16) Quad {
    unsigned x[4];
};

namespace emulator {

constexpr int kBlockBytes = kMaxDynamicShared / CLUSTER / 16 * 16, kMaxSpins = 1 << 20;

struct Barrier {
    int arrived;
    unsigned generation;
};
static Barrier block_barriers[CLUSTER], cluster_barrier;
static unsigned phases[kMaxThreads];  // of the cluster's barrier, when a thread arrived

static unsigned arrive(Barrier& barrier, int count) {
    const unsigned phase = barrier.generation;
    if (++barrier.arrived == count) barrier.arrived = 0, barrier.generation++;
    return phase;
}
static void wait(const Barrier& barrier, unsigned phase) {
    for (int i = 0; *(volatile const unsigned*)&barrier.generation == phase; i++) {
        if (i == kMaxSpins) fail("thread %d waits for ever", current->thread.x);
        yield();
    }
}

}  // namespace emulator

static int block_thread() { return threadIdx.x % BLOCK; }
static unsigned cluster_rank() { return threadIdx.x / BLOCK; }
static int cluster_index() { return blockIdx.x; }
static int num_clusters() { return gridDim.x; }
template <class T> static T* peer(T* place, unsigned rank) {
    return (T*)((char*)place + ((int)rank - (int)cluster_rank()) * emulator::kBlockBytes);
}
static void block_sync() {
    emulator::Barrier& barrier = emulator::block_barriers[cluster_rank()];
    emulator::wait(barrier, emulator::arrive(barrier, BLOCK));
    for (int i = 0; i < 8 * ((cluster_rank() + cluster_index()) % CLUSTER); i++) emulator::yield();
}
static void cluster_arrive() {
    emulator::phases[threadIdx.x] = emulator::arrive(emulator::cluster_barrier, CLUSTER * BLOCK);
}
static void cluster_wait() { emulator::wait(emulator::cluster_barrier, emulator::phases[threadIdx.x]); }
static void let_next_start() {}
static void wait_for_previous() {}

static float power_of_two(float x) { return exp2f(x); }
static float widen_half(unsigned short bits) { return (float)emulator::from_bits<_Float16>(bits); }
static float __int_as_float(int bits) { return emulator::from_bits<float>((unsigned)bits); }
static int __float_as_int(float x) { return (int)emulator::to_bits(x); }
static double __longlong_as_double(long long bits) { return emulator::from_bits<double>(bits); }
static float __fmul_rn(float x, float y) { return x * y; }
static float __fsub_rn(float x, float y) { return x - y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __frcp_rn(float x) { return 1.0f / x; }
static float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
