// Attention of single tokens over the paged KV cache; see custom_ops/attention_decode_cuda.py.
//
//     out[t, h] = softmax(scale * q[t, h] . K[row(t), 0..p(t)]) @ V[row(t), 0..p(t)]
//
// A block serves one lane of the work list and one KV head. Each warp reads its own chunks of 16
// positions through its own ring of shared memory, so that nothing but the end of a unit makes warps
// wait for each other and the next units' chunks are on their way long before. Products are turned
// around, keys times queries: the query heads are the 8 columns of a product, and few of them are
// padding. In a prefix that several tokens share, all warps read all chunks, each for 16 query rows.
// Sums are relative to a score that may lie SLACK below the maximum, so they are seldom scaled anew.
// The first chunks are copied before the kernel that writes this step's KV has ended, as far as they
// hold what earlier steps wrote; the launcher says why that is safe.
#include "args.cuh"
#include "load.cuh"
#include "merge.cuh"

// Queries and running sums of TILES times 8 columns of a warp.
template <int TILES> struct Rows {
    u32 q[DIM_TILES][TILES][2];
    float acc[DIM_TILES][TILES][4];  // [16 dims, 8 columns] each
    float top[TILES][2];    // score that sums are relative to, of columns 2 * (lane % 4) and the next
    float total[TILES][2];  // this lane's share
    i32 low[TILES][2];      // first position that is seen; only with a window

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
    return (1.0f - 2.0f * reciprocal(power_of_two(product * args.cap_in) + 1.0f)) * args.cap_out;
}

// Adds the scores of chunks that stand `distance` bytes apart: element i of a tile is of position
// lane / 4 + (i / 2) * 8, column i % 2.
template <int CHUNKS, int TILES>
DEVICE void multiply_keys(const Rows<TILES>& rows, const char* keys, i32 distance, float (&s)[CHUNKS][TILES][4]) {
    i32 lane = lane_id();
    const char* row = keys + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;
    float odd[CHUNKS][TILES][4];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++)
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
            for (i32 i = 0; i < 4; i++) odd[c][n][i] = 0.0f;
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++)
#pragma unroll
        for (i32 c = 0; c < CHUNKS; c++) {
            Quad k = load_matrices(row + c * distance + m * 32);
#pragma unroll
            for (i32 n = 0; n < TILES; n++)
                multiply(m & 1 ? odd[c][n] : s[c][n], k, rows.q[m][n][0], rows.q[m][n][1]);
        }
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++)
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
            for (i32 i = 0; i < 4; i++) s[c][n][i] += odd[c][n][i];
}

// Adds a chunk's values, weighted; `row` is what this lane loads of them.
template <int TILES> DEVICE void multiply_values(Rows<TILES>& rows, const char* row, const float (&s)[TILES][4]) {
    u32 weights[TILES][2];
#pragma unroll
    for (i32 n = 0; n < TILES; n++) {
        weights[n][0] = transpose_matrix(pack(s[n][0], s[n][1]));
        weights[n][1] = transpose_matrix(pack(s[n][2], s[n][3]));
    }
#pragma unroll
    for (i32 m = 0; m < DIM_TILES; m++) {
        Quad v = load_matrices_transposed(row + m * 32);
#pragma unroll
        for (i32 n = 0; n < TILES; n++) multiply(rows.acc[m][n], v, weights[n][0], weights[n][1]);
    }
}

// Takes away the positions of a chunk that a column does not see.
template <int TILES>
DEVICE void hide_positions(const Rows<TILES>& rows, const Segment& segment, i32 position, float (&s)[TILES][4]) {
#pragma unroll
    for (i32 n = 0; n < TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            i32 at = position + lane_id() / 4 + i / 2 * 8;
            if (at < max(segment.begin, rows.low[n][i & 1]) || at >= segment.end) s[n][i] = NEGATIVE_INFINITY;
        }
}

// Makes sums relative to the maxima of the columns, given those of this lane's rows.
template <int TILES> DEVICE void raise_tops(Rows<TILES>& rows, const float (&highest)[TILES][2]) {
#pragma unroll
    for (i32 n = 0; n < TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            float higher = larger(rows.top[n][i], column_max(highest[n][i]));
            float shrink = power_of_two(rows.top[n][i] - higher);
            rows.top[n][i] = higher;
            rows.total[n][i] *= shrink;
#pragma unroll
            for (i32 m = 0; m < DIM_TILES; m++) {
                rows.acc[m][n][i] *= shrink;
                rows.acc[m][n][i + 2] *= shrink;
            }
        }
}

// Attends to CHUNKS chunks, from `first` on, that stand `distance` bytes apart. All are there.
template <int CHUNKS, int TILES>
DEVICE void attend_chunks(
    const DecodeArgs& args, Rows<TILES>& rows, const char* chunks, i32 distance, const Segment& segment, i32 first) {
    i32 lane = lane_id();
    float s[CHUNKS][TILES][4], highest[TILES][2];
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++)
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
            for (i32 i = 0; i < 4; i++) s[c][n][i] = 0.0f;
    multiply_keys(rows, chunks, distance, s);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++) {
        i32 position = (first + c) * CHUNK;
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
            for (i32 i = 0; i < 4; i++) s[c][n][i] = scaled(args, s[c][n][i]);
        if (args.window > 0 || position < segment.begin || position + CHUNK > segment.end)
            hide_positions(rows, segment, position, s[c]);
    }
    bool is_higher = false;
#pragma unroll
    for (i32 n = 0; n < TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            highest[n][i] = larger(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
            for (i32 c = 1; c < CHUNKS; c++)
                highest[n][i] = larger(highest[n][i], larger(s[c][n][i], s[c][n][i + 2]));
            is_higher |= highest[n][i] > rows.top[n][i] + SLACK;
        }
    if (__any_sync(FULL, is_higher)) raise_tops(rows, highest);
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++)
#pragma unroll
        for (i32 n = 0; n < TILES; n++)
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                s[c][n][i] = power_of_two(s[c][n][i] - rows.top[n][i & 1]);
                rows.total[n][i & 1] += s[c][n][i];
            }
    const char* row = chunks + CHUNK_BYTES + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
    for (i32 c = 0; c < CHUNKS; c++) multiply_values(rows, row + c * distance, s[c]);
}

// A warp's place in the stream of chunks.
struct Stream {
    Loader loader;
    i32 stage;

    // Fills the stage at hand, if `is_there` more to copy.
    METHOD void fill(const DecodeArgs& args, const Shared& shared, bool is_there, i32 kv_head) {
        if (is_there) loader.issue(args, ring_place(shared, warp_id(), stage), kv_head);
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    METHOD void refill(const DecodeArgs& args, const Shared& shared, i32 kv_head) {
        fill(args, shared, loader.find_step(args), kv_head);
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
            float* acc = shared.acc + (warp * GROUP + head) * ACC_STRIDE + lane / 4;
            if (head < GROUP)
#pragma unroll
                for (i32 m = 0; m < DIM_TILES; m++) {
                    acc[m * 16] = rows.acc[m][n][i];
                    acc[m * 16 + 8] = rows.acc[m][n][i + 2];
                }
        }
}

// Combines the warps' sums of a token into its result, or a partial one: in the lane's slot if the
// unit goes on in the next lane.
DEVICE void store_token(const DecodeArgs& args, const Shared& shared, const Segment& segment, bool goes_on,
                        i32 lane_number, i32 kv_head) {
    constexpr i32 columns = HEAD_DIM / 4;
#pragma unroll 1
    for (i32 i = threadIdx.x; i < GROUP * columns; i += THREADS) {
        i32 part = i / columns, column = i % columns * 4, head = kv_head * GROUP + part;
        float top = LOWEST, total = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (i32 w = 0; w < WARPS; w++) top = larger(top, shared.tops[w * 8 * HEAD_TILES + part]);
#pragma unroll
        for (i32 w = 0; w < WARPS; w++) {
            float weight = power_of_two(shared.tops[w * 8 * HEAD_TILES + part] - top);
            total += weight * shared.totals[w * 8 * HEAD_TILES + part];
            Float4 values = *(const Float4*)(shared.acc + (w * GROUP + part) * ACC_STRIDE + column);
            for (i32 d = 0; d < 4; d++) acc[d] += weight * values.x[d];
        }
        float sum = top + log_of_two(total), factor = total > 0.0f ? reciprocal(total) : 1.0f;
        if (segment.partial < 0 && args.sinks)
            factor *= reciprocal(1.0f + power_of_two(args.sinks[head] * LOG2E - sum));
        for (i32 d = 0; d < 4; d++) acc[d] *= factor;
        if (segment.partial < 0) {
            store_result(args, segment.token, head, column, acc);
            continue;
        }
        float* place = slot_of(args, lane_number, head);
        if (!goes_on) place = partial_of(args, segment.partial + lane_number, head);
        store_relaxed((Float4*)(place + column),
                      Float4{{marked(acc[0]), marked(acc[1]), marked(acc[2]), marked(acc[3])}});
        if (column == 0) store_relaxed(place + HEAD_DIM, marked(sum));
    }
}

DEVICE void load_token(const DecodeArgs& args, Rows<HEAD_TILES>& rows, const Segment& segment, i32 kv_head) {
#pragma unroll
    for (i32 n = 0; n < HEAD_TILES; n++) {
        i32 part = n * 8 + lane_id() / 4;
        i64 place = segment.token * args.q_token + (kv_head * GROUP + part) * args.q_head;
        rows.load_queries(n, part < GROUP ? args.q + place * 2 : nullptr);
    }
}

// `rows` has the token's queries.
DEVICE void attend_token(const DecodeArgs& args, const Shared& shared, Stream& stream, Rows<HEAD_TILES>& rows,
                         const Segment& segment, i32 kv_head) {
    rows.clear();
    i32 num_steps = segment.steps(warp_id());
#pragma unroll 1
    for (i32 step = 0; step < num_steps; step++) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        i32 chunk = segment.first_chunk + warp_id() + step * WARPS;
        attend_chunks<1>(args, rows, ring_place(shared, warp_id(), stream.stage), 0, segment, chunk);
        __syncwarp();
        stream.refill(args, shared, kv_head);
    }
}

// All units of single tokens that a lane has, from that at hand on, and the results of those that
// end in it.
DEVICE void attend_tokens(
    const DecodeArgs& args, const Shared& shared, Stream& stream, Walk walk, i32 lane_number, i32 kv_head) {
    Merges merges{-1, -1, 0, false, 0, 0, 0};
    Rows<HEAD_TILES> rows;
    load_token(args, rows, walk.segment, kv_head);
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
        i32 next = walk.next_record(args);
        attend_token(args, shared, stream, rows, walk.segment, kv_head);
        Segment following = walk.following(args, next);
        // its queries are on their way while this token's result is written
        if (!walk.is_last()) load_token(args, rows, following, kv_head);
        if (!is_first) __syncthreads();  // the unit before has been stored
        share_rows(args, shared, rows);
        __syncthreads();
        bool goes_on = walk.segment.next_tile > walk.stop;
        store_token(args, shared, walk.segment, goes_on, lane_number, kv_head);
        if (walk.segment.partial >= 0 && !goes_on)
            merges.add(walk.place, walk.record, walk.segment.group_count > 0);
        if (walk.is_last()) break;
        walk.go_to(next, following);
    }
    if (merges.first >= 0) merges.run(args, lane_number, kv_head);
}

// Query row of a shared prefix's tile: its member and query head.
struct Place {
    i32 member, part;
};
DEVICE Place place_of(const DecodeArgs& args, i32 row) {
    i32 member = row / GROUP;
    return {member, row - member * GROUP};
}

DEVICE void load_members(
    const DecodeArgs& args, Rows<SHARED_TILES>& rows, const Segment& segment, i32 kv_head) {
    const i32* tokens = args.work + args.members + segment.token;
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++) {
        Place at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + lane_id() / 4);
        bool is_there = at.member < segment.num_members;
        i64 token = is_there ? load_fresh(tokens + at.member) : 0;
        i64 place = token * args.q_token + (kv_head * GROUP + at.part) * args.q_head;
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
    i32 lane = lane_id();
#pragma unroll
    for (i32 n = 0; n < SHARED_TILES; n++)
#pragma unroll
        for (i32 i = 0; i < 2; i++) {
            float total = column_sum(rows.total[n][i]), factor = total > 0.0f ? reciprocal(total) : 1.0f;
            Place at = place_of(args, (warp_id() * SHARED_TILES + n) * 8 + (lane & 3) * 2 + i);
            if (at.member >= segment.num_members) continue;
            i32 row = segment.partial + lane_number * args.width + at.member;
            float* place = partial_of(args, row, kv_head * GROUP + at.part);
#pragma unroll
            for (i32 m = 0; m < DIM_TILES; m++) {
                place[m * 16 + lane / 4] = marked(rows.acc[m][n][i] * factor);
                place[m * 16 + 8 + lane / 4] = marked(rows.acc[m][n][i + 2] * factor);
            }
            if (lane < 4) place[HEAD_DIM] = marked(rows.top[n][i] + log_of_two(total));
        }
}

DEVICE void attend_members(const DecodeArgs& args, const Shared& shared, Stream& stream, const Segment& segment,
                           i32 unit, i32 lane_number, i32 kv_head) {
    Rows<SHARED_TILES> rows;
    rows.clear();
    load_members(args, rows, segment, kv_head);
    i32 num_steps = segment.steps(0), distance = STAGES * 2 * CHUNK_BYTES;
    bool is_needed = warp_id() * SHARED_TILES * 8 < segment.num_members * GROUP;
#pragma unroll 1
    for (i32 step = 0; step < num_steps; step++) {
        wait_copies<STAGES - 1>();
        __syncthreads();
#pragma unroll 1
        for (i32 w = 0; is_needed && w < WARPS;) {
            i32 chunk = segment.first_chunk + step * WARPS + w;
            const char* place = ring_place(shared, w, stream.stage);
            if (chunk >= segment.end_chunk) break;
            if (chunk + PREFIX_CHUNKS <= segment.end_chunk) {
                attend_chunks<PREFIX_CHUNKS>(args, rows, place, distance, segment, chunk);
                w += PREFIX_CHUNKS;
            } else {
                attend_chunks<1>(args, rows, place, distance, segment, chunk);
                w++;
            }
        }
        __syncthreads();
        stream.refill(args, shared, kv_head);
    }
    store_members(args, rows, segment, lane_number, kv_head);
    __syncthreads();
    if (threadIdx.x == 0) add_release(counter_of(args, unit, kv_head), 1);
}

// Zeroes the tokens of padding.
DEVICE void clear_padding(const DecodeArgs& args, i32 num_real) {
    i32 words = num_heads(args) * HEAD_DIM / (QUANTIZED ? 4 : 2);
#pragma unroll 1
    for (i32 token = num_real + blockIdx.x; token < args.num_tokens; token += gridDim.x)
#pragma unroll 1
        for (i32 i = threadIdx.x; i < words; i += THREADS) ((u32*)args.out)[(i64)token * words + i] = 0;
}

// Asks the second-level cache for this lane's slot, which was last used by an earlier layer.
DEVICE void prefetch_slot(const DecodeArgs& args, i32 lane_number, i32 kv_head) {
    const char* slot = (const char*)slot_of(args, lane_number, kv_head * GROUP);
#pragma unroll 1
    for (i32 at = threadIdx.x * 128; at < GROUP * PART_SIZE * 4; at += THREADS * 128) prefetch(slot + at);
}

// Fills the ring of a warp: as far as earlier steps wrote it before the wait for earlier kernels, then
// the rest. Blocks without tiles wait too.
DEVICE void begin_stream(const DecodeArgs& args, const Shared& shared, Stream& stream, i32 kv_head) {
    bool has_waited = false;
#pragma unroll 1
    for (i32 i = 0;; i++) {
        bool is_there = stream.loader.find_step(args);
        if (!has_waited && (i >= min(args.early, STAGES) || !is_there || !stream.loader.is_early())) {
            if (HAS_GROUPS && is_there && stream.loader.segment.num_members > 0)
                stream.loader.prefetch_chunks(args, kv_head);
            wait_for_earlier_kernels();
            has_waited = true;
        }
        if (i == STAGES) break;
        stream.fill(args, shared, is_there, kv_head);
    }
}

// Grid: lanes times KV heads, the KV heads of a lane side by side.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_attention(const __grid_constant__ DecodeArgs args) {
    DYNAMIC_SHARED(memory);
    if (args.is_early) let_next_start();
    Shared shared = shared_places(memory);
    i32 kv_head = blockIdx.x % args.num_kv_heads, lane_number = blockIdx.x / args.num_kv_heads;
    i32 record = load_fresh(args.work + args.lanes + lane_number * LANE_FIELDS + lane_id());
    i32 tile = __shfl_sync(FULL, record, LANE_TILE), stop = __shfl_sync(FULL, record, LANE_STOP);
    i32 place = __shfl_sync(FULL, record, LANE_UNIT), num_real = __shfl_sync(FULL, record, LANE_REAL);
    Stream stream;
    stream.stage = 0;
    stream.loader.begin(args, record, tile, stop);
    Walk walk{stream.loader.segment, place, __shfl_sync(FULL, record, LANE_RECORD + lane_id()), stop};
    if (tile < stop) prefetch_slot(args, lane_number, kv_head);
    begin_stream(args, shared, stream, kv_head);
    if (!args.is_early) let_next_start();
    clear_padding(args, num_real);
    if (tile >= stop) return;
    bool is_over = false;
#pragma unroll 1
    while (HAS_GROUPS && !is_over && walk.segment.num_members > 0) {
        i32 next = walk.next_record(args);
        attend_members(args, shared, stream, walk.segment, walk.place, lane_number, kv_head);
        is_over = walk.is_last();
        if (!is_over) walk.go_to(next, walk.following(args, next));
    }
    if (!is_over) attend_tokens(args, shared, stream, walk, lane_number, kv_head);
    wait_copies<0>();
}
