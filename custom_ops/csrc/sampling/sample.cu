// Sampling in one kernel: a cluster of blocks holds a row in its shared memory and reads it from
// there as often as it takes: for the maximum, the cuts of min-p, top-k and top-p, and the draw.
#include "draw.cuh"
#include "search.cuh"

struct Settings {
    i32 row;
    float temperature;
    i32 top_k;
    float top_p;
    float min_p;
    i64 seed;
    i64 position;
};

DEVICE Settings settings_of(const SampleArgs& args, i32 place) {
    Settings s;
    const i32 row = args.rows ? args.rows[place] : place;
    s.row = row;
    s.temperature = args.temperature[(i64)row * args.temperature_stride];
    s.top_k = args.top_k[(i64)row * args.top_k_stride];
    s.top_p = args.top_p[(i64)row * args.top_p_stride];
    s.min_p = args.min_p[(i64)row * args.min_p_stride];
    s.seed = args.seed[(i64)row * args.seed_stride];
    const i64 i = (i64)row * args.position_stride;
    s.position = args.is_wide ? ((const i64*)args.position)[i] : ((const i32*)args.position)[i];
    return s;
}

// Zeros for the rows that no place names; warps of the whole grid share them.
DEVICE void clear_unnamed(const SampleArgs& args, const Slice& slice, i32 place) {
    if (!args.rows) return;
    const i32 lane = slice.thread % 32, num_places = num_clusters();
    const i32 warp = (place * CLUSTER + (i32)slice.rank) * WARPS + slice.thread / 32;
    for (i32 row = warp; row < args.num_rows; row += num_places * CLUSTER * WARPS) {
        bool is_named = false;
        for (i32 i = lane; i < num_places; i += 32) is_named |= args.rows[i] == row;
        if (!__any_sync(FULL, is_named) && lane == 0) {
            args.tokens[row] = 0;
            args.stops[row] = 0;
        }
    }
}

// Lowest scaled logit that the limits keep.
DEVICE float cut_of(const SampleArgs& args, const Slice& slice, const Row& row, const Settings& s) {
    u32 buffer = 0;
    float cut = SCALED_LOWEST;
    if (s.min_p > 0.0f) cut = fmaxf(cut, fminf(row.best + logf(s.min_p), row.best));
    if (s.top_k > 0 && s.top_k < args.vocab_size)
        cut = fmaxf(cut, scaled(row, search<false>(slice, row, buffer, cut, 0.0f, s.top_k)));
    if (s.top_p < 1.0f) cut = fmaxf(cut, scaled(row, search<true>(slice, row, buffer, cut, s.top_p, 0)));
    return cut;
}

// Stores the token and whether it is one of the row's stop ids, of which -1 is none. The first warp
// of a cluster.
DEVICE void emit(const SampleArgs& args, const Slice& slice, i32 row, i32 token) {
    if (slice.rank || slice.thread >= 32) return;
    if (slice.thread == 0) args.tokens[row] = token;
    if (!args.rows) return;
    bool is_stop = false;
    for (i32 i = slice.thread; i < args.num_stops; i += 32)
        is_stop |= token >= 0 && args.stop_ids[row * args.stop_stride + i] == token;
    is_stop = __any_sync(FULL, is_stop);
    if (slice.thread == 0) args.stops[row] = is_stop;
}

#if defined(CUDA_EMULATOR) || !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#else
#define HAS_CLUSTERS 0
#undef CLUSTER_SIZE
#define CLUSTER_SIZE
#endif

// A cluster a place.
extern "C" __global__ void CLUSTER_SIZE __launch_bounds__(BLOCK, RESIDENT)
    sample_cluster(const __grid_constant__ SampleArgs args) {
#if HAS_CLUSTERS
    DYNAMIC_SHARED(memory);
    cluster_arrive();
    let_next_start();
    Slice slice;
    slice.shared = (Exchange*)memory;
    slice.values = memory + EXCHANGE_BYTES;
    slice.rank = cluster_rank();
    slice.thread = block_thread();
    for (i32 i = slice.thread; i < 2 * BINS; i += BLOCK) ((u64*)slice.shared->bins)[i] = 0;
    if (slice.thread == 0) slice.shared->bound = 0;
    wait_for_previous();

    const i32 place = cluster_index();
    const Settings s = settings_of(args, place);
    const char* logits = args.logits + place * args.row_stride * VALUE_BYTES;
    const u8* mask = nullptr;
    if (args.mask_bits && args.has_grammar[s.row]) mask = args.mask_bits + s.row * args.mask_stride;
    const u64 mine = mask ? load_slice<true>(slice, logits, mask, args.vocab_size, args.slice)
                          : load_slice<false>(slice, logits, mask, args.vocab_size, args.slice);
    cluster_wait();  // for all blocks to have begun
    send_best(slice, mine, 0);
    cluster_arrive();
    clear_unnamed(args, slice, place);
    cluster_wait();
    const u64 best = received_best(slice, 0);
    i32 token = packed_id(best);
    if (s.temperature != 0.0f && token >= 0) {
        Row row = row_of(s.temperature, packed_value(best));
        row.best = scaled(row, row.top);
        const u64 key = mixed(mixed((u64)s.seed) + (u64)s.position);
        const float cut = cut_of(args, slice, row, s);
        send_best(slice, draw(slice, row, cut, key, token, args.vocab_size), 1);
        // Nor may a block end while others read its shared memory.
        cluster_sync();
        token = packed_id(received_best(slice, 1));
    }
    emit(args, slice, s.row, token);
#endif
}
