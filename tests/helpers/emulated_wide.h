// The machine of csrc/gemm_wide for a CPU, on top of emulated_boxes.h. Products read shared memory only
// when they are waited for.
#pragma once
#include "emulated_boxes.h"

namespace emulator {

struct Deferred {
    float* sums;
    int tokens;
    unsigned long long a, b;
    bool adds;
    int group;
};
static std::vector<Deferred> deferred[kMaxThreads];
static int groups[kMaxThreads];

static void begin_group() {
    for (auto& list : deferred) list.clear();
    memset(groups, 0, sizeof groups);
}
static float value_at(unsigned long long description, int row, int k) {
    if (description >> 62 != 1 || (description >> 32 & 0x3fff) != 64) fail("rows are described wrongly");
    unsigned start = (description & 0x3fff) << 4;
    unsigned address = swizzled(start + row / 8 * 1024 + row % 8 * 128 + k * 2);
    unsigned short bits;
    memcpy(&bits, group_memory[rank()] + address, 2);
    return widen(bits);
}
static void run_deferred(const Deferred& product) {
    int warp = current->thread.x % threads_of_block / 32 % 4, lane = current->thread.x % 32;
    for (int i = 0; i < product.tokens / 2; i++) {
        int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = product.adds ? product.sums[i] : 0.0f;
        for (int k = 0; k < 16; k++) sum += value_at(product.a, row, k) * value_at(product.b, token, k);
        product.sums[i] = sum;
    }
}

}  // namespace emulator

static void wait_barrier(unsigned barrier, unsigned parity) {
    while (emulator::barrier_at(barrier).phase == parity) emulator::poll(__LINE__);
}
static void copy_rows(unsigned target, const TensorMap& map, unsigned barrier, int column, int row) {
    emulator::start_copy(map, target, barrier, {column, row, 0, 0});
}
static void copy_groups(unsigned target, const TensorMap& map, unsigned barrier, int column, int group) {
    emulator::start_copy(map, target, barrier, {column, 0, 0, group});
}
static void copy_tokens(unsigned target, const TensorMap& map, unsigned barrier, int column) {
    emulator::start_copy(map, target, barrier, {column, 0, 0, 0});
}
static void order_copies() {}
struct Patience {
    void wait() { emulator::poll(__LINE__); }
};
static void start_products() {}
static void commit_products() { emulator::groups[emulator::current->thread.x]++; }
template <int N> static void add_product(float (&sums)[N], unsigned long long a, unsigned long long b, int adds) {
    int thread = emulator::current->thread.x;
    emulator::deferred[thread].push_back({sums, 2 * N, a, b, adds != 0, emulator::groups[thread]});
}
template <int N> static void wait_products() {
    int thread = emulator::current->thread.x;
    std::vector<emulator::Deferred> kept;
    for (const emulator::Deferred& product : emulator::deferred[thread]) {
        if (product.group < emulator::groups[thread] - N) emulator::run_deferred(product);
        else kept.push_back(product);
    }
    emulator::deferred[thread] = kept;
    __syncwarp();  // a warp waits as one
}
static void settle(float&) {}
