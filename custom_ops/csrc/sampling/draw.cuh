// The draw: the largest logit plus Gumbel noise, which is a hash of (seed, position, token).
//
// Most tokens cannot win whatever their hash, or have a hash that clearly is too small; only the
// others pay for two logarithms.
#pragma once
#include "row.cuh"

constexpr float MOST_NOISE = 16.7f;  // of 23 random bits: 16.64

DEVICE u64 mixed(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

DEVICE u32 random_bits(u64 key, i32 token) { return (u32)mixed(key + (u64)(i64)token) & 0x7fffffu; }

DEVICE float noise_of(u32 bits) {
    const float uniform = ((float)bits + 0.5f) * (1.0f / 8388608.0f);
    return -logf(-logf(uniform));
}

// Whether noise of these bits may reach `needed`. As -log(u) >= 1 - u it is at most -log(1 - u).
DEVICE bool may_reach(u32 bits, float needed) {
    const float rest = __int_as_float((i32)(0x4b000000u | (~bits & 0x7fffffu))) - 8388608.0f;
    return !(rest > power_of_two(23.002f - needed * LOG2E));
}

// The thread's largest noisy logit with its token, of those whose scaled value is at least `cut`.
DEVICE u64 draw(const Slice& slice, const Row& row, float cut, u64 key, i32 top_id, i32 vocab_size) {
    // The largest logit is always kept.
    float bound = row.best + noise_of(random_bits(key, top_id));
    const float slack = 1e-3f + slack_of(row, 100.0f);
    const float floor = raw_below(row, fmaxf(cut, bound - MOST_NOISE - slack));
    volatile u32* shared_bound = &slice.shared->bound;
    u64 best = 0;
    for_each(slice, floor, row.top, [&](float x, i32 token) {
        x = scaled(row, x);
        if (x < cut) return;
        const u32 bits = random_bits(key, token);
        if (!may_reach(bits, bound - x - slack)) return;
        bound = fmaxf(bound, value_of(*shared_bound));
        if (!may_reach(bits, bound - x - slack) || (u32)token >= (u32)vocab_size) return;
        const float noisy = x + noise_of(bits);
        best = larger(best, packed(noisy, token));
        if (noisy > bound) {
            bound = noisy;
            atomicMax(&slice.shared->bound, order_of(noisy));
        }
    });
    return best;
}
