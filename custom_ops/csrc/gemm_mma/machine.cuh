// What a product for few tokens needs of a Hopper chip: barriers in shared memory and maps of the tensor
// memory accelerator. A test that runs the kernel on a CPU brings its own spelling of these.
#pragma once
#include "attention/device.cuh"

// What `cuTensorMapEncodeTiled` makes.
struct __align__(64) TensorMap {
    u64 opaque[16];
};

#ifndef CUDA_EMULATOR
// Shared memory in which swizzled tiles lie at multiples of 1024 bytes.
#define TILED_SHARED(name) extern __shared__ __align__(1024) char name[]

constexpr u64 EVICT_FIRST = 0x12f0000000000000ull;  // of second-level cache lines that are read once

DEVICE void init_barrier(u32 barrier, i32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes barriers known to copies.
DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The one arrival of a phase that also ends with `bytes` copied.
DEVICE void expect_bytes(u32 barrier, i32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void arrive_barrier(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity.
DEVICE void wait_barrier(u32 barrier, u32 parity) {
    u32 is_over = 0;
    while (!is_over)
        asm volatile(
            "{\n"
            ".reg .pred is_over;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%1], %2;\n"
            "selp.u32 %0, 1, 0, is_over;\n"
            "}"
            : "=r"(is_over)
            : "r"(barrier), "r"(parity)
            : "memory");
}

DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A barrier of the first `count` threads of a block.
DEVICE void sync_first(i32 count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }

// One value of 16 bits, past the first-level cache.
DEVICE u32 load_fresh_half(const char* p) {
    unsigned short result;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(result) : "l"(p) : "memory");
    return result;
}

// A value of 16 bits as a number.
DEVICE float widen(u32 bits) {
#if HALF
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"((unsigned short)bits));
    return result;
#else
    return __uint_as_float(bits << 16);
#endif
}
#endif
