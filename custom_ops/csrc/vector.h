// Sixteen fp32 lanes as a compiler vector, loads from fp32, bf16 and fp16, sums, and exp.
//
// Compiler vectors need no intrinsics: the compiler splits them where registers are narrower. The
// one exception is the sum of 16 vectors at once, which has an AVX-512 form.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace ce {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef _Float16 f16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

struct Bf16 { uint16_t bits; };
struct Fp16 { _Float16 value; };

inline float load(float x) { return x; }
inline float load(Bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline float load(Fp16 x) { return static_cast<float>(x.value); }

inline f32x16 load16(const float* p) {
  f32x16 x;
  std::memcpy(&x, p, 64);
  return x;
}
inline f32x16 load16(const Bf16* p) {
  u16x16 narrow;
  std::memcpy(&narrow, p, 32);
  const u32x16 wide = __builtin_convertvector(narrow, u32x16) << 16;
  f32x16 x;
  std::memcpy(&x, &wide, 64);
  return x;
}
inline f32x16 load16(const Fp16* p) {
  f16x16 narrow;
  std::memcpy(&narrow, p, 32);
  return __builtin_convertvector(narrow, f32x16);
}

inline void store(float* p, float x) { *p = x; }
inline void store(Bf16* p, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  const bool is_nan = (wide & 0x7fffffffu) > 0x7f800000u;
  wide += 0x7fffu + ((wide >> 16) & 1u);  // round to nearest even
  p->bits = is_nan ? 0x7fc0u : static_cast<uint16_t>(wide >> 16);
}
inline void store(Fp16* p, float x) { p->value = static_cast<_Float16>(x); }
inline void store16(float* p, f32x16 x) { std::memcpy(p, &x, 64); }

// Sum of the lanes, always in the same order.
inline float sum16(f32x16 x) {
  typedef float f32x8 __attribute__((vector_size(32)));
  typedef float f32x4 __attribute__((vector_size(16)));
  f32x8 half[2];
  std::memcpy(half, &x, 64);
  const f32x8 eight = half[0] + half[1];
  f32x4 quarter[2];
  std::memcpy(quarter, &eight, 32);
  const f32x4 four = quarter[0] + quarter[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

constexpr int kBlock = 16;  // accumulators that are summed together

// The 16 lane sums of 16 accumulators.
#if defined(__AVX512F__)
inline __m512 pair(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
inline __m512 quad(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline __m512 lanes(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
template <typename Acc>
inline void sum_all(const Acc* acc, float* sums) {
  __m512 four[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 low = pair((__m512)acc[4 * i], (__m512)acc[4 * i + 1]);
    const __m512 high = pair((__m512)acc[4 * i + 2], (__m512)acc[4 * i + 3]);
    four[i] = quad(low, high);
  }
  _mm512_storeu_ps(sums, lanes(lanes(four[0], four[1]), lanes(four[2], four[3])));
}
#else
template <typename Acc>
inline void sum_all(const Acc* acc, float* sums) {
  for (int i = 0; i < kBlock; ++i) sums[i] = sum16((f32x16)acc[i]);
}
#endif

inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// exp for x <= 0: 2^n * e^r with |r| <= ln2 / 2 and a degree-6 polynomial; relative error 1e-7.
inline f32x16 exp_nonpositive(f32x16 x) {
  const f32x16 lowest = f32x16{} - 87.0f;
  x = max16(x, lowest);
  // Adding and subtracting 1.5 * 2^23 rounds to an integer; its low bits are that integer.
  const f32x16 shifted = x * 1.44269504088896341f + 12582912.0f;
  i32x16 n;
  std::memcpy(&n, &shifted, 64);
  n -= 0x4b400000;
  const f32x16 whole = __builtin_convertvector(n, f32x16);
  const f32x16 r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x16 bits = (n + 127) << 23;
  f32x16 power;
  std::memcpy(&power, &bits, 64);
  return p * power;
}

}  // namespace ce
