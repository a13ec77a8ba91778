// Products of the tensor cores of Hopper: both operands in shared memory, sums in registers. Made of
// rows of 64 columns of 16 bits, 128 bytes each, in the 128-byte swizzle that copies write.
#pragma once
#include "args.cuh"

// Describes rows from `address` on to the tensor cores: 8 rows are 1024 bytes, the start is in units
// of 16 bytes. 16 columns further is 2 more.
DEVICE u64 describe_rows(u32 address) {
    constexpr u64 one = 1, group = 1024 / 16, swizzle_128 = 1;
    return swizzle_128 << 62 | group << 32 | one << 16 | (address & 0x3ffff) >> 4;
}

#ifndef CUDA_EMULATOR
DEVICE void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups of this warp's products are unfinished.
template <int N> DEVICE void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Keeps what reads finished sums behind the wait for them.
DEVICE void settle(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

#if HALF
#define OPERANDS ".f32.f16.f16 "
#else
#define OPERANDS ".f32.bf16.bf16 "
#endif
#define EIGHT(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])

// sums [64 rows, N tokens] += a [64, 16] b [N, 16]^T; the first product of a sum does not add. A thread holds values 4 j to 4 j + 3 of tokens
// 8 j + 2 * (lane % 4) and the next one, in rows 16 * warp + lane / 4 and 8 further.
DEVICE void add_product(float (&c)[8], u64 a, u64 b, i32 adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16" OPERANDS
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, adds, 1, 1, 0, 0;\n}"
        : EIGHT(c, 0)
        : "l"(a), "l"(b), "r"(adds));
}
DEVICE void add_product(float (&c)[16], u64 a, u64 b, i32 adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16" OPERANDS
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, adds, 1, 1, 0, 0;\n}"
        : EIGHT(c, 0), EIGHT(c, 8)
        : "l"(a), "l"(b), "r"(adds));
}
DEVICE void add_product(float (&c)[32], u64 a, u64 b, i32 adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16" OPERANDS
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, adds, 1, 1, 0, 0;\n}"
        : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24)
        : "l"(a), "l"(b), "r"(adds));
}
DEVICE void add_product(float (&c)[48], u64 a, u64 b, i32 adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16" OPERANDS
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, adds, 1, 1, 0, 0;\n}"
        : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24), EIGHT(c, 32), EIGHT(c, 40)
        : "l"(a), "l"(b), "r"(adds));
}
DEVICE void add_product(float (&c)[64], u64 a, u64 b, i32 adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16" OPERANDS
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, adds, 1, 1, 0, 0;\n}"
        : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24), EIGHT(c, 32), EIGHT(c, 40), EIGHT(c, 48), EIGHT(c, 56)
        : "l"(a), "l"(b), "r"(adds));
}
#endif
