// Causal attention of flattened rows over a paged KV cache, on the CPU.
//
//   out[t, h] = softmax(scale * q[t, h] . K[0..p(t)]) @ V[0..p(t)],   p(t) = position of token t
//
// A work item is (sequence, kv head, block of query tokens); the query heads of a group share the
// loaded keys. Items walk the sequence's pages in tiles of kTile positions with a running maximum
// and sum, so cost follows the sum of the sequence lengths and never the width of the block table.
// All arithmetic is fp32. Few query rows (decode) take dot products along the head dim; many rows
// (prefill) transpose the key tile once and stream over it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kTile = 64;          // positions a tile; 64 fp32 scores are four AVX-512 registers
constexpr int kMaxRows = 32;       // query tokens * group size a work item
constexpr int kTransposeRows = 6;  // from this many rows on the transposed key tile pays

struct Bf16 { uint16_t bits; };
struct Fp16 { _Float16 value; };

inline float load(float x) { return x; }
inline float load(Bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
inline float load(Fp16 x) { return static_cast<float>(x.value); }
inline void store(float* p, float x) { *p = x; }
inline void store(Bf16* p, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  wide += 0x7fffu + ((wide >> 16) & 1u);  // round to nearest even
  p->bits = static_cast<uint16_t>(wide >> 16);
}
inline void store(Fp16* p, float x) { p->value = static_cast<_Float16>(x); }

// exp for x <= 0: split into 2^n * e^r, |r| <= ln2 / 2, degree-6 polynomial; relative error 1e-7.
inline float exp_nonpositive(float x) {
  x = std::max(x, -87.0f);
  float n = std::nearbyintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, table_width, num_seqs;
  float scale;
};

struct Item {
  int32_t seq, kv_head, first_token, num_tokens;
};

// One tile of scores for `rows` query rows against `width` keys held as fp32 [width][dim].
template <int kDim>
void scores_by_dot(const float* q, const float* k, float* s, int rows, int width, int dim_arg) {
  const int dim = kDim > 0 ? kDim : dim_arg;
  for (int j = 0; j < width; ++j) {
    const float* key = k + j * dim;
    for (int r = 0; r < rows; ++r) {
      const float* query = q + r * dim;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int d = 0; d < dim; ++d) sum += query[d] * key[d];
      s[r * kTile + j] = sum;
    }
  }
}

// The same against keys transposed to [dim][kTile].
template <int kDim>
void scores_by_column(const float* q, const float* kt, float* s, int rows, int dim_arg) {
  const int dim = kDim > 0 ? kDim : dim_arg;
  int r = 0;
  for (; r + 2 <= rows; r += 2) {
    float a[kTile] = {0}, b[kTile] = {0};
    const float *qa = q + r * dim, *qb = qa + dim;
    for (int d = 0; d < dim; ++d) {
      const float x = qa[d], y = qb[d];
      const float* column = kt + d * kTile;
#pragma omp simd
      for (int j = 0; j < kTile; ++j) {
        a[j] += x * column[j];
        b[j] += y * column[j];
      }
    }
    std::memcpy(s + r * kTile, a, sizeof a);
    std::memcpy(s + (r + 1) * kTile, b, sizeof b);
  }
  if (r < rows) {
    float a[kTile] = {0};
    for (int d = 0; d < dim; ++d) {
      const float x = q[r * dim + d];
      const float* column = kt + d * kTile;
#pragma omp simd
      for (int j = 0; j < kTile; ++j) a[j] += x * column[j];
    }
    std::memcpy(s + r * kTile, a, sizeof a);
  }
}

template <typename T, int kDim>
void attend(const Shape& shape, const T* q, const T* k_cache, const T* v_cache,
            const int32_t* pages, int64_t last_position, const Item& item, float* scratch, T* out) {
  const int dim = kDim > 0 ? kDim : static_cast<int>(shape.head_dim);
  const int group = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  const int rows = item.num_tokens * group;
  const int64_t position_stride = shape.num_kv_heads * dim;
  float* query = scratch;                      // [rows][dim], scaled
  float* acc = query + kMaxRows * dim;         // [rows][dim]
  float* key = acc + kMaxRows * dim;           // [kTile][dim], or transposed [dim][kTile]
  float* value = key + kTile * dim;            // [kTile][dim]
  float* score = value + kTile * dim;          // [rows][kTile]
  float* top = score + kMaxRows * kTile;       // [rows] running maximum
  float* total = top + kMaxRows;               // [rows] running sum
  for (int r = 0; r < rows; ++r) {
    const int64_t token = item.first_token + r / group;
    const int64_t head = static_cast<int64_t>(item.kv_head) * group + r % group;
    const T* source = q + (token * shape.num_heads + head) * dim;
    for (int d = 0; d < dim; ++d) {
      query[r * dim + d] = load(source[d]) * shape.scale;
      acc[r * dim + d] = 0.0f;
    }
    top[r] = -std::numeric_limits<float>::max();
    total[r] = 0.0f;
  }
  // `last_position` is the position of the item's last token: later keys are invisible to all rows.
  const bool transposed = rows >= kTransposeRows;
  for (int64_t start = 0; start <= last_position; start += kTile) {
    const int width = static_cast<int>(std::min<int64_t>(kTile, last_position + 1 - start));
    for (int j = 0; j < width; ++j) {
      const int64_t at = start + j;
      const int64_t slot =
          pages[at / shape.page_size] * shape.page_size + at % shape.page_size;
      const T* ks = k_cache + slot * position_stride + item.kv_head * dim;
      const T* vs = v_cache + slot * position_stride + item.kv_head * dim;
      for (int d = 0; d < dim; ++d) value[j * dim + d] = load(vs[d]);
      if (transposed) {
        for (int d = 0; d < dim; ++d) key[d * kTile + j] = load(ks[d]);
      } else {
        for (int d = 0; d < dim; ++d) key[j * dim + d] = load(ks[d]);
      }
    }
    if (transposed) {
      if (width < kTile) {
        for (int d = 0; d < dim; ++d)
          std::fill(key + d * kTile + width, key + (d + 1) * kTile, 0.0f);
      }
      scores_by_column<kDim>(query, key, score, rows, dim);
    } else {
      scores_by_dot<kDim>(query, key, score, rows, width, dim);
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t position = last_position - (item.num_tokens - 1 - r / group);
      const int visible = static_cast<int>(std::min<int64_t>(width, position + 1 - start));
      if (visible <= 0) continue;
      float* s = score + r * kTile;
      float highest = top[r];
      for (int j = 0; j < visible; ++j) highest = std::max(highest, s[j]);
      const float rescale = exp_nonpositive(top[r] - highest);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int j = 0; j < visible; ++j) {
        s[j] = exp_nonpositive(s[j] - highest);
        sum += s[j];
      }
      total[r] = total[r] * rescale + sum;
      top[r] = highest;
      float* o = acc + r * dim;
      for (int d = 0; d < dim; ++d) o[d] *= rescale;
      for (int j = 0; j < visible; ++j) {
        const float weight = s[j];
        const float* row = value + j * dim;
#pragma omp simd
        for (int d = 0; d < dim; ++d) o[d] += weight * row[d];
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t token = item.first_token + r / group;
    const int64_t head = static_cast<int64_t>(item.kv_head) * group + r % group;
    const float inverse = 1.0f / total[r];
    T* target = out + (token * shape.num_heads + head) * dim;
    for (int d = 0; d < dim; ++d) store(target + d, acc[r * dim + d] * inverse);
  }
}

template <typename T, int kDim>
void run(const Shape& shape, const T* q, const T* k_cache, const T* v_cache,
         const int32_t* block_table, const int32_t* seq_rows, const int32_t* seq_lens,
         const int32_t* query_start_loc, T* out) {
  const int dim = static_cast<int>(shape.head_dim);
  const int group = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  const int block = std::max(1, kMaxRows / group);
  std::vector<Item> items;
  for (int32_t s = 0; s < shape.num_seqs; ++s) {
    // Later blocks see more keys, so they go first: the last thread to finish has little left.
    for (int32_t end = query_start_loc[s + 1]; end > query_start_loc[s]; end -= block) {
      const int32_t begin = std::max(query_start_loc[s], end - block);
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) items.push_back({s, h, begin, end - begin});
    }
  }
  const int64_t num_items = static_cast<int64_t>(items.size());
  const size_t scratch_size = 2 * static_cast<size_t>(kMaxRows) * dim +
                              2 * static_cast<size_t>(kTile) * dim + kMaxRows * (kTile + 2);
#pragma omp parallel if (num_items > 1)
  {
    std::vector<float> scratch(scratch_size);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item& item = items[i];
      const int32_t after = query_start_loc[item.seq + 1] - (item.first_token + item.num_tokens);
      const int64_t last_position = seq_lens[item.seq] - 1 - after;
      const int32_t* pages = block_table + seq_rows[item.seq] * shape.table_width;
      attend<T, kDim>(shape, q, k_cache, v_cache, pages, last_position, item, scratch.data(), out);
    }
  }
}

template <typename T>
void dispatch(const Shape& shape, const void* q, const void* k, const void* v,
              const int32_t* block_table, const int32_t* seq_rows, const int32_t* seq_lens,
              const int32_t* query_start_loc, void* out) {
  auto call = [&](auto dim) {
    run<T, decltype(dim)::value>(shape, static_cast<const T*>(q), static_cast<const T*>(k),
                                 static_cast<const T*>(v), block_table, seq_rows, seq_lens,
                                 query_start_loc, static_cast<T*>(out));
  };
  switch (shape.head_dim) {
    case 64: return call(std::integral_constant<int, 64>{});
    case 128: return call(std::integral_constant<int, 128>{});
    default: return call(std::integral_constant<int, 0>{});
  }
}

}  // namespace

// dtype: 0 fp32, 1 bf16, 2 fp16. Tensors as in the Python contract; tokens past the last sequence
// are left untouched (the caller zeroes them).
extern "C" void ce_paged_attention(int32_t dtype, const void* q, const void* k, const void* v,
                                   const int32_t* block_table, const int32_t* seq_rows,
                                   const int32_t* seq_lens, const int32_t* query_start_loc,
                                   void* out, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t head_dim, int64_t page_size, int64_t table_width,
                                   int64_t num_seqs, float scale) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size, table_width, num_seqs, scale};
  auto call = [&](auto value) {
    dispatch<decltype(value)>(shape, q, k, v, block_table, seq_rows, seq_lens, query_start_loc,
                              out);
  };
  if (dtype == 0) return call(float{});
  if (dtype == 1) return call(Bf16{});
  return call(Fp16{});
}
