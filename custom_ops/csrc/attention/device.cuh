// What the attention kernels need of the machine: copies, matrix products, ordering. No headers:
// NVRTC has none. A test that runs the kernels on a CPU brings its own spelling of these.
#pragma once

typedef int i32;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 FULL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1.0e30f;  // below every score; not infinite, so differences are numbers

#ifndef CUDA_EMULATOR
#define METHOD __device__ __forceinline__  // of a struct

// Four 8x8 matrices of 16-bit values, each spread over a warp.
struct Quad {
    u32 x[4];
};
struct __align__(16) Float4 {
    float x[4];
};

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) char name[]
#define NEGATIVE_INFINITY __int_as_float((i32)0xff800000u)

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Starts to copy 16 bytes to shared memory: `bytes` (0 or 16) from global memory, the rest zeros.
DEVICE void copy_async(char* shared, const char* global, i32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

// How long the second-level cache keeps what is copied: as long as usual, or it is the first to go.
DEVICE u64 cache_policy(bool is_read_again) {
    u64 usual, first;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(usual));
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    return is_read_again ? usual : first;
}

// The same as `copy_async`, with a policy.
DEVICE void copy_async(char* shared, const char* global, i32 bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "l"(policy)
                 : "memory");
}

// Ends a group of copies of this thread.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N groups of this thread are unfinished.
template <int N> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Lane l names row l % 8 (16 bytes) of matrix l / 8. Lane l gets values 2 * (l % 4) and the next one
// of row l / 4 of each.
DEVICE Quad load_matrices(const char* row) {
    Quad m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x[0]), "=r"(m.x[1]), "=r"(m.x[2]), "=r"(m.x[3])
                 : "r"(shared_address(row))
                 : "memory");
    return m;
}

// The same, each matrix transposed.
DEVICE Quad load_matrices_transposed(const char* row) {
    Quad m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x[0]), "=r"(m.x[1]), "=r"(m.x[2]), "=r"(m.x[3])
                 : "r"(shared_address(row))
                 : "memory");
    return m;
}

// A matrix in registers, transposed.
DEVICE u32 transpose_matrix(u32 values) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(values));
    return result;
}

// c [16, 8] += a [16, 16] b [16, 8].
DEVICE void multiply(float (&c)[4], const Quad& a, u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to 16 bits, the first in the lower half.
DEVICE u32 pack(float first, float second) {
    u32 result;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
#endif
    return result;
}

#if QUANTIZED
// Two 16-bit numbers over a scale, as 8-bit floats.
DEVICE u32 quantize_pair(u32 pair, float inverse) {
    float first, second;
#if HALF
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(first), "=f"(second)
        : "r"(pair));
#else
    first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xffff0000u);
#endif
    unsigned short bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(bytes)
        : "f"(second * inverse), "f"(first * inverse));
    return bytes;
}

// Two pairs of `pack`, the first in the lower half.
DEVICE u32 quantize_four(u32 low, u32 high, float scale) {
    float inverse = __frcp_rn(scale);
    return quantize_pair(low, inverse) | quantize_pair(high, inverse) << 16;
}
#endif

DEVICE float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float log_of_two(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

DEVICE float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Loads past the first-level cache, which may hold what an earlier kernel left there.
DEVICE i32 load_fresh(const i32* p) {
    i32 result;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(result) : "l"(p) : "memory");
    return result;
}
DEVICE u32 load_fresh(const u32* p) { return (u32)load_fresh((const i32*)p); }

// Loads and stores of values by which blocks meet: each 4 bytes are seen whole, in no order.
DEVICE float load_relaxed(const float* p) {
    float result;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(result) : "l"(p) : "memory");
    return result;
}
DEVICE Float4 load_relaxed(const Float4* p) {
    Float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3])
                 : "l"(p)
                 : "memory");
    return v;
}
DEVICE void store_relaxed(float* p, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(value) : "memory");
}
DEVICE void store_relaxed(Float4* p, const Float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x[0]), "f"(v.x[1]),
                 "f"(v.x[2]), "f"(v.x[3])
                 : "memory");
}

// Adds to a counter; what the block wrote before (a barrier after it) is seen by who acquires the sum.
DEVICE void add_release(i32* counter, i32 value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
DEVICE i32 load_acquire(const i32* p) {
    i32 result;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(result) : "l"(p) : "memory");
    return result;
}

// Between two looks at what another block is to write.
DEVICE void spin() {}

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// Asks the second-level cache for what lies around `p`.
DEVICE void prefetch(const char* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Before anything an earlier kernel wrote is touched; nothing to do below sm_90.
DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks be placed once all of this one's have been.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

DEVICE i32 lane_id() { return threadIdx.x & 31; }
DEVICE i32 warp_id() { return threadIdx.x >> 5; }

DEVICE float larger(float a, float b) { return fmaxf(a, b); }

// Over the lanes that hold the rows of a column of a product.
DEVICE float column_max(float x) {
    x = larger(x, __shfl_xor_sync(FULL, x, 4));
    x = larger(x, __shfl_xor_sync(FULL, x, 8));
    return larger(x, __shfl_xor_sync(FULL, x, 16));
}
DEVICE float column_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 4);
    x += __shfl_xor_sync(FULL, x, 8);
    return x + __shfl_xor_sync(FULL, x, 16);
}
DEVICE float warp_max(float x) {
    x = larger(x, __shfl_xor_sync(FULL, x, 1));
    x = larger(x, __shfl_xor_sync(FULL, x, 2));
    return column_max(x);
}
DEVICE float warp_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    x += __shfl_xor_sync(FULL, x, 2);
    return column_sum(x);
}
