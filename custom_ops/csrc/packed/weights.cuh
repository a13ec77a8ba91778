// Weights on their way to registers, and what they become there.
#pragma once
#include "x.cuh"

constexpr i32 SCALES = FORMAT == NVFP4 ? 2 : 1;  // 16-bit values that a chunk of packed ones is multiplied by

// Of one row: 16 bytes, and what belongs to them as it lies in memory.
struct Chunk {
    Quad bytes;
    u32 scale;
    u32 zero;
};

// 128 bytes of each row of a tile, over four lanes: lane l has rows l / 4 and l / 4 + 8 of each 16.
struct Unit {
    Chunk chunks[SIXTEENS][2][2];  // [group, row, which]
    float block_scales[SIXTEENS][2];
};

// Where a lane's rows of a tile begin: bytes of the weight, scales.
struct Rows {
    u32 bytes[SIXTEENS][2], scales[SIXTEENS][2];

    METHOD void find(const PackedArgs& args, i32 tile) {
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                u32 row = row_of(args, tile, m, (lane_id() >> 2) + h * 8);
                bytes[m][h] = row * args.row_bytes;
                scales[m][h] = row / max(ROW_BLOCK, 1) * args.scale_columns;
            }
    }
};

// The byte of memory in which the scales of a chunk begin; a chunk's lie within an aligned word.
DEVICE u32 scale_place(u32 first, u32 column) {
    if (FORMAT == NVFP4) return first + column / 16;
    if (FORMAT == MXFP4) return first + column / 32;
    return (first + (column >> GROUP_BITS)) * 2;
}

// Behind the last column the last bytes come again; x is zero there.
DEVICE u32 byte_of(const PackedArgs& args, i32 number, i32 which) {
    return min(number * 128 + which * 64 + (lane_id() & 3) * 16, args.row_bytes - 16);
}
DEVICE i32 block_of(const PackedArgs& args, i32 number) { return min(number, args.scale_columns - 1); }

DEVICE void load_scales(const PackedArgs& args, Chunk& chunk, u32 place) {
    chunk.scale = FORMAT == MXFP4 ? load_byte(args.scale + place) : load_short(args.scale + place);
    if (FORMAT == INT4)
        chunk.zero = OFFSETS ? load_short(args.zero + place) : args.zero ? load_byte(args.zero + place / 2) : 8;
}

// A unit of weights to registers.
DEVICE void load_unit(const PackedArgs& args, Unit& unit, const Rows& at, i32 number, u64 policy) {
#pragma unroll
    for (i32 which = 0; which < 2; which++) {
        u32 byte = byte_of(args, number, which);
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                Chunk& chunk = unit.chunks[m][h][which];
                chunk.bytes = load_once(args.weight + (at.bytes[m][h] + byte), policy);
                if (IS_PACKED) load_scales(args, chunk, scale_place(at.scales[m][h], byte * 2));
            }
    }
    if (ROW_BLOCK)
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 h = 0; h < 2; h++)
                unit.block_scales[m][h] = load_constant((const float*)args.scale + (at.scales[m][h] + block_of(args, number)));
}

DEVICE u32 twice(u32 value) { return value | value << 16; }

// The scales of a chunk as pairs of equal 16-bit values, times a power of two that `args.factor` undoes.
DEVICE void widen_scales(const Chunk& chunk, u32 (&scales)[SCALES]) {
    if (FORMAT == NVFP4) {
        // times 2^7 (fp16) or 2^117 (bf16)
        u32 both = halves_of_e4m3(chunk.scale);
#if HALF
        both = multiply_pairs(both, 0x58005800);
        scales[0] = choose_bytes(both, both, 0x1010), scales[SCALES - 1] = choose_bytes(both, both, 0x3232);
        return;
#endif
        float first = float_of_half(both), second = float_of_half(both >> 16), up = HALF ? 128.0f : 0x1p117f;
        scales[0] = pack(first * up, first * up), scales[SCALES - 1] = pack(second * up, second * up);
    } else if (FORMAT == MXFP4) {
#if HALF
        float scale = float_of(chunk.scale << 23);
        scales[0] = pack(fminf(scale, 32768.0f), fminf(scale, 32768.0f));
#else
        scales[0] = twice(chunk.scale ? chunk.scale << 7 : 0x40);  // 2^-127 is not a normal number
#endif
    } else {
        scales[0] = twice(chunk.scale);
    }
}

// Eight values of a word as pairs of columns: by halves of fp16 (0, 2), (1, 3), (4, 6), (5, 7), which
// are the neighbours among its even and its odd nibbles; else (0, 4), (1, 5), (2, 6), (3, 7). e2m1
// times 2^-14 (fp16) or 2^-126.
DEVICE void widen_word(u32 word, u32 zero, u32 (&pairs)[4]) {
    if (FORMAT == INT4) {
        constexpr u32 BASE = HALF ? 0x64006400 : 0x43004300;  // 1024 or 128, to which codes are added
        u32 base = twice(zero) | BASE;
#pragma unroll
        for (i32 i = 0; i < 4; i++) pairs[i] = subtract_pairs((word >> 4 * i & 0x000f000f) | BASE, base);
    } else if (HALF) {
        // the upper bytes of halves: the sign, two bits of exponent, one of mantissa
        u32 even = (word << 4 & 0x80808080) | (word << 1 & 0x0e0e0e0e);
        u32 odd = (word & 0x80808080) | (word >> 3 & 0x0e0e0e0e);
        pairs[0] = choose_bytes(even, 0, 0x1404), pairs[1] = choose_bytes(odd, 0, 0x1404);
        pairs[2] = choose_bytes(even, 0, 0x3424), pairs[3] = choose_bytes(odd, 0, 0x3424);
    } else {
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            u32 low = i < 2 ? word : word >> 8;  // nibbles of this pair are at 0 and 16, or at 4 and 20
            pairs[i] = (low << (12 - i % 2 * 4) & 0x80008000) | (low << (6 - i % 2 * 4) & 0x01c001c0);
        }
    }
}

// The values of a chunk as pairs of what is multiplied; packed ones in the order of `widen_word`, with
// their scales or without.
DEVICE void widen_chunk(const Chunk& chunk, u32 (&pairs)[PAIRS]) {
#if FORMAT >= NVFP4
    u32 scales[SCALES];
    if (!LANE_SUMS) widen_scales(chunk, scales);
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        u32 four[4];
        widen_word(chunk.bytes.x[i], OFFSETS ? 8 : chunk.zero, four);
#pragma unroll
        for (i32 j = 0; j < 4; j++) {
            if (FORMAT == MXFP4 && !LANE_SUMS)
                four[j] = multiply_pairs(four[j], HALF ? 0x74007400 : 0x7e807e80);  // 2^14 or 2^126
            if (OFFSETS && !LANE_SUMS)
                pairs[i * 4 + j] = multiply_add_pairs(four[j], scales[i * SCALES / 4], twice(chunk.zero));
            else
                pairs[i * 4 + j] = LANE_SUMS ? four[j] : multiply_pairs(four[j], scales[i * SCALES / 4]);
        }
    }
#else
#pragma unroll
    for (i32 i = 0; i < 4; i++) widen_bytes(chunk.bytes.x[i], FORMAT == INT8, pairs[i * 2], pairs[i * 2 + 1]);
#endif
}

// The scales of a chunk for sums of its values without them, but for `args.factor`.
DEVICE void sum_scales(const Chunk& chunk, float (&scales)[SCALES]) {
    if (FORMAT == NVFP4) {
        u32 both = halves_of_e4m3(chunk.scale);
        scales[0] = float_of_half(both), scales[SCALES - 1] = float_of_half(both >> 16);
    } else if (FORMAT == MXFP4) {
        u32 bits = chunk.scale ? chunk.scale << 23 : 0x400000u;  // 2^-127 is not a normal number
        scales[0] = float_of(chunk.scale == 255 ? 0x7fc00000u : bits);
    } else {
        scales[0] = widen_value(chunk.scale);
    }
}
