// Cut-off of top-k, top-p and min-p on the CPU, without a sort.
//
// Floats become unsigned keys of the same order; a bit-by-bit search finds the largest key whose
// "everything from here up" still satisfies the rule. Three rules in turn: min-p (a plain product),
// top-k (a count), top-p (a sum of probabilities over what the first two left). One thread a row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline uint32_t to_key(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float from_key(uint32_t key) {
  uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Largest key in (low, high] for which holds(threshold as float), or low.
template <typename F>
uint32_t search(uint32_t low, uint32_t high, F holds) {
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    if (holds(from_key(middle))) low = middle; else high = middle - 1;
  }
  return low;
}

float threshold_of(const float* x, int64_t n, int64_t k, float p, float min_p) {
  float top = x[0], bottom = x[0];
  for (int64_t i = 1; i < n; ++i) {
    top = std::max(top, x[i]);
    bottom = std::min(bottom, x[i]);
  }
  float cut = std::max(bottom, -3.0e38f);
  if (min_p > 0.0f) cut = std::max(cut, top + std::log(min_p));
  cut = std::min(cut, top);
  if (k > 0 && k < n) {
    const uint32_t key = search(to_key(cut), to_key(top), [&](float t) {
      int64_t count = 0;
      for (int64_t i = 0; i < n; ++i) count += x[i] >= t;
      return count >= k;
    });
    cut = from_key(key);
  }
  if (p < 1.0f) {
    // Only what is left can matter: keep it, with its weight, in dense arrays.
    std::vector<float> kept, weight;
    for (int64_t i = 0; i < n; ++i)
      if (x[i] >= cut) kept.push_back(x[i]);
    const int64_t m = static_cast<int64_t>(kept.size());
    weight.resize(kept.size());
    double total = 0.0;
    for (int64_t i = 0; i < m; ++i) {
      weight[i] = std::exp(kept[i] - top);
      total += weight[i];
    }
    const double wanted = total * p;
    const uint32_t key = search(to_key(cut), to_key(top), [&](float t) {
      double sum = 0.0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < m; ++i) sum += kept[i] >= t ? weight[i] : 0.0f;
      return sum >= wanted;
    });
    cut = from_key(key);
  }
  return cut;
}

}  // namespace

extern "C" void ce_sampling_threshold(const float* logits, const int32_t* top_k,
                                      const float* top_p, const float* min_p, float* out,
                                      int64_t rows, int64_t vocab) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
  for (int64_t r = 0; r < rows; ++r)
    out[r] = threshold_of(logits + r * vocab, vocab, top_k[r], top_p[r], min_p[r]);
}
