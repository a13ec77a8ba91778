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

// Whether a lane holds the right operand's one token, and not zeros, in the columns of its weights.
DEVICE bool has_token() { return LANE_SUMS ? lane_id() == (lane_id() & 3) * 9 : lane_id() < 4; }

// Piece `i` of those of x that go with chunk `which` of the unit, of the lane's token of the `eight`-th 8.
DEVICE Quad x_piece(const PackedArgs& args, const char* shared, const char* stage, i32 eight, i32 number, i32 which, i32 i) {
    Quad v = {{0, 0, 0, 0}};
    i32 column = column_of(number, which) + i * (16 / X_BYTES), token = X_KIND == X_SHARED ? 0 : eight * 8 + (lane_id() >> 2);
    if (X_KIND == X_SHARED) {
        if (has_token()) v = *(const Quad*)(shared + X_PLACE + column * 2);
    } else if (RING) {
        v = *(const Quad*)(stage + PIECES_PLACE + (((eight * 2 + which) * X_PIECES + i) * THREADS + threadIdx.x) * 16);
    } else if (token < args.num_tokens && column < args.size) {
        v = *(const Quad*)(args.x + (token * args.x_stride + column) * X_BYTES);
    }
    return v;
}

// The values of x that go with a chunk of the weight, of the lane's token.
DEVICE void load_x(const PackedArgs& args, const char* shared, const char* stage, i32 eight, i32 number, i32 which, u32 (&pairs)[PAIRS]) {
#pragma unroll
    for (i32 i = 0; i < PIECES; i++) {
        Quad v = x_piece(args, shared, stage, eight, number, which, i);
        u32 some[8];
#pragma unroll
        for (i32 j = 0; j < 4; j++) {
            if (X_BYTES == 2)
                some[j] = v.x[j];
            else
                widen_bytes(v.x[j], X_KIND == X_INT8, some[2 * j], some[2 * j + 1]);
        }
#pragma unroll
        for (i32 j = 0; j < PAIRS / PIECES; j += 4) {
            u32 four[4] = {some[j], some[j + 1], some[j + 2], some[j + 3]};
            if (IS_PACKED && X_KIND != X_SHARED) reorder(four);
#pragma unroll
            for (i32 k = 0; k < 4; k++) pairs[i * (PAIRS / PIECES) + j + k] = four[k];
        }
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
