// The machine of csrc/gemm_mma for a CPU, on top of emulated_boxes.h. Copies by a thread are late as well.
#pragma once
#include "emulated_boxes.h"

namespace emulator {

struct Meeting {
    int arrived;
    unsigned generation;
};
static Meeting block_meetings[kMaxGroup];
static unsigned arrived_at[kMaxThreads];

static void arrive_meeting(Meeting& meeting, int count) {
    arrived_at[current->thread.x] = meeting.generation;
    if (++meeting.arrived == count) meeting.arrived = 0, meeting.generation++;
}
static void wait_meeting(Meeting& meeting, int line) {
    while (meeting.generation == arrived_at[current->thread.x]) poll(line);
}

struct LateCopies {
    unsigned barrier;
    std::vector<Copy> copies;
};
static std::vector<LateCopies> late_copies;

static void end_late_copies(int i) {
    LateCopies late = late_copies[i];
    late_copies.erase(late_copies.begin() + i);
    for (const Copy& copy : late.copies) {
        memset(copy.target, 0, 16);
        memcpy(copy.target, copy.source, copy.bytes);
    }
    arrive_once(late.barrier);
}

static void begin_group() { memset(block_meetings, 0, sizeof block_meetings); }

}  // namespace emulator

static void sync_first(int count) {
    emulator::Meeting& meeting = emulator::block_meetings[emulator::rank()];
    emulator::arrive_meeting(meeting, count);
    emulator::wait_meeting(meeting, __LINE__);
}
static void arrive_after_copies(unsigned barrier) {
    int thread = emulator::current->thread.x;
    emulator::Copy* first = emulator::copies[thread];
    emulator::late_copies.push_back({barrier, {first, first + emulator::num_copies[thread]}});
    emulator::num_copies[thread] = 0;
}
static void wait_at(unsigned barrier, unsigned parity) {
    while (emulator::barrier_at(barrier).phase == parity) {
        int count = emulator::late_copies.size();
        if (count && emulator::random_number() % 4 == 0) emulator::end_late_copies(emulator::random_number() % count);
        else emulator::poll(__LINE__);
    }
}
static void copy_box(unsigned target, const TensorMap& map, unsigned barrier, int column, int row, int slab) {
    emulator::start_copy(map, target, barrier, {column, row, 0, slab});
}
static unsigned multiply_pairs(unsigned a, unsigned b) {
    float low = emulator::widen((unsigned short)a) * emulator::widen((unsigned short)b);
    float high = emulator::widen((unsigned short)(a >> 16)) * emulator::widen((unsigned short)(b >> 16));
    return pack(low, high);
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
