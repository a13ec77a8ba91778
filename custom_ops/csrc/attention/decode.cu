// Attention of single tokens over the paged KV cache; see custom_ops/attention_decode_cuda.py.
//
//     out[t, h] = softmax(scale * q[t, h] . K[row(t), 0..p(t)]) @ V[row(t), 0..p(t)]
//
// A block serves one lane of the work list and one KV head. Each warp reads its own chunks of 16
// positions through its own ring of shared memory, so that nothing but the end of a unit makes warps
// wait for each other and the next units' chunks are on their way long before. Products are turned
// around, keys times queries: the query heads are the 8 columns of a product, and few of them are
// padding. In a prefix that several tokens share, all warps read all chunks, each for 16 query rows.
#include "args.cuh"
#include "load.cuh"
#include "merge.cuh"

// Queries, running maxima and sums of TILES times 8 columns of a warp.
template <int TILES> struct Rows {
    u32 q[DIM_TILES][TILES][2];
    float acc[DIM_TILES][TILES][4];  // [16 dims, 8 columns] each
    float top[TILES][2];             // of columns 2 * (lane % 4) and the next
    float total[TILES][2];           // this lane's share
    i32 low[TILES][2];               // first position that is seen; only with a window

    METHOD void clear() {
#pragma unroll
        for (i32 n = 0; n < TILES; n++) {
#pragma unroll
            for (i32 m = 0; m < DIM_TILES; m++)
                for (i32 i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
            for (i32 i = 0; i < 2; i++) top[n][i] = LOWEST, total[n][i] = 0.0f, low[n][i] = 0;
        }
    }

    // Queries of column lane / 4 of a tile; `source` is null for a column of padding.
    METHOD void load_queries(i32 n, const char* source) {
        const u32* values = (const u32*)source + (lane_id() & 3);
#pragma unroll
        for (i32 m = 0; m < DIM_TILES; m++) {
            q[m][n][0] = source ? load_fresh(values + m * 8) : 0;
            q[m][n][1] = source ? load_fresh(values + m * 8 + 4) : 0;
        }
    }
};

DEVICE float scaled(const DecodeArgs& args, float product) {
    if (!HAS_CAP) return product * args.scale;
    // tanh(x) = 1 - 2 / (exp(2 x) + 1), right for any x
    return (1.0f - 2.0f / (power_of_two(product * args.cap_in) + 1.0f)) * args.cap_out;
}

// Scores of a chunk: element i of a tile is of position lane / 4 + (i / 2) * 8, column i % 2.
template <int TILES>
DEVICE void multiply_keys(const Rows<TILES>& rows, const char* keys, float (&s)[TILES][4]) {
    i32 lane = lane_id();
    const char* row = keys + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;
    float odd[TILES][4];
#pragma unroll
    for (i32 n = 0; n < TILES; n++)
        for (i32 i = 0; i < 4; i++) s[n][i] = odd[n][i] = 0.0f;
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++) {
        Quad k = load_matrices(row + m * 32);
#pragma unroll
        for (i32 n = 0; n < TILES; n++) multiply(m & 1 ? odd[n] : s[n], k, rows.q[m][n][0], rows.q[m][n][1]);
    }
#pragma unroll
    for (i32 n = 0; n < TILES; n++)
        for (i32 i = 0; i < 4; i++) s[n][i] += odd[n][i];
}

template <int TILES>
DEVICE void attend_chunk(
    const DecodeArgs& args, Rows<TILES>& rows, const char* chunk, const Segment& segment, i32 position) {
    i32 lane = lane_id();
    float s[TILES][4];
    multiply_keys(rows, chunk, s);
    bool is_cut = args.window > 0 || position < segment.begin || position + CHUNK > segment.end;
    u32 weights[TILES][2];
#pragma unroll
    for (i32 n = 0; n < TILES; n++) {
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            s[n][i] = scaled(args, s[n][i]);
            i32 at = position + lane / 4 + i / 2 * 8;
            if (is_cut && (at < max(segment.begin, rows.low[n][i & 1]) || at >= segment.end))
                s[n][i] = NEGATIVE_INFINITY;
        }
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            float higher = larger(rows.top[n][i], column_max(larger(s[n][i], s[n][i + 2])));
            float shrink = power_of_two(rows.top[n][i] - higher);
            s[n][i] = power_of_two(s[n][i] - higher);
            s[n][i + 2] = power_of_two(s[n][i + 2] - higher);
            rows.total[n][i] = rows.total[n][i] * shrink + (s[n][i] + s[n][i + 2]);
            rows.top[n][i] = higher;
#pragma unroll
            for (i32 m = 0; m < DIM_TILES; m++) {
                rows.acc[m][n][i] *= shrink;
                rows.acc[m][n][i + 2] *= shrink;
            }
        }
        weights[n][0] = transpose_matrix(pack(s[n][0], s[n][1]));
        weights[n][1] = transpose_matrix(pack(s[n][2], s[n][3]));
    }
    const char* row = chunk + CHUNK_BYTES + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++) {
        Quad v = load_matrices_transposed(row + m * 32);
#pragma unroll
        for (i32 n = 0; n < TILES; n++) multiply(rows.acc[m][n], v, weights[n][0], weights[n][1]);
    }
}

// A warp's place in the stream of chunks.
struct Stream {
    Loader loader;
    i32 stage;

    METHOD void refill(const DecodeArgs& args, const Shared& shared, i32 kv_head) {
        loader.issue(args, ring_place(shared, warp_id(), stage), kv_head);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Writes a warp's sums to shared memory.
DEVICE void share_rows(const DecodeArgs& args, const Shared& shared, Rows<HEAD_TILES>& rows) {
    i32 lane = lane_id(), warp = warp_id();
#pragma unroll
    for (i32 n = 0; n < HEAD_TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            i32 head = n * 8 + (lane & 3) * 2 + i;
            float total = column_sum(rows.total[n][i]);
            if (lane < 4) {
                shared.tops[warp * 8 * HEAD_TILES + head] = rows.top[n][i];
                shared.totals[warp * 8 * HEAD_TILES + head] = total;
            }
            float* acc = shared.acc + (warp * args.group + head) * ACC_STRIDE + lane / 4;
            if (head < args.group)
#pragma unroll
                for (i32 m = 0; m < DIM_TILES; m++) {
                    acc[m * 16] = rows.acc[m][n][i];
                    acc[m * 16 + 8] = rows.acc[m][n][i + 2];
                }
        }
}

// Combines the warps' sums of a token into its result, or a partial one.
DEVICE void store_token(
    const DecodeArgs& args, const Shared& shared, const Segment& segment, i32 lane_number, i32 kv_head) {
    constexpr i32 columns = HEAD_DIM / 4;
    i32 num_heads = args.num_kv_heads * args.group;
    for (i32 i = threadIdx.x; i < args.group * columns; i += THREADS) {
        i32 part = i / columns, column = i % columns * 4, head = kv_head * args.group + part;
        float top = LOWEST, total = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (i32 w = 0; w < WARPS; w++) top = larger(top, shared.tops[w * 8 * HEAD_TILES + part]);
#pragma unroll
        for (i32 w = 0; w < WARPS; w++) {
            float weight = power_of_two(shared.tops[w * 8 * HEAD_TILES + part] - top);
            total += weight * shared.totals[w * 8 * HEAD_TILES + part];
            Float4 values = *(const Float4*)(shared.acc + (w * args.group + part) * ACC_STRIDE + column);
            for (i32 d = 0; d < 4; d++) acc[d] += weight * values.x[d];
        }
        float sum = top + log_of_two(total), factor = total > 0.0f ? 1.0f / total : 1.0f;
        if (segment.partial < 0 && args.sinks)
            factor /= 1.0f + power_of_two(args.sinks[head] * LOG2E - sum);
        for (i32 d = 0; d < 4; d++) acc[d] *= factor;
        if (segment.partial < 0) {
            store_result(args, segment.token, head, column, acc);
        } else {
            i64 place = (i64)(segment.partial + lane_number) * num_heads + head;
            *(Float4*)(args.partials + place * HEAD_DIM + column) = Float4{{acc[0], acc[1], acc[2], acc[3]}};
            if (column == 0) args.sums[place] = sum;
        }
    }
}

DEVICE void attend_token(
    const DecodeArgs& args, const Shared& shared, Stream& stream, const Segment& segment, i32 lane_number, i32 kv_head) {
    Rows<HEAD_TILES> rows;
    rows.clear();
#pragma unroll
    for (i32 n = 0; n < HEAD_TILES; n++) {
        i32 part = n * 8 + lane_id() / 4;
        i64 place = segment.token * args.q_token + (kv_head * args.group + part) * args.q_head;
        rows.load_queries(n, part < args.group ? args.q + place * 2 : nullptr);
    }
    // early, so that it is there when the merge needs it
    i32 record = segment.partial < 0 ? 0 : load_merge(args, segment.candidate);
    i32 num_steps = segment.steps(warp_id());
    for (i32 step = 0; step < num_steps; step++) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        i32 position = (segment.first_chunk + warp_id() + step * WARPS) * CHUNK;
        attend_chunk(args, rows, ring_place(shared, warp_id(), stream.stage), segment, position);
        __syncwarp();
        stream.refill(args, shared, kv_head);
    }
    share_rows(args, shared, rows);
    __syncthreads();
    store_token(args, shared, segment, lane_number, kv_head);
    __syncthreads();
    if (segment.partial < 0) return;
    i32 count = __shfl_sync(FULL, record, OWN_COUNT) + __shfl_sync(FULL, record, GROUP_COUNT);
    if (threadIdx.x == 0) shared.last[0] = is_last(args, segment.candidate, kv_head, count);
    __syncthreads();
    if (shared.last[0]) merge_heads(args, record, kv_head);
}

// Query row of a shared prefix's tile: its member and query head.
struct Place {
    i32 member, part;
};
DEVICE Place place_of(const DecodeArgs& args, i32 row) {
    i32 member = row / args.group;
    return {member, row - member * args.group};
}

DEVICE void load_members(
    const DecodeArgs& args, Rows<SHARED_TILES>& rows, const Segment& segment, i32 kv_head) {
    const i32* tokens = args.work + args.members + segment.token;
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++) {
        Place at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + lane_id() / 4);
        bool is_there = at.member < segment.num_members;
        i64 token = is_there ? load_fresh(tokens + at.member) : 0;
        i64 place = token * args.q_token + (kv_head * args.group + at.part) * args.q_head;
        rows.load_queries(n, is_there ? args.q + place * 2 : nullptr);
        for (i32 i = 0; i < 2 && args.window > 0; i++) {
            at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + (lane_id() & 3) * 2 + i);
            if (at.member < segment.num_members)
                rows.low[n][i] = (i32)args.positions[load_fresh(tokens + at.member)] + 1 - args.window;
        }
    }
}

DEVICE void store_members(
    const DecodeArgs& args, const Rows<SHARED_TILES>& rows, const Segment& segment, i32 lane_number, i32 kv_head) {
    i32 num_heads = args.num_kv_heads * args.group, lane = lane_id();
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            float total = column_sum(rows.total[n][i]), factor = total > 0.0f ? 1.0f / total : 1.0f;
            Place at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + (lane & 3) * 2 + i);
            if (at.member >= segment.num_members) continue;
            i64 row = segment.partial + lane_number * args.width + at.member;
            i64 place = row * num_heads + kv_head * args.group + at.part;
            float* target = args.partials + place * HEAD_DIM + lane / 4;
#pragma unroll
            for (i32 m = 0; m < DIM_TILES; m++) {
                target[m * 16] = rows.acc[m][n][i] * factor;
                target[m * 16 + 8] = rows.acc[m][n][i + 2] * factor;
            }
            if (lane < 4) args.sums[place] = rows.top[n][i] + log_of_two(total);
        }
}

DEVICE void attend_members(
    const DecodeArgs& args, const Shared& shared, Stream& stream, const Segment& segment, i32 lane_number, i32 kv_head) {
    Rows<SHARED_TILES> rows;
    rows.clear();
    load_members(args, rows, segment, kv_head);
    i32 num_steps = segment.steps(0);
    for (i32 step = 0; step < num_steps; step++) {
        wait_copies<STAGES - 1>();
        __syncthreads();
        for (i32 w = 0; w < WARPS; w++) {
            i32 chunk = segment.first_chunk + w + step * WARPS;
            if (chunk < segment.end_chunk)
                attend_chunk(args, rows, ring_place(shared, w, stream.stage), segment, chunk * CHUNK);
        }
        __syncthreads();
        stream.refill(args, shared, kv_head);
    }
    store_members(args, rows, segment, lane_number, kv_head);
    __syncthreads();
    if (threadIdx.x < segment.num_members) {
        i32 candidate = load_fresh(args.work + args.member_candidates + segment.token + threadIdx.x);
        const i32* record = args.work + args.merges + candidate * MERGE_FIELDS;
        i32 count = load_fresh(record + OWN_COUNT) + load_fresh(record + GROUP_COUNT);
        shared.last[threadIdx.x] = is_last(args, candidate, kv_head, count) ? candidate : -1;
    }
    __syncthreads();
    for (i32 i = 0; i < segment.num_members; i++)
        if (shared.last[i] >= 0) merge_heads(args, load_merge(args, shared.last[i]), kv_head);
    __syncthreads();
}

// Zeroes the tokens of padding.
DEVICE void clear_padding(const DecodeArgs& args, i32 num_real) {
    i32 pairs = args.num_kv_heads * args.group * HEAD_DIM / 2;
    for (i32 token = num_real + blockIdx.x; token < args.num_tokens; token += gridDim.x)
        for (i32 i = threadIdx.x; i < pairs; i += THREADS) ((u32*)args.out)[(i64)token * pairs + i] = 0;
}

// Grid: lanes times KV heads, the KV heads of a lane side by side.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_attention(const __grid_constant__ DecodeArgs args) {
    DYNAMIC_SHARED(memory);
    if (args.is_early) let_next_start();
    Shared shared = shared_places(memory, args.group);
    i32 kv_head = blockIdx.x % args.num_kv_heads, lane_number = blockIdx.x / args.num_kv_heads;
    i32 num_tiles = load_fresh(args.work + NUM_KV_TILES), num_real = load_fresh(args.work + NUM_REAL);
    i32 place = load_fresh(args.work + args.lanes + lane_number);
    i32 share = num_tiles / args.num_lanes, extra = num_tiles % args.num_lanes;
    i32 tile = lane_number * share + min(lane_number, extra);
    i32 stop = tile + share + (lane_number < extra);
    Stream stream;
    stream.stage = 0;
    if (tile < stop) {
        stream.loader.begin(args, place, tile, stop);
        stream.loader.prefetch_chunks(args, kv_head);
    }
    wait_for_earlier_kernels();
    if (!args.is_early) let_next_start();
    clear_padding(args, num_real);
    if (tile >= stop) return;
    Segment segment = stream.loader.segment;
    for (i32 i = 0; i < STAGES; i++) stream.refill(args, shared, kv_head);
    for (;;) {
        i32 record = load_record(args, place + 1);  // may lie past the last unit, not past the list
        if (HAS_GROUPS && segment.num_members > 0)
            attend_members(args, shared, stream, segment, lane_number, kv_head);
        else
            attend_token(args, shared, stream, segment, lane_number, kv_head);
        if (segment.next_tile >= stop) break;
        place++;
        segment = segment_of(args, record, segment.next_tile, stop);
    }
    wait_copies<0>();
}
