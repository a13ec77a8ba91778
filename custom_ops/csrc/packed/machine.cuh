// What products with quantised weights need of the machine. A test that runs the kernel on a CPU brings
// its own spelling.
#pragma once
#include "attention/device.cuh"

#ifndef CUDA_EMULATOR
// 16 bytes that are read once, and first to leave the second-level cache.
DEVICE Quad load_once(const char* p, u64 policy) {
    Quad v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "l"(p), "l"(policy));
    return v;
}

// Starts to copy 4 bytes to shared memory, in a group with longer copies.
DEVICE void copy_word_async(char* shared, const char* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// What no kernel writes, by 1 or 2 bytes and more.
DEVICE u32 load_byte(const char* p) {
    u32 value;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(value) : "l"(p));
    return value;
}
DEVICE u32 load_short(const char* p) {
    unsigned short value;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(p));
    return value;
}
DEVICE float load_constant(const float* p) {
    float value;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(p));
    return value;
}
DEVICE Quad load_constant(const char* p) {
    Quad v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "l"(p));
    return v;
}

// Bytes of `a` (0 to 3) and `b` (4 to 7) by the nibbles of `selector`.
DEVICE u32 choose_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

DEVICE float float_of_half(u32 bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"((unsigned short)bits));
    return result;
}
DEVICE u32 halves_of(float first, float second) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}
DEVICE u32 bfloats_of(float first, float second) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
    return result;
}
// Two 8-bit floats, in the lower half of `bytes`, as fp16; and all four.
DEVICE u32 halves_of_e4m3(u32 bytes) {
    u32 result;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"((unsigned short)bytes));
#else
    u32 apart = __byte_perm(bytes, 0, 0x1404);
    apart = (apart & 0x80008000) | (apart >> 1 & 0x3f803f80);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(apart), "r"(0x5c005c00));  // times 2^8
#endif
    return result;
}
DEVICE void halves_of_e4m3(u32 bytes, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    low = halves_of_e4m3(bytes), high = halves_of_e4m3(bytes >> 16);
#endif
}

// The nearest 8-bit float.
DEVICE float nearest_e4m3(float x) {
    x = fminf(fmaxf(x, -448.0f), 448.0f);
    u32 bits = __float_as_uint(x);
    float small = (x + 24576.0f) - 24576.0f;  // multiples of 2^-9
    return fabsf(x) < 0x1p-6f ? small : __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000);
}

// The nearest 8-bit floats, as fp16; the first in the lower half.
DEVICE u32 rounded_to_e4m3(float first, float second) {
#if __CUDA_ARCH__ >= 890
    unsigned short bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
    return halves_of_e4m3(bytes);
#else
    return halves_of(nearest_e4m3(first), nearest_e4m3(second));
#endif
}

DEVICE u32 subtract_halves(u32 a, u32 b) {
    u32 result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Of two pairs of what is multiplied, each rounded once.
DEVICE u32 multiply_pairs(u32 a, u32 b) {
    u32 result;
#if HALF
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));  // plus -0
#endif
    return result;
}
DEVICE u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u32 result;
#if HALF
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
#endif
    return result;
}
DEVICE u32 subtract_pairs(u32 a, u32 b) {
#if HALF
    return subtract_halves(a, b);
#else
    u32 result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(b), "r"(0xbf80bf80u), "r"(a));  // a - 1 * b
    return result;
#endif
}
#endif

// Values of x, out and others.
DEVICE float widen_value(u32 bits) { return IO_HALF ? float_of_half(bits) : float_of((bits & 0xffff) << 16); }
DEVICE u32 round_values(float first, float second) {
    return IO_HALF ? halves_of(first, second) : bfloats_of(first, second);
}
