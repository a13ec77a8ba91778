// What csrc/gemm_mma and csrc/gemm_wide need of a Hopper chip, for a CPU, on top of cuda_emulator.h and
// emulated_matrix.h: barriers in shared memory and boxes that are copied to them. The blocks of a group
// run side by side, as one block of the emulator. A copy fills its target with NaN at once and with the
// values at some later time before its barrier is told. So a missing wait, or a stage given back too
// early, shows in the result.
#pragma once
#include <map>
#include <vector>

#define TILED_SHARED(name) char* name = emulator::group_memory[emulator::rank()]
#undef threadIdx
#undef blockIdx
#undef gridDim
#define threadIdx (emulator::thread_of_block())
#define blockIdx (emulator::block_of_grid())
#define gridDim (emulator::blocks_of_grid())

struct TensorMap;

namespace emulator {

constexpr int kMaxGroup = 8, kMaxPolls = 20000000, kRankShift = 20;

struct Barrier {
    int count, pending;
    long long bytes;
    unsigned phase;
};
// What a TensorMap holds here; innermost dim first.
struct Boxes {
    unsigned long long address;
    unsigned long long strides[4];
    int rank;
    int sizes[4], box[4];
};
struct BoxCopy {
    const Boxes* boxes;
    unsigned target, barrier;  // with the rank of the block
    int place[4];
};

static int threads_of_block = 32, group_size = 1, last_group, num_polls;
alignas(1024) static char group_memory[kMaxGroup][kMaxDynamicShared];
static std::map<unsigned, Barrier> barriers;
static std::vector<BoxCopy> box_copies;

static void begin_group();  // the machine's own state as it is at first
static int rank() { return current->thread.x / threads_of_block; }
static dim3 thread_of_block() { return {current->thread.x % threads_of_block, 0, 0}; }
static dim3 block_of_grid() { return {block_index.x * group_size + rank(), 0, 0}; }
static dim3 blocks_of_grid() { return {grid_size.x * group_size, 1, 1}; }
static char* memory_at(unsigned address) {
    return group_memory[address >> kRankShift] + (address & ((1u << kRankShift) - 1));
}
static unsigned swizzled(unsigned address) { return address ^ ((address >> 7 & 7) << 4); }

// Nothing may be left over from the group before, and the first thread of the next one starts afresh.
static void check_end() {
    if (!box_copies.empty()) fail("%d copies were never waited for", (int)box_copies.size());
    for (auto& entry : barriers)
        if (entry.second.bytes) fail("a barrier waits for %d more bytes", (int)entry.second.bytes);
}
static void enter() {
    if (last_group == (int)block_index.x) return;
    check_end();
    last_group = block_index.x;
    barriers.clear();
    memset(group_memory, 0xff, sizeof group_memory);
    begin_group();
    num_polls = 0;
}

static void check_alive(unsigned address) {
    int first = (address >> kRankShift) * threads_of_block;
    for (int i = 0; i < threads_of_block; i++)
        if (fibers[first + i].wait != kDone) return;
    fail("block %d of a group is reached after its end", address >> kRankShift);
}
static Barrier& barrier_at(unsigned address) {
    check_alive(address);
    auto found = barriers.find(address);
    if (found == barriers.end()) fail("a barrier at %d was not made", (int)(address & 0xfffff));
    return found->second;
}
static void settle_phase(Barrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
}
static void arrive_once(unsigned address) {
    Barrier& barrier = barrier_at(address);
    if (barrier.pending-- == 0) fail("more arrivals than a phase has");
    settle_phase(barrier);
}

// Calls `visit(place in shared memory, address or 0 outside of the tensor)` for 2 bytes each.
template <class F> static void for_each_value(const BoxCopy& copy, F visit) {
    const Boxes& m = *copy.boxes;
    int box[4] = {1, 1, 1, 1}, at[4];
    for (int i = 0; i < m.rank; i++) box[i] = m.box[i];
    unsigned offset = 0;
    for (at[3] = 0; at[3] < box[3]; at[3]++)
        for (at[2] = 0; at[2] < box[2]; at[2]++)
            for (at[1] = 0; at[1] < box[1]; at[1]++)
                for (at[0] = 0; at[0] < box[0]; at[0]++, offset += 2) {
                    unsigned long long address = m.address;
                    bool is_inside = true;
                    for (int i = 0; i < m.rank; i++) {
                        int place = copy.place[i] + at[i];
                        is_inside &= place >= 0 && place < m.sizes[i];
                        address += place * (i ? m.strides[i - 1] : 2);
                    }
                    visit(memory_at(swizzled(copy.target + offset)), is_inside ? address : 0);
                }
}
static void start_copy(const TensorMap& map, unsigned target, unsigned barrier, const int (&place)[4]) {
    BoxCopy copy = {(const Boxes*)&map, target, barrier, {place[0], place[1], place[2], place[3]}};
    barrier_at(barrier);
    for_each_value(copy, [](char* shared, unsigned long long) { memset(shared, 0xff, 2); });
    box_copies.push_back(copy);
}
static void end_copy(const BoxCopy& copy) {
    int bytes = 0;
    for_each_value(copy, [&](char* shared, unsigned long long address) {
        unsigned short value = 0;
        if (address) memcpy(&value, (const char*)address, 2);
        memcpy(shared, &value, 2);
        bytes += 2;
    });
    Barrier& barrier = barrier_at(copy.barrier);
    barrier.bytes -= bytes;
    settle_phase(barrier);
}
// Lets others run, and now and then ends a copy, any of those on their way.
static void poll(int line) {
    if (++num_polls > kMaxPolls) fail("thread %d waits for ever at line %d", current->thread.x, line);
    if (!box_copies.empty() && random_number() % 64 == 0) {
        int i = random_number() % box_copies.size();
        BoxCopy copy = box_copies[i];
        box_copies.erase(box_copies.begin() + i);
        end_copy(copy);
    }
    yield();
}
}  // namespace emulator

static unsigned shared_address(const void* p) {
    return emulator::rank() << emulator::kRankShift | (unsigned)((const char*)p - emulator::group_memory[emulator::rank()]);
}
static void init_barrier(unsigned barrier, int count) { emulator::barriers[barrier] = {count, count, 0, 0}; }
static void publish_barriers() {}
static void expect_bytes(unsigned barrier, int bytes) {
    emulator::barrier_at(barrier).bytes += bytes;
    emulator::arrive_once(barrier);
}
static void arrive_barrier(unsigned barrier) { emulator::arrive_once(barrier); }
static void prefetch_map(const TensorMap&) {}
static unsigned load_fresh_half(const char* p) { return *(const unsigned short*)p; }
static float widen(unsigned bits) { return emulator::widen((unsigned short)bits); }

static int run_groups(
    void (*call)(const void*), const void* args, int groups, int group_size, int threads, unsigned order) {
    emulator::threads_of_block = threads, emulator::group_size = group_size;
    emulator::last_group = -1;
    emulator::box_copies.clear(), emulator::barriers.clear();
    if (emulator::run(call, args, groups, threads * group_size, order)) return 1;
    if (setjmp(emulator::main_context)) return 1;
    emulator::check_end();
    return 0;
}
