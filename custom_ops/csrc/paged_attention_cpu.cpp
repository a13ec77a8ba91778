// Causal attention of flattened rows over a paged KV cache, on the CPU.
//
//   out[t, h] = softmax(scale * q[t, h] . K[0..p(t)]) @ V[0..p(t)],   p(t) = position of token t
//
// Options: with a window a token sees only the last `window` positions; a soft cap c turns a score s
// into c * tanh(s / c); a sink is one more logit a head that only the denominator sees.
//
// A work item is (sequence, kv head, block of query tokens); the query heads of a group share the
// loaded keys. Items walk the sequence's pages in tiles of kTile positions with a running maximum
// and sum, so cost follows the sum of the sequence lengths and never the width of the block table.
// All arithmetic is fp32. Few query rows (decode) take dot products along the head dim straight
// from the pages; many rows (prefill) transpose a key tile once and stream over it, four rows of
// accumulators at a time. Head dims are padded with zeros to whole vectors in the scratch copies.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace ce;

constexpr int kTile = 64;          // positions a tile: four vectors of scores
constexpr int kMaxRows = 48;       // query tokens * group size a work item
constexpr int kTransposeRows = 8;  // from this many rows on the transposed key tile pays
constexpr int kVectors = kTile / kLanes;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, page_size, table_width, num_seqs;
  int64_t window;         // 0: no limit
  float scale, soft_cap;  // soft_cap 0: off
  const float* sinks;  // [num_heads] or null
};

struct Item {
  int32_t seq, kv_head, first_token, num_tokens;
};

// Scratch of one thread; `width` is the head dim rounded up to whole vectors.
struct Scratch {
  float *query, *acc, *key, *value, *score, *top, *total;

  Scratch(int width, std::vector<float>& memory) {
    memory.resize(2 * kMaxRows * width + 2 * kTile * width + kMaxRows * (kTile + 2));
    query = memory.data();              // [rows][width], scaled
    acc = query + kMaxRows * width;     // [rows][width]
    key = acc + kMaxRows * width;       // [width][kTile], transposed
    value = key + kTile * width;        // [kTile][width]
    score = value + kTile * width;      // [rows][kTile]
    top = score + kMaxRows * kTile;     // [rows] running maximum
    total = top + kMaxRows;             // [rows] running sum
  }
};

template <typename T>
inline f32x16 load_part(const T* p, int count) {
  if (count >= kLanes) return load16(p);
  f32x16 x = {};
  for (int i = 0; i < count; ++i) x[i] = load(p[i]);
  return x;
}

// Scores of `rows` query rows against transposed keys [dim][kTile], kRows rows at a time.
template <int kRows>
void score_columns(const float* q, const float* keys, float* s, int dim, int width) {
  f32x16 acc[kRows][kVectors] = {};
  for (int d = 0; d < dim; ++d) {
    const float* column = keys + d * kTile;
    f32x16 k[kVectors];
    for (int v = 0; v < kVectors; ++v) k[v] = load16(column + v * kLanes);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) acc[r][v] += q[r * width + d] * k[v];
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store16(s + r * kTile + v * kLanes, acc[r][v]);
}

// acc[row] += weights[row] @ values, kRows rows at a time, four vectors of the head dim at a time.
template <int kRows>
void add_values(const float* weights, const float* values, float* acc, int count, int width) {
  for (int d = 0; d < width; d += 4 * kLanes) {
    const int vectors = std::min(4, (width - d) / kLanes);
    f32x16 sum[kRows][4] = {};
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < vectors; ++v) sum[r][v] = load16(acc + r * width + d + v * kLanes);
    if (vectors == 4) {
      for (int j = 0; j < count; ++j) {
        f32x16 x[4];
        for (int v = 0; v < 4; ++v) x[v] = load16(values + j * width + d + v * kLanes);
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < 4; ++v) sum[r][v] += weights[r * kTile + j] * x[v];
      }
    } else {
      for (int j = 0; j < count; ++j)
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < vectors; ++v)
            sum[r][v] += weights[r * kTile + j] * load16(values + j * width + d + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < vectors; ++v) store16(acc + r * width + d + v * kLanes, sum[r][v]);
  }
}

// Turns a row of scores into weights exp(score - running maximum), and rescales what was summed.
// Only scores [hidden, visible) count.
void soften(float* s, int hidden, int visible, float* top, float* total, float* acc, int width) {
  for (int j = 0; j < hidden; ++j) s[j] = -std::numeric_limits<float>::max();
  for (int j = visible; j < kTile; ++j) s[j] = -std::numeric_limits<float>::max();
  f32x16 x[kVectors], highest = f32x16{} + *top;
  for (int v = 0; v < kVectors; ++v) {
    x[v] = load16(s + v * kLanes);
    highest = max16(highest, x[v]);
  }
  float peak = highest[0];
  for (int i = 1; i < kLanes; ++i) peak = std::max(peak, highest[i]);
  const float rescale = exp_nonpositive(f32x16{} + (*top - peak))[0];
  f32x16 sum = {};
  for (int v = 0; v < kVectors; ++v) {
    const f32x16 weight = exp_nonpositive(x[v] - peak);
    store16(s + v * kLanes, weight);
    sum += weight;
  }
  auto drop = [&](int j) {
    sum[j % kLanes] -= s[j];
    s[j] = 0.0f;
  };
  for (int j = 0; j < hidden; ++j) drop(j);
  for (int j = visible; j < kTile; ++j) drop(j);
  *total = *total * rescale + sum16(sum);
  *top = peak;
  if (rescale != 1.0f)
    for (int d = 0; d < width; d += kLanes) store16(acc + d, load16(acc + d) * rescale);
}

template <typename T>
class Attention {
 public:
  Attention(const Shape& shape, const T* q, const T* k_cache, const T* v_cache, T* out)
      : shape_(shape),
        q_(q),
        k_cache_(k_cache),
        v_cache_(v_cache),
        out_(out),
        dim_(static_cast<int>(shape.head_dim)),
        width_((dim_ + kLanes - 1) / kLanes * kLanes),
        group_(static_cast<int>(shape.num_heads / shape.num_kv_heads)) {}

  int width() const { return width_; }
  int block() const { return std::max(1, kMaxRows / group_); }

  // `last_position` is the position of the item's last token: no row sees a later key.
  void run(const Item& item, const int32_t* pages, int64_t last_position, Scratch& x) const {
    // A group of more heads than the scratch holds goes in parts.
    for (int from = 0; from < group_; from += kMaxRows) {
      const int heads = std::min(kMaxRows, group_ - from);
      run_heads(item, pages, last_position, from, heads, x);
    }
  }

 private:
  // Cache slots of `count` positions from `start` on.
  void find_slots(const int32_t* pages, int64_t start, int count, int64_t* slots) const {
    int64_t page = start / shape_.page_size, offset = start % shape_.page_size;
    for (int j = 0; j < count; ++j) {
      slots[j] = pages[page] * shape_.page_size + offset;
      if (++offset == shape_.page_size) offset = 0, ++page;
    }
  }

  const T* entry(const T* cache, int64_t slot, int kv_head) const {
    return cache + (slot * shape_.num_kv_heads + kv_head) * dim_;
  }

  static int within(int64_t value, int count) {
    return static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(count, value)));
  }

  // First position that the item's first token sees: what lies before it is never read.
  int64_t first_start(const Item& item, int64_t last_position) const {
    if (!shape_.window) return 0;
    const int64_t first = last_position - (item.num_tokens - 1) - (shape_.window - 1);
    return std::max<int64_t>(0, first);
  }

  int64_t row_offset(const Item& item, int r, int from, int heads) const {
    const int64_t token = item.first_token + r / heads;
    const int64_t head = static_cast<int64_t>(item.kv_head) * group_ + from + r % heads;
    return (token * shape_.num_heads + head) * dim_;
  }

  void run_heads(const Item& item, const int32_t* pages, int64_t last_position, int from,
                 int heads, Scratch& x) const {
    const int rows = item.num_tokens * heads;
    for (int r = 0; r < rows; ++r) {
      const T* source = q_ + row_offset(item, r, from, heads);
      for (int d = 0; d < width_; d += kLanes) {
        store16(x.query + r * width_ + d, load_part(source + d, dim_ - d) * shape_.scale);
        store16(x.acc + r * width_ + d, f32x16{});
      }
      const int64_t head = static_cast<int64_t>(item.kv_head) * group_ + from + r % heads;
      x.top[r] = shape_.sinks ? shape_.sinks[head] : -std::numeric_limits<float>::max();
      x.total[r] = shape_.sinks ? 1.0f : 0.0f;
    }
    for (int64_t start = first_start(item, last_position); start <= last_position; start += kTile) {
      const int count = static_cast<int>(std::min<int64_t>(kTile, last_position + 1 - start));
      int64_t slots[kTile];
      find_slots(pages, start, count, slots);
      load_values(slots, count, item.kv_head, x);
      if (rows >= kTransposeRows)
        score_many(slots, count, item.kv_head, rows, x);
      else
        score_few(slots, count, item.kv_head, rows, x);
      for (int r = 0; r < rows; ++r) {
        const int64_t position = last_position - (item.num_tokens - 1 - r / heads);
        const int visible = within(position + 1 - start, count);
        const int hidden = shape_.window ? within(position + 1 - shape_.window - start, count) : 0;
        float* scores = x.score + r * kTile;
        if (hidden >= visible) {
          std::fill(scores, scores + kTile, 0.0f);
          continue;
        }
        if (shape_.soft_cap > 0.0f)
          for (int j = hidden; j < visible; ++j)
            scores[j] = shape_.soft_cap * std::tanh(scores[j] / shape_.soft_cap);
        soften(scores, hidden, visible, x.top + r, x.total + r, x.acc + r * width_, width_);
      }
      int r = 0;
      for (; r + 4 <= rows; r += 4)
        add_values<4>(x.score + r * kTile, x.value, x.acc + r * width_, count, width_);
      for (; r + 3 <= rows; r += 3)
        add_values<3>(x.score + r * kTile, x.value, x.acc + r * width_, count, width_);
      for (; r < rows; ++r)
        add_values<1>(x.score + r * kTile, x.value, x.acc + r * width_, count, width_);
    }
    for (int r = 0; r < rows; ++r) {
      T* target = out_ + row_offset(item, r, from, heads);
      const float inverse = 1.0f / x.total[r];
      for (int d = 0; d < dim_; ++d) store(target + d, x.acc[r * width_ + d] * inverse);
    }
  }

  void load_values(const int64_t* slots, int count, int kv_head, Scratch& x) const {
    for (int j = 0; j < count; ++j) {
      const T* source = entry(v_cache_, slots[j], kv_head);
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) store16(x.value + j * width_ + d, load16(source + d));
      if (d < dim_) store16(x.value + j * width_ + d, load_part(source + d, dim_ - d));
    }
  }

  // Dot products along the head dim, for 16 keys at a time: one tree sums their 16 accumulators.
  void score_few(const int64_t* slots, int count, int kv_head, int rows, Scratch& x) const {
    for (int first = 0; first < count; first += kBlock) {
      const T* keys[kBlock];
      for (int j = 0; j < kBlock; ++j)
        keys[j] = entry(k_cache_, slots[std::min(first + j, count - 1)], kv_head);
      for (int r = 0; r < rows; ++r) {
        f32x16 acc[kBlock];
#pragma GCC unroll 16
        for (int j = 0; j < kBlock; ++j) acc[j] = f32x16{};
        for (int d = 0; d < width_; d += kLanes) {
          const f32x16 query = load16(x.query + r * width_ + d);
          const int left = dim_ - d;
          if (left >= kLanes) {
#pragma GCC unroll 16
            for (int j = 0; j < kBlock; ++j) acc[j] += query * load16(keys[j] + d);
          } else {
#pragma GCC unroll 16
            for (int j = 0; j < kBlock; ++j) acc[j] += query * load_part(keys[j] + d, left);
          }
        }
        sum_all(acc, x.score + r * kTile + first);
      }
    }
  }

  void score_many(const int64_t* slots, int count, int kv_head, int rows, Scratch& x) const {
    for (int j = 0; j < count; ++j) {
      const T* source = entry(k_cache_, slots[j], kv_head);
      for (int d = 0; d < dim_; ++d) x.key[d * kTile + j] = load(source[d]);
    }
    for (int j = count; j < kTile; ++j)
      for (int d = 0; d < dim_; ++d) x.key[d * kTile + j] = 0.0f;
    int r = 0;
    for (; r + 4 <= rows; r += 4)
      score_columns<4>(x.query + r * width_, x.key, x.score + r * kTile, dim_, width_);
    for (; r < rows; ++r)
      score_columns<1>(x.query + r * width_, x.key, x.score + r * kTile, dim_, width_);
  }

  const Shape shape_;
  const T *q_, *k_cache_, *v_cache_;
  T* out_;
  const int dim_, width_, group_;
};

template <typename T>
void run(const Shape& shape, const void* q, const void* k_cache, const void* v_cache,
         const int32_t* block_table, const int32_t* seq_rows, const int32_t* seq_lens,
         const int32_t* query_start_loc, void* out) {
  const Attention<T> attention(shape, static_cast<const T*>(q), static_cast<const T*>(k_cache),
                               static_cast<const T*>(v_cache), static_cast<T*>(out));
  const int block = attention.block();
  std::vector<Item> items;
  for (int32_t s = 0; s < shape.num_seqs; ++s) {
    // Later blocks see more keys, so they go first: the last thread to finish has little left.
    for (int32_t end = query_start_loc[s + 1]; end > query_start_loc[s]; end -= block) {
      const int32_t begin = std::max(query_start_loc[s], end - block);
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) items.push_back({s, h, begin, end - begin});
    }
  }
  const int64_t num_items = static_cast<int64_t>(items.size());
#pragma omp parallel if (num_items > 1)
  {
    static thread_local std::vector<float> memory;  // kept between calls
    Scratch scratch(attention.width(), memory);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_items; ++i) {
      const Item& item = items[i];
      const int32_t after = query_start_loc[item.seq + 1] - (item.first_token + item.num_tokens);
      const int64_t last_position = seq_lens[item.seq] - 1 - after;
      const int32_t* pages = block_table + seq_rows[item.seq] * shape.table_width;
      attention.run(item, pages, last_position, scratch);
    }
  }
}

}  // namespace

// dtype: 0 fp32, 1 bf16, 2 fp16. Tensors as in the Python contract, sinks in fp32 or null; tokens
// past the last sequence are left untouched (the caller zeroes them).
extern "C" void ce_paged_attention(int32_t dtype, const void* q, const void* k, const void* v,
                                   const int32_t* block_table, const int32_t* seq_rows,
                                   const int32_t* seq_lens, const int32_t* query_start_loc,
                                   void* out, const float* sinks, int64_t num_heads,
                                   int64_t num_kv_heads, int64_t head_dim, int64_t page_size,
                                   int64_t table_width, int64_t num_seqs, int64_t window,
                                   float scale, float soft_cap) {
  const Shape shape{num_heads, num_kv_heads, head_dim, page_size, table_width,
                    num_seqs,  window,       scale,    soft_cap,  sinks};
  auto call = [&](auto kernel) {
    kernel(shape, q, k, v, block_table, seq_rows, seq_lens, query_start_loc, out);
  };
  if (dtype == 0) return call(run<float>);
  if (dtype == 1) return call(run<Bf16>);
  return call(run<Fp16>);
}
