// Products of mixtures of experts with weights in 4-bit floats for few pairs of token and expert: the kernel
// "packed" of `experts`. Launched by custom_ops/moe_packed.py, once for each of the two products.
//
// A block of threads owns some rows of one expert in use and multiplies them with that expert's pairs,
// TOKENS at a time: weights become 16-bit floats in registers and are the left operand of the tensor
// cores, as in packed.cu. The first product leaves inner values in the order of sorted pairs, the second
// a value for each pair, in the order of pairs; another kernel adds up those of a token.
//
// Which experts are in use is known to the first product after its wait, and it lets the second one
// start only then: so that one may load weights before its own wait.
#ifndef FORMAT
#define FORMAT MXFP4
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#include "experts.cuh"
#include "weights.cuh"

struct ExpertArgs {
    PackedArgs product;  // of one expert; weight, scales and bias of the first one
    const i32* order;    // pairs sorted by expert
    const i32* offsets;  // [num_experts + 1], of each expert's pairs in `order`
    float alpha;
    float limit;
    i32 num_experts;
    i32 num_slots;  // experts in use, at most
    i32 top_k;
    i32 rows;  // of an expert's weight
};

struct Range {
    i32 expert, begin, end;
};

// The `slot`-th expert in use; an empty range if there is none.
DEVICE Range find_expert(const ExpertArgs& args, i32 slot) {
    for (i32 first = 0, seen = 0; first < args.num_experts; first += 32) {
        i32 expert = min(first + lane_id(), args.num_experts - 1);
        i32 begin = load_fresh(args.offsets + expert), end = load_fresh(args.offsets + expert + 1);
        u32 used = __ballot_sync(FULL, end > begin && first + lane_id() < args.num_experts);
        i32 count = __popc(used);
        if (slot < seen + count) {
            for (i32 i = seen; i < slot; i++) used &= used - 1;
            i32 lane = __ffs(used) - 1;
            return Range{first + lane, __shfl_sync(FULL, begin, lane), __shfl_sync(FULL, end, lane)};
        }
        seen += count;
    }
    return Range{0, 0, 0};
}

// The rows of x of a lane's pairs, null for none.
struct Pairs {
    const char* rows[EIGHTS];

    METHOD void find(const ExpertArgs& args, const Range& range, i32 first) {
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++) {
            i32 at = first + n * 8 + (lane_id() >> 2);
            rows[n] = nullptr;
            if (at < range.end)
                rows[n] = args.product.x + (DOWN ? at : load_fresh(args.order + at) / args.top_k) * args.product.x_stride * 2;
        }
    }

    // Eight columns as the right operand.
    METHOD void load(i32 eight, i32 column, i32 size, u32 (&pairs)[4]) const {
        Quad v = {{0, 0, 0, 0}};
        if (rows[eight] && column < size) v = *(const Quad*)(rows[eight] + column * 2);
#pragma unroll
        for (i32 j = 0; j < 4; j++) pairs[j] = v.x[j];
        reorder(pairs);
    }
};

typedef float Tile[SIXTEENS][EIGHTS][4];

// A scale as a pair of equal bf16 values, times 2^126 as far as that is a number, and what is left to
// multiply by: NaN for 255.
DEVICE u32 lifted_scale(u32 scale) { return twice(min((i32)scale + 126, 254) << 7); }
DEVICE u32 rest_of_scale(u32 scale) { return twice(scale == 255 ? 0x7fc0 : max((i32)scale, 128) - 1 << 7); }

// Eight values of a word as `widen_word` orders them, times their scale; of large scales also by `rest`.
template <bool HAS_REST> DEVICE void widen_scaled(u32 word, u32 scale, u32 rest, u32 (&pairs)[4]) {
    widen_word(word, 0, pairs);
#pragma unroll
    for (i32 j = 0; j < 4; j++) {
        if (HALF) pairs[j] = multiply_pairs(pairs[j], 0x74007400);  // 2^14
        pairs[j] = multiply_pairs(pairs[j], scale);
        if (HAS_REST) pairs[j] = multiply_pairs(pairs[j], rest);
    }
}

// Eight columns of a group of 16 rows, as pairs of the upper and the lower rows, times those of all pairs.
DEVICE void multiply_eight(Tile& sums, i32 m, const u32* upper, const u32* lower, const u32 (&x)[EIGHTS][4]) {
#pragma unroll
    for (i32 j = 0; j < 4; j += 2)
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++)
            multiply(sums[m][n], Quad{{upper[j], lower[j], upper[j + 1], lower[j + 1]}}, x[n][j], x[n][j + 1]);
}

template <bool HAS_REST>
DEVICE void multiply_half(const PackedArgs& args, const Unit& unit, const Pairs& pairs, i32 column, i32 which, Tile& sums) {
    u32 scales[SIXTEENS][2];
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            const Chunk& chunk = unit.chunks[m][h][which];
            if (HALF) {
                u32 scale[SCALES];
                widen_scales(chunk, scale);
                scales[m][h] = scale[0];
            } else {
                scales[m][h] = lifted_scale(chunk.scale);
            }
        }
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        u32 x[EIGHTS][4];
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++) pairs.load(n, column + i * 8, args.size, x[n]);
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++) {
            const Chunk &up = unit.chunks[m][0][which], &low = unit.chunks[m][1][which];
            u32 upper[4], lower[4];
            widen_scaled<HAS_REST>(up.bytes.x[i], scales[m][0], rest_of_scale(up.scale), upper);
            widen_scaled<HAS_REST>(low.bytes.x[i], scales[m][1], rest_of_scale(low.scale), lower);
            multiply_eight(sums, m, upper, lower, x);
        }
    }
}

// The same of NVFP4: scales as `widen_scales` has them are numbers in 16 bits, so are the values times them.
DEVICE void multiply_whole_half(const PackedArgs& args, const Unit& unit, const Pairs& pairs, i32 column, i32 which, Tile& sums) {
    u32 scales[SIXTEENS][2][SCALES];
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (i32 h = 0; h < 2; h++) widen_scales(unit.chunks[m][h][which], scales[m][h]);
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        u32 x[EIGHTS][4];
#pragma unroll
        for (i32 n = 0; n < EIGHTS; n++) pairs.load(n, column + i * 8, args.size, x[n]);
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++) {
            u32 rows[2][4];
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                widen_word(unit.chunks[m][h][which].bytes.x[i], 0, rows[h]);
#pragma unroll
                for (i32 j = 0; j < 4; j++) rows[h][j] = multiply_pairs(rows[h][j], scales[m][h][i * SCALES / 4]);
            }
            multiply_eight(sums, m, rows[0], rows[1], x);
        }
    }
}

DEVICE void multiply_unit(const PackedArgs& args, const Unit& unit, const Pairs& pairs, i32 number, Tile& sums) {
#if FORMAT == NVFP4
#pragma unroll
    for (i32 which = 0; which < 2; which++) multiply_whole_half(args, unit, pairs, column_of(number, which), which, sums);
#else
    u32 all = 0;
#pragma unroll
    for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
        for (i32 i = 0; i < 4; i++) all = max((i32)all, (i32)unit.chunks[m][i / 2][i % 2].scale);
    bool has_rest = !HALF && __any_sync(FULL, all > 128);
#pragma unroll
    for (i32 which = 0; which < 2; which++) {
        i32 column = column_of(number, which);
        if (has_rest)
            multiply_half<true>(args, unit, pairs, column, which, sums);
        else
            multiply_half<false>(args, unit, pairs, column, which, sums);
    }
#endif
}

DEVICE float value_at(const char* p) { return widen_value(*(const unsigned short*)p); }

// The complete sum of a slot of the tile and a pair, with its bias.
DEVICE float sum_of(const ExpertArgs& args, const char* shared, i32 expert, i32 tile, i32 slot, i32 token) {
    const float* sums = (const float*)(shared + SUMS_PLACE) + slot * PITCH + token;
    float sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < WARPS; w++) sum += sums[w * ROWS * PITCH];
    sum *= args.product.factor * global_scale(args.product, expert, slot % 16 >= 8);
    i64 row = (i64)expert * args.rows + row_of(args.product, tile, slot / 16, slot % 16);
    return args.product.bias ? sum + value_at(args.product.bias + row * 2) : sum;
}

DEVICE void finish(const ExpertArgs& args, const char* shared, const Range& range, i32 first, i32 tile) {
    for (i32 i = threadIdx.x; i < OUTPUTS * TOKENS; i += THREADS) {
        i32 inside = i % OUTPUTS, token = i / OUTPUTS, output = tile * OUTPUTS + inside, at = first + token;
        if (at >= range.end || output >= args.product.num_outputs) continue;
        i32 slot = GATED ? inside / 8 * 16 + inside % 8 : inside;
        float y = sum_of(args, shared, range.expert, tile, slot, token);
        if (GATED) y = activate(args, y, sum_of(args, shared, range.expert, tile, slot + 8, token));
        i32 row = DOWN ? load_fresh(args.order + at) : at;
        *(unsigned short*)(args.product.out + ((i64)row * args.product.num_outputs + output) * 2) =
            (unsigned short)round_values(y, 0.0f);
    }
}

// Grid: a block for each tile of rows of each expert that may be in use, those of an expert in a row.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) expert_product(const __grid_constant__ ExpertArgs args) {
    DYNAMIC_SHARED(shared);
    if (!DOWN) wait_for_earlier_kernels();
    let_next_start();
    i32 slot = blockIdx.x / args.product.num_tiles, tile = blockIdx.x % args.product.num_tiles;
    Range range = find_expert(args, slot);
    if (range.begin == range.end) return;
    PackedArgs product = args.product;
    product.weight += (i64)range.expert * args.rows * product.row_bytes;
    product.scale += (i64)range.expert * args.rows * product.scale_columns;
    u64 policy = cache_policy(false);
    Rows at;
    at.find(product, tile);
    for (i32 first = range.begin; first < range.end; first += TOKENS) {
        Unit units[AHEAD];
#pragma unroll
        for (i32 i = 0; i < AHEAD; i++) load_unit(product, units[i], at, i * WARPS + warp_id(), policy);
        if (DOWN && first == range.begin) wait_for_earlier_kernels();
        Pairs pairs;
        pairs.find(args, range, first);
        Tile sums = {};
        for (i32 done = 0; done < product.warp_units; done += AHEAD)
#pragma unroll
            for (i32 i = 0; i < AHEAD; i++) {
                i32 number = (done + i) * WARPS + warp_id();
                multiply_unit(product, units[i], pairs, number, sums);
                if (done + AHEAD < product.warp_units) load_unit(product, units[i], at, number + AHEAD * WARPS, policy);
            }
        float* place = (float*)(shared + SUMS_PLACE) + (warp_id() * ROWS + (lane_id() >> 2)) * PITCH + (lane_id() & 3) * 2;
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 n = 0; n < EIGHTS; n++)
#pragma unroll
                for (i32 i = 0; i < 4; i++) place[(m * 16 + i / 2 * 8) * PITCH + n * 8 + i % 2] = sums[m][n][i];
        __syncthreads();
        finish(args, shared, range, first, tile);
        __syncthreads();  // the sums have been read
    }
}
