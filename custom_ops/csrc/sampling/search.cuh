// The cut of top-k and top-p, exactly and without a sort: histograms of a row, finer every time.
//
// The cut is the largest logit t such that the logits from t on are k, or weigh the share p of all.
// The first histogram is over the distance from the largest logit, 32 octaves of weight; the bin in
// which the target is reached is divided further by the order of floats, until it is one value.
//
// Weights are integers: within a bin all have nearly the same exponent, so the sum of their mantissas
// is exact and does not depend on the order in which threads add. Two digits fit the 32-bit atomics
// of shared memory.
#pragma once
#include "row.cuh"

constexpr i32 PER_OCTAVE = BINS / 32;
constexpr float BINS_PER_UNIT = PER_OCTAVE * LOG2E;
constexpr float ROUNDED_AT = 8388608.0f;  // 2^23: adding it rounds to an integer
constexpr i32 DIGIT_BITS = 13;
constexpr i32 WEIGHT_BITS = 25;
// Scaled logits this far below the largest have no weight: 57 octaves and more.
constexpr float FAR = 42.0f;

struct Found {
    u32 place;     // the bin in which the target is reached
    double above;  // count or weight of the bins before, and of what lies above the histogram
};

// Bin of a scaled logit in the first histogram, from the largest on; monotone.
DEVICE u32 bin_of(const Row& row, float x) {
    const float rounded = __fmaf_rn(__fsub_rn(row.best, x), BINS_PER_UNIT, ROUNDED_AT);
    const u32 bin = (u32)__float_as_int(rounded) - (u32)__float_as_int(ROUNDED_AT);
    return bin < BINS - 1 ? bin : BINS - 1;
}

// exp(x - best) of a scaled logit in units of 2^-(WEIGHT_BITS + octave).
DEVICE u32 weight_of(const Row& row, float x, u32 octave) {
    const float weight = expf(__fsub_rn(x, row.best));
    return __float2uint_rn(weight * __int_as_float((i32)((127u + WEIGHT_BITS + octave) << 23)));
}

// What a thread adds to a histogram; equal bins in a row are one addition.
struct Adder {
    u32 (*bins)[2];
    u32 bin;
    u32 high;
    u32 low;
};

template <bool IS_WEIGHT> DEVICE void flush(Adder& adder) {
    if (IS_WEIGHT && adder.high) atomicAdd(&adder.bins[adder.bin][0], adder.high);
    if (adder.low) atomicAdd(&adder.bins[adder.bin][1], adder.low);
}

template <bool IS_WEIGHT> DEVICE void add(Adder& adder, u32 bin, u32 amount) {
    if (bin != adder.bin) {
        flush<IS_WEIGHT>(adder);
        adder.bin = bin;
        adder.high = adder.low = 0;
    }
    if (IS_WEIGHT) adder.high += amount >> DIGIT_BITS;
    adder.low += IS_WEIGHT ? amount & ((1u << DIGIT_BITS) - 1) : 1u;
}

// The cluster's count or weight in a bin.
template <bool IS_WEIGHT> DEVICE double amount_in(const Slice& slice, u32 buffer, u32 bin, u32 octave) {
    u64 high = 0, low = 0;
#pragma unroll
    for (u32 rank = 0; rank < CLUSTER; rank++) {
        const u64 digits = *(const u64*)peer(slice.shared->bins[buffer][bin], rank);
        high += (u32)digits;
        low += digits >> 32;
    }
    if (!IS_WEIGHT) return (double)low;
    return (double)((high << DIGIT_BITS) + low) * __longlong_as_double((i64)(1023 - WEIGHT_BITS - octave) << 52);
}

// The bin of the histogram in `buffer` in which `target` is reached; clears the other buffer.
// `share` is above 0 where the target is this share of everything in the histogram.
template <bool IS_WEIGHT>
DEVICE Found find(const Slice& slice, u32 buffer, u32 octave, double above, double& target, float share) {
    Exchange& shared = *slice.shared;
    const i32 warp = slice.thread / 32, lane = slice.thread % 32;
    cluster_sync();
    double sum = 0.0;
    if (slice.thread < BINS) {
        sum = amount_in<IS_WEIGHT>(slice, buffer, slice.thread, share >= 0.0f ? slice.thread / PER_OCTAVE : octave);
        *(u64*)shared.bins[buffer ^ 1][slice.thread] = 0;
    }
#pragma unroll
    for (i32 delta = 1; delta < 32; delta <<= 1) {
        const double other = __shfl_up_sync(FULL, sum, delta);
        if (lane >= delta) sum += other;
    }
    const double sum_before = __shfl_up_sync(FULL, sum, 1);
    if (lane == 31) shared.warp_sums[warp] = sum;
    block_sync();
    double before = 0.0, total = 0.0;
#pragma unroll
    for (i32 i = 0; i < BINS / 32; i++) {
        if (i == warp) before = total;
        total += shared.warp_sums[i];
    }
    if (IS_WEIGHT && share >= 0.0f) target = total * (double)share;
    // Sums of parts may miss a target that the sum of the whole has reached, by rounding.
    const double limit = fmin(target, above + total);
    const double reached_before = above + (lane ? before + sum_before : before);
    const bool is_first = slice.thread == 0 || reached_before < limit;
    if (slice.thread < BINS && is_first && above + (before + sum) >= limit) {
        shared.place = slice.thread;
        shared.above = reached_before;
    }
    block_sync();
    return {shared.place, shared.above};
}

// Order of a logit, without the bits that say nothing; one for both zeros, which are equal.
DEVICE u32 key_of(float x) { return order_of(x + 0.0f) >> SHIFT; }
DEVICE float key_value(u32 key) {
    const u32 order = key << SHIFT;
    return value_of(order & 0x80000000u ? order : order | ((1u << SHIFT) - 1));
}

// The largest logit t such that `count` logits are at least t or, if IS_WEIGHT, such that the logits
// from t on have the share `share` of the weight of those whose scaled value is at least `cut`.
template <bool IS_WEIGHT>
DEVICE float search(const Slice& slice, const Row& row, u32& buffer, float cut, float share, i32 count) {
    Exchange& shared = *slice.shared;
    const float floor = IS_WEIGHT ? raw_below(row, fmaxf(cut, row.best - FAR)) : LOWEST;
    double target = count;
    Adder adder = {shared.bins[buffer], 0, 0, 0};
    for_each(slice, floor, row.top, [&](float x, i32) {
        x = scaled(row, x);
        if (IS_WEIGHT && x < cut) return;
        const u32 bin = bin_of(row, x);
        add<IS_WEIGHT>(adder, bin, IS_WEIGHT ? weight_of(row, x, bin / PER_OCTAVE) : 1u);
    });
    flush<IS_WEIGHT>(adder);
    Found found = find<IS_WEIGHT>(slice, buffer, 0, 0.0, target, IS_WEIGHT ? share : 0.0f);
    buffer ^= 1;
    const u32 first = found.place;
    const float distance = (float)first * (1.0f / BINS_PER_UNIT), half = 0.5f / BINS_PER_UNIT;
    u32 low = key_of(floor), high = key_of(row.top);
    if (first < BINS - 1) low = max(low, key_of(raw_below(row, row.best - (distance + half))));
    if (first > 0) high = key_of(raw_above(row, row.best - (distance - half)));
    while (low < high) {
        const i32 bits = 32 - __clz((i32)(high - low));
        const i32 shift = bits > LOG_BINS ? bits - LOG_BINS : 0;
        adder = {shared.bins[buffer], 0, 0, 0};
        for_each(slice, key_value(low), key_value(high), [&](float x, i32) {
            const u32 key = key_of(x), bin = (high - key) >> shift;
            x = scaled(row, x);
            // A zero compares as inside where only the other zero is.
            if (key < low || key > high) return;
            if (bin_of(row, x) != first || (IS_WEIGHT && x < cut)) return;
            add<IS_WEIGHT>(adder, bin, IS_WEIGHT ? weight_of(row, x, first / PER_OCTAVE) : 1u);
        });
        flush<IS_WEIGHT>(adder);
        found = find<IS_WEIGHT>(slice, buffer, first / PER_OCTAVE, found.above, target, -1.0f);
        buffer ^= 1;
        high -= found.place << shift;
        low = max(low, high - min(high, (1u << shift) - 1));
    }
    return key_value(low);
}
