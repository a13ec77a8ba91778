// A row of logits, spread over the shared memory of a cluster: arguments, shared memory, passes.
#pragma once
#include "device.cuh"

// Mirrored in custom_ops/sampling_cluster.py. Settings are [R] with strides, or [S] without `rows`.
struct SampleArgs {
    const char* logits;  // [S, padded vocabulary]
    const float* temperature;
    const i32* top_k;
    const float* top_p;
    const float* min_p;
    const i64* seed;
    const void* position;  // i64 if `is_wide`, else i32
    const i32* rows;       // [S] or null
    const i32* stop_ids;   // [R, num_stops]
    const u8* mask_bits;   // [R, bytes] or null: bit i % 8 of byte i / 8, whether token i is allowed
    const u8* has_grammar;  // [R]; the masks of other rows are not read
    i32* tokens;           // [R] or, without `rows`, [S]
    u8* stops;             // the same; untouched without `rows`
    i64 row_stride;        // of the logits, in values
    i64 stop_stride;
    i64 mask_stride;
    i32 temperature_stride;
    i32 top_k_stride;
    i32 top_p_stride;
    i32 min_p_stride;
    i32 seed_stride;
    i32 position_stride;
    i32 num_rows;
    i32 num_stops;
    i32 vocab_size;
    i32 slice;  // vectors of 16 bytes that a block holds at most
    i32 is_wide;
};

constexpr i32 VALUE_BYTES = KIND == 0 ? 4 : 2;
constexpr i32 PER_VECTOR = 16 / VALUE_BYTES;
// Low bits of a logit's order that say nothing.
constexpr i32 SHIFT = KIND == 0 ? 0 : KIND == 1 ? 16 : 13;
// A word of the lowest value, once or twice; of fp16 it is -inf.
constexpr u32 LOWEST_BITS = KIND == 0 ? 0xff7f0000u : KIND == 1 ? 0xff7fff7fu : 0xfc00fc00u;

// What the blocks of a cluster exchange, and the threads of a block; then the slice of the row.
struct Exchange {
    u32 bins[2][BINS][2];
    u64 slots[2][CLUSTER];  // written by every block of the cluster
    u64 warp_best[WARPS];
    double warp_sums[WARPS];
    double above;
    u32 place;
    u32 bound;  // order of a noisy logit that some thread has
};
constexpr i32 EXCHANGE_BYTES = 16 * BINS + 1024;
static_assert(sizeof(Exchange) <= EXCHANGE_BYTES, "mirrored in custom_ops/sampling_cluster.py");

struct Slice {
    Exchange* shared;
    const char* values;
    u32 rank;
    i32 thread;
    i32 num_vectors;
    i32 first_id;  // token of the first value; may lie outside the row
};

struct Row {
    float temperature;  // what logits are divided by
    float inverse;
    bool is_plain;  // whether a quotient may be made of products
    float top;      // largest logit
    float best;     // the same, scaled
};

DEVICE float value_at(const char* values, i32 i) {
#if KIND == 0
    return fmaxf(((const float*)values)[i], LOWEST);
#elif KIND == 1
    return fmaxf(__int_as_float((i32)((u32)((const u16*)values)[i] << 16)), LOWEST);
#else
    return fmaxf(widen_half(((const u16*)values)[i]), LOWEST);
#endif
}

DEVICE float raw_in(const Quad& vector, i32 i) {
#if KIND == 0
    return __int_as_float((i32)vector.x[i]);
#elif KIND == 1
    const u32 pair = vector.x[i / 2];
    return __int_as_float((i32)(i % 2 ? pair & 0xffff0000u : pair << 16));
#else
    return widen_half((u16)(vector.x[i / 2] >> (i % 2 * 16)));
#endif
}

DEVICE float value_in(const Quad& vector, i32 i) { return fmaxf(raw_in(vector, i), LOWEST); }

// Vector `i` of the slice, some of whose values are outside the row: these become the lowest.
DEVICE Quad edge_vector(const char* source, i32 first_id, i32 vocab_size) {
    Quad vector;
#pragma unroll
    for (i32 j = 0; j < 4; j++) vector.x[j] = LOWEST_BITS;
#pragma unroll
    for (i32 j = 0; j < PER_VECTOR; j++) {
        if ((u32)(first_id + j) >= (u32)vocab_size) continue;
#if KIND == 0
        vector.x[j] = ((const u32*)source)[j];
#else
        const u32 bits = ((const u16*)source)[j], shift = j % 2 * 16;
        vector.x[j / 2] = (vector.x[j / 2] & ~(0xffffu << shift)) | bits << shift;
#endif
    }
    return vector;
}

// Which of a vector's tokens a row's mask allows, a bit each; those outside the row are not.
DEVICE u32 allowed_in(const u8* mask, i32 first_id, i32 vocab_size, bool is_inside) {
    if (is_inside) {
        const i32 last = (first_id + PER_VECTOR - 1) / 8;
        return ((u32)mask[first_id / 8] | (u32)mask[last] << 8) >> (first_id % 8);
    }
    u32 allowed = 0;
    for (i32 j = 0; j < PER_VECTOR; j++) {
        const i32 id = first_id + j;
        if ((u32)id < (u32)vocab_size) allowed |= (u32)(mask[id / 8] >> (id % 8) & 1) << j;
    }
    return allowed;
}

// The same vector with the lowest value in the place of what is not allowed, but for a NaN.
DEVICE Quad masked_vector(const Quad& vector, u32 allowed) {
    Quad kept = vector;
#pragma unroll
    for (i32 j = 0; j < PER_VECTOR; j++) {
        const float x = raw_in(vector, j);
        if (allowed >> j & 1 || x != x) continue;
#if KIND == 0
        kept.x[j] = LOWEST_BITS;
#else
        kept.x[j / 2] = (kept.x[j / 2] & (0xffff0000u >> j % 2 * 16)) | (LOWEST_BITS & 0xffffu << j % 2 * 16);
#endif
    }
    return kept;
}

// Copies this block's part of a row to shared memory, as `mask` leaves it if IS_MASKED. Vectors are
// aligned in global memory, so the first and the last may begin before the row or end after it.
//
// Returns the thread's largest logit with its token, or 0; NAN_PAIR if it has seen a NaN.
template <bool IS_MASKED>
DEVICE u64 load_slice(Slice& slice, const char* row, const u8* mask, i32 vocab_size, i32 max_vectors) {
    const i32 skew = (i32)((u64)row % 16) / VALUE_BYTES;
    const i32 whole = (vocab_size + skew + PER_VECTOR - 1) / PER_VECTOR;
    const i32 start = (i32)slice.rank * max_vectors;
    slice.num_vectors = min(max(whole - start, 0), max_vectors);
    slice.first_id = start * PER_VECTOR - skew;
    const char* source = row + (i64)slice.first_id * VALUE_BYTES;
    float best = __int_as_float((i32)0xff800000u);
    i32 best_vector = -1;
    bool is_nan = false;
#pragma unroll 4
    for (i32 v = slice.thread; v < slice.num_vectors; v += BLOCK) {
        const i32 id = slice.first_id + v * PER_VECTOR;
        const bool is_inside = id >= 0 && id + PER_VECTOR <= vocab_size;
        const char* place = source + (i64)v * 16;
        Quad vector = is_inside ? *(const Quad*)place : edge_vector(place, id, vocab_size);
        if (IS_MASKED) vector = masked_vector(vector, allowed_in(mask, id, vocab_size, is_inside));
        ((Quad*)slice.values)[v] = vector;
        float top = LOWEST;
#pragma unroll
        for (i32 j = 0; j < PER_VECTOR; j++) {
            const float x = raw_in(vector, j);
            is_nan |= x != x;
            top = fmaxf(top, x);
        }
        if (top > best) {
            best = top;
            best_vector = v;
        }
    }
    if (is_nan) return NAN_PAIR;
    if (best_vector < 0) return 0;
    for (i32 j = 0; j < PER_VECTOR; j++) {
        const i32 i = best_vector * PER_VECTOR + j, id = slice.first_id + i;
        if (value_at(slice.values, i) == best && (u32)id < (u32)vocab_size) return packed(best, id);
    }
    return 0;
}

// Calls `body(value, token)` for the thread's logits in [low, high].
template <class Body> DEVICE void for_each(const Slice& slice, float low, float high, Body body) {
    for (i32 v = slice.thread; v < slice.num_vectors; v += BLOCK) {
        const Quad vector = ((const Quad*)slice.values)[v];
        u32 wanted = 0;
#pragma unroll
        for (i32 j = 0; j < PER_VECTOR; j++) {
            const float x = value_in(vector, j);
            wanted |= (u32)(x >= low && x <= high) << j;
        }
        while (wanted) {
            const i32 i = v * PER_VECTOR + __ffs((i32)wanted) - 1;
            wanted &= wanted - 1;
            body(value_at(slice.values, i), slice.first_id + i);
        }
    }
}

// Sends the block's largest pair to every block of the cluster. The barrier follows.
DEVICE void send_best(const Slice& slice, u64 mine, i32 slot) {
    const i32 warp = slice.thread / 32, lane = slice.thread % 32;
    mine = warp_largest(mine);
    if (lane == 0) slice.shared->warp_best[warp] = mine;
    block_sync();
    if (warp) return;
    mine = warp_largest(lane < WARPS ? slice.shared->warp_best[lane] : 0);
    if (lane < CLUSTER) peer(slice.shared->slots[slot], lane)[slice.rank] = mine;
}

// The cluster's largest pair, after the barrier.
DEVICE u64 received_best(const Slice& slice, i32 slot) {
    u64 best = 0;
#pragma unroll
    for (i32 i = 0; i < CLUSTER; i++) best = larger(best, slice.shared->slots[slot][i]);
    return best;
}

DEVICE Row row_of(float temperature, float top) {
    Row row;
    row.temperature = fmaxf(temperature, 1e-6f);
    row.inverse = __frcp_rn(row.temperature);
    row.is_plain = fabsf(top) < 0x1p60f && row.temperature < 0x1p40f;
    row.top = top;
    return row;
}

// A logit over the temperature, rounded once. Products give the right quotient where nothing
// underflows, as in a division by software; what overflows is below the lowest anyway.
DEVICE float scaled(const Row& row, float x) {
    float quotient = x;
    if (row.temperature != 1.0f) {
        if (row.is_plain && fabsf(x) > 0x1p-60f) {
            quotient = __fmul_rn(x, row.inverse);
            quotient = __fmaf_rn(__fmaf_rn(-quotient, row.temperature, x), row.inverse, quotient);
            quotient = __fmaf_rn(__fmaf_rn(-quotient, row.temperature, x), row.inverse, quotient);
        } else {
            quotient = __fdiv_rn(x, row.temperature);
        }
    }
    return fmaxf(quotient, SCALED_LOWEST);
}

// How far off a scaled logit may be that was computed another way.
DEVICE float slack_of(const Row& row, float x) { return (fabsf(row.best) + fabsf(x)) * 1e-6f + 1e-30f; }

// A value that no logit is below whose scaled value is at least `x`, and one that none is above.
DEVICE float raw_below(const Row& row, float x) {
    const float y = (x - slack_of(row, x)) * row.temperature;
    return x <= SCALED_LOWEST ? LOWEST : fmaxf(fminf(y - fabsf(y) * 1e-6f - 1e-37f, row.top), LOWEST);
}
DEVICE float raw_above(const Row& row, float x) {
    const float y = (x + slack_of(row, x)) * row.temperature;
    return fmaxf(fminf(y + fabsf(y) * 1e-6f + 1e-37f, row.top), LOWEST);
}
