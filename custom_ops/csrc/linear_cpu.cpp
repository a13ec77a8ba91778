// out[m, n] = x[m, :] . w[n, :] + bias[n] for few rows m, on the CPU; w is [N, K] as checkpoints
// store it.
//
// Few rows are bound by reading w once, so a thread owns groups of 16 output columns, whose weight
// rows stay in its nearest cache while all rows of x meet them. A block of 16 products (1 x 16, 2 x 8
// or 4 x 4) is summed in fp32 along K in vector lanes; one tree then reduces the 16 accumulators
// together. The order of sums depends on K alone, so a row's result does not depend on how many rows
// there are. bf16 uses the pairwise dot instruction where the CPU has it.
#include <algorithm>

namespace {

using namespace ce;

#if defined(__AVX512BF16__)
struct Bf16Dot {
  using Value = Bf16;
  using Acc = __m512;
  static constexpr int kStep = 32;
  static Acc zero() { return _mm512_setzero_ps(); }
  using Part = __m512bh;
  static Part part(const Bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Part part(const Bf16* p, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1u, p);
  }
  static Acc add(Acc acc, Part a, Part b) { return _mm512_dpbf16_ps(acc, a, b); }
  static void round_all(const float* sums, Bf16* out) {
    const __m256bh narrow = _mm512_cvtneps_pbh(_mm512_loadu_ps(sums));
    std::memcpy(out, &narrow, 32);
  }
};
#endif

template <typename T>
struct PlainDot {
  using Value = T;
  using Acc = f32x16;
  using Part = f32x16;
  static constexpr int kStep = kLanes;
  static Acc zero() { return f32x16{}; }
  static Part part(const T* p) { return load16(p); }
  static Part part(const T* p, int count) {
    f32x16 x = {};
    for (int i = 0; i < count; ++i) x[i] = load(p[i]);
    return x;
  }
  static Acc add(Acc acc, Part a, Part b) { return acc + a * b; }
  static void round_all(const float* sums, T* out) {
    for (int i = 0; i < kLanes; ++i) store(out + i, sums[i]);
  }
};

// kRows rows against kBlock / kRows columns, of which `num_cols` exist. `kAhead` asks for the weights
// of the next group meanwhile: a group's rows are too short for the hardware to see where it goes.
template <typename Dot, int kRows, bool kAhead>
void block(const typename Dot::Value* x, const typename Dot::Value* w,
           const typename Dot::Value* bias, typename Dot::Value* out, int num_cols, int64_t n,
           int64_t k) {
  constexpr int kCols = kBlock / kRows;
  const typename Dot::Value* columns[kCols];
  for (int c = 0; c < kCols; ++c) columns[c] = w + std::min(c, num_cols - 1) * k;
  typename Dot::Acc acc[kBlock];
  for (int i = 0; i < kBlock; ++i) acc[i] = Dot::zero();
  // One turn along K; `more` is nothing, or the number of values left at the end.
  auto turn = [&](int64_t i, auto... more) {
    typename Dot::Part row[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) row[r] = Dot::part(x + r * k + i, more...);
#pragma GCC unroll 16
    for (int c = 0; c < kCols; ++c) {
      if (kAhead) __builtin_prefetch(columns[c] + i + kBlock * k, 0, 3);
      const typename Dot::Part column = Dot::part(columns[c] + i, more...);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
        acc[r * kCols + c] = Dot::add(acc[r * kCols + c], row[r], column);
    }
  };
  int64_t i = 0;
  for (; i + Dot::kStep <= k; i += Dot::kStep) turn(i);
  if (i < k) turn(i, static_cast<int>(k - i));
  float sums[kBlock];
  sum_all(acc, sums);
  if (bias == nullptr && num_cols == kCols) {
    typename Dot::Value narrow[kBlock];
    Dot::round_all(sums, narrow);
    for (int r = 0; r < kRows; ++r)
      std::memcpy(out + r * n, narrow + r * kCols, kCols * sizeof(narrow[0]));
    return;
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < num_cols; ++c)
      store(out + r * n + c, sums[r * kCols + c] + (bias ? load(bias[c]) : 0.0f));
}

// All rows against one group of at most kBlock columns.
template <typename Dot, int kRows>
int64_t rows_of(int64_t r, const typename Dot::Value* x, const typename Dot::Value* w,
                const typename Dot::Value* bias, typename Dot::Value* out, int width, int64_t m,
                int64_t n, int64_t k) {
  constexpr int kCols = kBlock / kRows;
  for (; r + kRows <= m; r += kRows)
    for (int c = 0; c < width; c += kCols) {
      const auto run = r == 0 ? block<Dot, kRows, true> : block<Dot, kRows, false>;
      run(x + r * k, w + c * k, bias ? bias + c : nullptr, out + r * n + c,
          std::min(kCols, width - c), n, k);
    }
  return r;
}

template <typename Dot>
void run(const void* x_, const void* w_, const void* bias_, void* out_, int64_t m, int64_t n,
         int64_t k) {
  using T = typename Dot::Value;
  const T* x = static_cast<const T*>(x_);
  const T* w = static_cast<const T*>(w_);
  const T* bias = static_cast<const T*>(bias_);
  T* out = static_cast<T*>(out_);
  const int64_t groups = (n + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t c = g * kBlock;
    const int width = static_cast<int>(std::min<int64_t>(kBlock, n - c));
    const T* b = bias ? bias + c : nullptr;
    int64_t r = rows_of<Dot, 4>(0, x, w + c * k, b, out + c, width, m, n, k);
    r = rows_of<Dot, 2>(r, x, w + c * k, b, out + c, width, m, n, k);
    rows_of<Dot, 1>(r, x, w + c * k, b, out + c, width, m, n, k);
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
