// out[m, n] = x[m, :] . w[n, :] + bias[n] for few rows m, on the CPU; w is [N, K] as checkpoints
// store it.
//
// Few rows are bound by reading w once, so a thread owns a run of output columns and streams their
// weight rows, four at a time, against all rows of x. Products are summed in fp32 along K in vector
// lanes; the order depends on K alone, so a row's result does not depend on how many rows there are.
// bf16 uses the pairwise dot instruction where the CPU has it.
#include <algorithm>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using namespace ce;

#if defined(__AVX512BF16__)
struct Bf16Dot {
  using Value = Bf16;
  using Acc = __m512;
  static constexpr int kStep = 32;
  static Acc zero() { return _mm512_setzero_ps(); }
  using Part = __m512bh;
  static Part part(const Bf16* p, int count) {
    const __mmask32 mask = count >= kStep ? ~0u : (1u << count) - 1u;
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
  }
  static Acc add(Acc acc, Part a, Part b) { return _mm512_dpbf16_ps(acc, a, b); }
  static float sum(Acc acc) { return sum16((f32x16)acc); }
};
#endif

template <typename T>
struct PlainDot {
  using Value = T;
  using Acc = f32x16;
  using Part = f32x16;
  static constexpr int kStep = kLanes;
  static Acc zero() { return f32x16{}; }
  static Part part(const T* p, int count) {
    if (count >= kLanes) return load16(p);
    f32x16 x = {};
    for (int i = 0; i < count; ++i) x[i] = load(p[i]);
    return x;
  }
  static Acc add(Acc acc, Part a, Part b) { return acc + a * b; }
  static float sum(Acc acc) { return sum16(acc); }
};

// kCols output columns of kRows rows.
template <typename Dot, int kRows, int kCols>
void block(const typename Dot::Value* x, const typename Dot::Value* w,
           const typename Dot::Value* bias, typename Dot::Value* out, int64_t n, int64_t k) {
  typename Dot::Acc acc[kRows][kCols];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c) acc[r][c] = Dot::zero();
  for (int64_t i = 0; i < k; i += Dot::kStep) {
    const int count = static_cast<int>(std::min<int64_t>(Dot::kStep, k - i));
    typename Dot::Part columns[kCols];
    for (int c = 0; c < kCols; ++c) columns[c] = Dot::part(w + c * k + i, count);
    for (int r = 0; r < kRows; ++r) {
      const typename Dot::Part row = Dot::part(x + r * k + i, count);
      for (int c = 0; c < kCols; ++c) acc[r][c] = Dot::add(acc[r][c], row, columns[c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kCols; ++c)
      store(out + r * n + c, Dot::sum(acc[r][c]) + (bias ? load(bias[c]) : 0.0f));
}

template <typename Dot, int kCols>
void all_rows(const typename Dot::Value* x, const typename Dot::Value* w,
              const typename Dot::Value* bias, typename Dot::Value* out, int64_t m, int64_t n,
              int64_t k) {
  int64_t r = 0;
  for (; r + 4 <= m; r += 4) block<Dot, 4, kCols>(x + r * k, w, bias, out + r * n, n, k);
  if (r + 2 <= m) {
    block<Dot, 2, kCols>(x + r * k, w, bias, out + r * n, n, k);
    r += 2;
  }
  if (r < m) block<Dot, 1, kCols>(x + r * k, w, bias, out + r * n, n, k);
}

template <typename Dot>
void run(const void* x_, const void* w_, const void* bias_, void* out_, int64_t m, int64_t n,
         int64_t k) {
  using T = typename Dot::Value;
  const T* x = static_cast<const T*>(x_);
  const T* w = static_cast<const T*>(w_);
  const T* bias = static_cast<const T*>(bias_);
  T* out = static_cast<T*>(out_);
  const int64_t groups = (n + 3) / 4;
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t c = g * 4;
    const T* b = bias ? bias + c : nullptr;
    if (c + 4 <= n) {
      all_rows<Dot, 4>(x, w + c * k, b, out + c, m, n, k);
    } else {
      for (int64_t i = c; i < n; ++i)
        all_rows<Dot, 1>(x, w + i * k, bias ? bias + i : nullptr, out + i, m, n, k);
    }
  }
}

}  // namespace

// dtype: 0 fp32, 1 bf16, 2 fp16; bias may be null.
extern "C" void ce_linear(int32_t dtype, const void* x, const void* w, const void* bias, void* out,
                          int64_t m, int64_t n, int64_t k) {
  if (dtype == 0) return run<PlainDot<float>>(x, w, bias, out, m, n, k);
#if defined(__AVX512BF16__)
  if (dtype == 1) return run<Bf16Dot>(x, w, bias, out, m, n, k);
#else
  if (dtype == 1) return run<PlainDot<Bf16>>(x, w, bias, out, m, n, k);
#endif
  return run<PlainDot<Fp16>>(x, w, bias, out, m, n, k);
}
