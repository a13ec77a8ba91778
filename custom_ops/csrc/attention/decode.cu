// Attention of single tokens over the paged KV cache; see custom_ops/attention_decode_cuda.py.
//
//     out[t, h] = softmax(scale * q[t, h] . K[row(t), 0..p(t)]) @ V[row(t), 0..p(t)]
//
// A block serves one lane of the work list and one KV head. Each warp reads its own chunks of 16
// positions through its own ring of shared memory, so that nothing but the end of a unit makes warps
// wait for each other and the next units' chunks are on their way long before. Products are turned
// around, keys times queries: the query heads are the 8 columns of a product, and few of them are
// padding. In a prefix that several tokens share, all warps read all chunks, each for 16 query rows.
// What a lane leaves unfinished is merged at its end, by whoever finishes last.
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

// Turns products of tile n into weights, of PARTS chunks at once. `first` is the position of this
// lane's first row, or -1 if all positions are seen.
template <int PARTS, int TILES>
DEVICE void weigh_columns(
    const DecodeArgs& args, Rows<TILES>& rows, float (&s)[PARTS][TILES][4], i32 n, const Segment& segment, i32 first) {
#pragma unroll
    for (i32 w = 0; w < PARTS; w++)
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            s[w][n][i] = scaled(args, s[w][n][i]);
            i32 at = first + w * CHUNK + i / 2 * 8;
            if (first >= 0 && (at < max(segment.begin, rows.low[n][i & 1]) || at >= segment.end))
                s[w][n][i] = NEGATIVE_INFINITY;
        }
#pragma unroll
    for (i32 i = 0; i < 2; i++) {
        float higher = larger(s[0][n][i], s[0][n][i + 2]), sum = 0.0f;
#pragma unroll
        for (i32 w = 1; w < PARTS; w++) higher = larger(higher, larger(s[w][n][i], s[w][n][i + 2]));
        higher = larger(rows.top[n][i], column_max(higher));
        float shrink = power_of_two(rows.top[n][i] - higher);
#pragma unroll
        for (i32 w = 0; w < PARTS; w++) {
            s[w][n][i] = power_of_two(s[w][n][i] - higher);
            s[w][n][i + 2] = power_of_two(s[w][n][i + 2] - higher);
            sum += s[w][n][i] + s[w][n][i + 2];
        }
        rows.total[n][i] = rows.total[n][i] * shrink + sum;
        rows.top[n][i] = higher;
#pragma unroll
        for (i32 m = 0; m < DIM_TILES; m++) {
            rows.acc[m][n][i] *= shrink;
            rows.acc[m][n][i + 2] *= shrink;
        }
    }
}

// A chunk of this warp.
template <int TILES>
DEVICE void attend_chunk(
    const DecodeArgs& args, Rows<TILES>& rows, const char* chunk, const Segment& segment, i32 position) {
    i32 lane = lane_id();
    float s[1][TILES][4];
    multiply_keys(rows, chunk, s[0]);
    bool is_cut = args.window > 0 || position < segment.begin || position + CHUNK > segment.end;
    u32 weights[TILES][2];
#pragma unroll
    for (i32 n = 0; n < TILES; n++) {
        weigh_columns(args, rows, s, n, segment, is_cut ? position + lane / 4 : -1);
        weights[n][0] = transpose_matrix(pack(s[0][n][0], s[0][n][1]));
        weights[n][1] = transpose_matrix(pack(s[0][n][2], s[0][n][3]));
    }
    const char* row = chunk + CHUNK_BYTES + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++) {
        Quad v = load_matrices_transposed(row + m * 32);
#pragma unroll
        for (i32 n = 0; n < TILES; n++) multiply(rows.acc[m][n], v, weights[n][0], weights[n][1]);
    }
}

// The chunks of all warps at once, for a prefix that tokens share.
template <int TILES>
DEVICE void attend_step(
    const DecodeArgs& args, Rows<TILES>& rows, const char* chunks, const Segment& segment, i32 position) {
    constexpr i32 apart = STAGES * 2 * CHUNK_BYTES;  // a stage of a warp from that of the next
    i32 lane = lane_id();
    float s[WARPS][TILES][4];
#pragma unroll
    for (i32 w = 0; w < WARPS; w++)
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
            for (i32 i = 0; i < 4; i++) s[w][n][i] = 0.0f;
    const char* row = chunks + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++)
#pragma unroll
        for (i32 w = 0; w < WARPS; w++) {
            Quad k = load_matrices(row + w * apart + m * 32);
#pragma unroll
            for (i32 n = 0; n < TILES; n++) multiply(s[w][n], k, rows.q[m][n][0], rows.q[m][n][1]);
        }
    bool is_cut = args.window > 0 || position < segment.begin || position + WARPS * CHUNK > segment.end;
    u32 weights[WARPS][TILES][2];
#pragma unroll
    for (i32 n = 0; n < TILES; n++) {
        weigh_columns(args, rows, s, n, segment, is_cut ? position + lane / 4 : -1);
#pragma unroll
        for (i32 w = 0; w < WARPS; w++) {
            weights[w][n][0] = transpose_matrix(pack(s[w][n][0], s[w][n][1]));
            weights[w][n][1] = transpose_matrix(pack(s[w][n][2], s[w][n][3]));
        }
    }
    row = chunks + CHUNK_BYTES + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
    for (i32 w = 0; w < WARPS; w++)
#pragma unroll
        for (i32 m = 0; m < DIM_TILES; m++) {
            Quad v = load_matrices_transposed(row + w * apart + m * 32);
#pragma unroll
            for (i32 n = 0; n < TILES; n++) multiply(rows.acc[m][n], v, weights[w][n][0], weights[w][n][1]);
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

// All parts of the kernel have the same view of these.
struct Block {
    const DecodeArgs& args;
    const Shared& shared;
    i32 lane_number, kv_head;
};

// Returns how many more partial results are pending.
DEVICE i32 attend_token(const Block& block, Stream& stream, const Segment& segment, i32 num_pending) {
    const DecodeArgs& args = block.args;
    const Shared& shared = block.shared;
    Rows<HEAD_TILES> rows;
    rows.clear();
#pragma unroll
    for (i32 n = 0; n < HEAD_TILES; n++) {
        i32 part = n * 8 + lane_id() / 4;
        i64 place = segment.token * args.q_token + (block.kv_head * args.group + part) * args.q_head;
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
        stream.refill(args, shared, block.kv_head);
    }
    share_rows(args, shared, rows);
    __syncthreads();
    store_token(args, shared, segment, block.lane_number, block.kv_head);
    if (segment.partial < 0) return 0;
    if (threadIdx.x < MERGE_FIELDS) {
        i32 field = threadIdx.x == MERGE_CANDIDATE ? segment.candidate : record;
        shared.pending[num_pending * MERGE_FIELDS + threadIdx.x] = field;
    }
    return 1;
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
    i32 mine[SHARED_TILES];  // -1: padding
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++) {
        i32 member = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + lane_id() / 4).member;
        mine[n] = member < segment.num_members ? load_fresh(tokens + member) : -1;
    }
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++) {
        Place at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + lane_id() / 4);
        i64 place = mine[n] * args.q_token + (kv_head * args.group + at.part) * args.q_head;
        rows.load_queries(n, mine[n] >= 0 ? args.q + place * 2 : nullptr);
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

// Lists the members' merges as pending; a thread has the candidate of a member.
DEVICE void list_members(const Block& block, const Segment& segment, i32 candidate, i32 num_pending) {
    if (threadIdx.x >= segment.num_members) return;
    const i32* record = block.args.work + block.args.merges + candidate * MERGE_FIELDS;
    i32* entry = block.shared.pending + (num_pending + threadIdx.x) * MERGE_FIELDS;
    for (i32 i = 0; i < MERGE_CANDIDATE; i++) entry[i] = load_fresh(record + i);
    entry[MERGE_CANDIDATE] = candidate;
}

// Returns how many more partial results are pending.
DEVICE i32 attend_members(const Block& block, Stream& stream, const Segment& segment, i32 num_pending) {
    const DecodeArgs& args = block.args;
    const Shared& shared = block.shared;
    Rows<SHARED_TILES> rows;
    rows.clear();
    const i32* candidates = args.work + args.member_candidates + segment.token;
    i32 candidate = threadIdx.x < segment.num_members ? load_fresh(candidates + threadIdx.x) : 0;
    load_members(args, rows, segment, block.kv_head);
    list_members(block, segment, candidate, num_pending);
    i32 num_steps = segment.steps(0);
    bool has_rows = warp_id() * 8 * SHARED_TILES < segment.num_members * args.group;
    for (i32 step = 0; step < num_steps; step++) {
        wait_copies<STAGES - 1>();
        __syncthreads();
        i32 position = (segment.first_chunk + step * WARPS) * CHUNK;
        if (has_rows) attend_step(args, rows, ring_place(shared, 0, stream.stage), segment, position);
        __syncthreads();
        stream.refill(args, shared, block.kv_head);
    }
    if (has_rows) store_members(args, rows, segment, block.lane_number, block.kv_head);
    return segment.num_members;
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
    Segment segment;
    i32 num_issued = 0;
    if (tile < stop) {
        stream.loader.begin(args, place, tile, stop);
        segment = stream.loader.segment;
        for (; args.is_eager && num_issued < STAGES && stream.loader.is_old(); num_issued++)
            stream.refill(args, shared, kv_head);
        stream.loader.prefetch_chunks(args, kv_head);
    }
    wait_for_earlier_kernels();
    if (!args.is_early) let_next_start();
    clear_padding(args, num_real);
    if (tile >= stop) return;
    for (; num_issued < STAGES; num_issued++) stream.refill(args, shared, kv_head);
    Block block = {args, shared, lane_number, kv_head};
    i32 num_pending = 0;
    for (;;) {
        i32 record = load_record(args, place + 1);  // may lie past the last unit, not past the list
        if (HAS_GROUPS && segment.num_members > 0)
            num_pending += attend_members(block, stream, segment, num_pending);
        else
            num_pending += attend_token(block, stream, segment, num_pending);
        bool is_end = segment.next_tile >= stop;
        place++;
        if (!is_end) segment = segment_of(args, record, segment.next_tile, stop);
        if (num_pending > 0 && (is_end || num_pending + max(1, segment.num_members) > args.patience)) {
            settle(args, shared, num_pending, kv_head);
            num_pending = 0;
        }
        if (is_end) break;
        __syncthreads();  // what lies in shared memory has been read
    }
    wait_copies<0>();
}
