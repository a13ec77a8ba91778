// Values of x as the right operand: lane l has token l / 4 of each 8, in the columns of its weights.
#pragma once
#include "args.cuh"

// The first column of a chunk of the lane.
DEVICE i32 column_of(i32 unit, i32 which) { return unit * UNIT + which * 4 * CHUNK + (lane_id() & 3) * CHUNK; }

// Four bytes as two pairs of what is multiplied.
DEVICE void widen_bytes(u32 bytes, bool are_integers, u32& low, u32& high) {
    if (are_integers) {  // 1024 + 128 + value is a half whose lower byte is value + 128
        bytes ^= 0x80808080;
        low = subtract_halves(choose_bytes(bytes, 0x64646464, 0x4140), 0x64806480);
        high = subtract_halves(choose_bytes(bytes, 0x64646464, 0x4342), 0x64806480);
    } else {
        halves_of_e4m3(bytes, low, high);
    }
    if (!HALF) {
        low = pack(float_of_half(low), float_of_half(low >> 16));
        high = pack(float_of_half(high), float_of_half(high >> 16));
    }
}

// Pairs of neighbours among 8 columns to the order of packed weights (see `widen_word`).
DEVICE void reorder(u32 (&pairs)[4]) {
    u32 a = pairs[0], b = pairs[1], c = pairs[2], d = pairs[3];
    if (HALF && FORMAT != INT4) {
        pairs[0] = choose_bytes(a, b, 0x5410), pairs[1] = choose_bytes(a, b, 0x7632);
        pairs[2] = choose_bytes(c, d, 0x5410), pairs[3] = choose_bytes(c, d, 0x7632);
    } else {
        pairs[0] = choose_bytes(a, c, 0x5410), pairs[1] = choose_bytes(a, c, 0x7632);
        pairs[2] = choose_bytes(b, d, 0x5410), pairs[3] = choose_bytes(b, d, 0x7632);
    }
}

// Starts the copies of what goes with a unit: lane l has token l / 4 of each 8, zeros behind the last.
DEVICE void copy_x(const PackedArgs& args, char* stage, i32 number) {
    constexpr i32 BYTES = X_KIND == X_VALUES ? 2 : 1;
    char* pieces = stage + PIECES_PLACE + threadIdx.x * 16;
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++) {
        i32 token = n * 8 + (lane_id() >> 2);
        const char* row = args.x + (i64)token * args.x_stride * BYTES;
#pragma unroll
        for (i32 i = 0; i < 2 * X_PIECES; i++) {
            i32 column = column_of(number, i / max(X_PIECES, 1)) + i % max(X_PIECES, 1) * (16 / BYTES);
            bool is_there = token < args.num_tokens && column < args.size;
            copy_async(pieces + (n * 2 * X_PIECES + i) * THREADS * 16, is_there ? row + column * BYTES : args.x, is_there ? 16 : 0);
        }
    }
}

// The lane with the columns of this one for the right operand's token.
DEVICE i32 x_lane() { return (lane_id() & 3) * (LANE_SUMS ? 9 : 1); }

// The values of x that go with chunk `which` of the unit, of the lane's token of the `eight`-th 8.
DEVICE void load_x(const char* shared, const char* stage, i32 eight, i32 number, i32 which, u32 (&pairs)[PAIRS]) {
    const char* pieces = stage + PIECES_PLACE + ((eight * 2 + which) * X_PIECES * THREADS + threadIdx.x) * 16;
#pragma unroll
    for (i32 i = 0; i < PAIRS / 4; i++) {  // of 8 columns
        u32 four[4];
        if (X_KIND == X_SHARED || X_KIND == X_VALUES) {
            Quad v = {{0, 0, 0, 0}};
            if (X_KIND == X_VALUES) v = *(const Quad*)(pieces + i * THREADS * 16);
            if (X_KIND == X_SHARED && lane_id() == x_lane()) v = *(const Quad*)(shared + X_PLACE + (column_of(number, which) + 8 * i) * 2);
#pragma unroll
            for (i32 j = 0; j < 4; j++) four[j] = v.x[j];
        } else {
            const u32* words = (const u32*)(pieces + i / 2 * THREADS * 16 + i % 2 * 8);
            widen_bytes(words[0], X_KIND == X_INT8, four[0], four[1]);
            widen_bytes(words[1], X_KIND == X_INT8, four[2], four[3]);
        }
        if (IS_PACKED && X_KIND != X_SHARED) reorder(four);
#pragma unroll
        for (i32 j = 0; j < 4; j++) pairs[i * 4 + j] = four[j];
    }
}

// Of all threads of a block; `place` of 32 values must not be in use. Ends with a barrier behind it.
DEVICE float block_reduce(float* place, float value, bool is_max) {
    value = is_max ? warp_max(value) : warp_sum(value);
    if (lane_id() == 0) place[warp_id()] = value;
    __syncthreads();
    float result = place[0];
#pragma unroll
    for (i32 i = 1; i < WARPS; i++) result = is_max ? larger(result, place[i]) : result + place[i];
    return result;
}

DEVICE float value_of(const Quad& values, i32 i) { return widen_value(values.x[i / 2] >> i % 2 * 16); }
DEVICE float amax_of(const Quad& values) {
    float amax = 0.0f;
#pragma unroll
    for (i32 i = 0; i < 8; i++) amax = larger(amax, fabsf(value_of(values, i)));
    return amax;
}

// One token on its way to shared memory: pieces of 8 columns, and the norm's weights.
struct Token {
    Quad gains[HAS_NORM ? X_PARTS : 1], values[X_PARTS];

    METHOD i32 column(i32 part) const { return (part * THREADS + threadIdx.x) * 8; }

    METHOD void load_gains(const PackedArgs& args) {
#pragma unroll
        for (i32 i = 0; i < X_PARTS; i++) {
            if (!HAS_NORM) continue;
            gains[HAS_NORM ? i : 0] = Quad{{0, 0, 0, 0}};
            if (column(i) < args.size) gains[HAS_NORM ? i : 0] = load_constant(args.norm_weight + column(i) * 2);
        }
    }

    METHOD void load_values(const PackedArgs& args) {
#pragma unroll
        for (i32 i = 0; i < X_PARTS; i++) {
            values[i] = Quad{{0, 0, 0, 0}};
            if (column(i) < args.size) values[i] = *(const Quad*)(args.x + column(i) * 2);
        }
    }

    // Norm and quantisation; returns the scale of the token, 1 if it has none or one for 128 columns.
    METHOD float prepare(const PackedArgs& args, char* shared) {
        float* reduce = (float*)(shared + REDUCE_PLACE);
        if (HAS_NORM) apply_norm(args, reduce);
        float scale = 1.0f, inverse = 1.0f;
        if (QUANT == ONE_SCALE || QUANT == INTEGERS || QUANT == SCALED) {
            float amax = 0.0f;
#pragma unroll
            for (i32 i = 0; i < X_PARTS; i++) amax = larger(amax, amax_of(values[i]));
            scale = args.x_scale ? args.x_scale[0] : scale_of(block_reduce(reduce + 32, amax, true));
            inverse = __fdiv_rn(1.0f, scale);
        }
#pragma unroll
        for (i32 i = 0; i < X_PARTS; i++) {
            if (QUANT == BLOCK_SCALES) inverse = scale_block(args, shared, i);
            if (column(i) < args.padded_size) store(shared, i, inverse);
        }
        return scale;
    }

    METHOD void apply_norm(const PackedArgs& args, float* reduce) {
        float sum = 0.0f;
#pragma unroll
        for (i32 i = 0; i < X_PARTS; i++)
#pragma unroll
            for (i32 j = 0; j < 8; j++) sum += value_of(values[i], j) * value_of(values[i], j);
        float rstd = rsqrtf(block_reduce(reduce, sum, false) / args.size + args.eps);
#pragma unroll
        for (i32 i = 0; i < X_PARTS; i++)
#pragma unroll
            for (i32 j = 0; j < 8; j += 2) {
                const Quad& gain = gains[HAS_NORM ? i : 0];
                u32 normed = round_values(value_of(values[i], j) * rstd, value_of(values[i], j + 1) * rstd);
                values[i].x[j / 2] = round_values(
                    value_of(gain, j) * widen_value(normed), value_of(gain, j + 1) * widen_value(normed >> 16));
            }
    }

    METHOD float scale_of(float amax) const {
        // the power of two that leaves less than 2^15
        if (QUANT == SCALED) return float_of((u32)max((i32)(bits_of(amax) >> 23 & 255) - 14, 1) << 23);
        return __fdiv_rn(larger(amax, 0x1p-64f), QUANT == INTEGERS ? 127.0f : 448.0f);
    }

    // A scale for 128 columns, those of 16 lanes; returns its inverse.
    METHOD float scale_block(const PackedArgs& args, char* shared, i32 part) const {
        float amax = amax_of(values[part]);
#pragma unroll
        for (i32 step = 1; step < 16; step *= 2) amax = larger(amax, __shfl_xor_sync(FULL, amax, step));
        float scale = scale_of(amax), *scales = (float*)(shared + X_PLACE + args.padded_size * 2);
        if (column(part) < args.padded_size && column(part) % 128 == 0) scales[column(part) / 128] = scale;
        return __fdiv_rn(1.0f, scale);
    }

    METHOD void store(char* shared, i32 part, float inverse) const {
        u32 pairs[4];
#pragma unroll
        for (i32 j = 0; j < 4; j++) {
            float first = value_of(values[part], 2 * j) * inverse, second = value_of(values[part], 2 * j + 1) * inverse;
            if (QUANT == PLAIN || QUANT == SCALED)
                pairs[j] = pack(first, second);
            else if (QUANT == INTEGERS)
                pairs[j] = halves_of(rintf(first), rintf(second));
            else
                pairs[j] = rounded_to_e4m3(first, second);
        }
        if (IS_PACKED) reorder(pairs);
        *(Quad*)(shared + X_PLACE + column(part) * 2) = Quad{{pairs[0], pairs[1], pairs[2], pairs[3]}};
    }
};
