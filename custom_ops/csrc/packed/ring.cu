// Products of up to 32 tokens with a quantised weight: the kernel "ring" of `quantized_linear`. Launched
// by custom_ops/quant_packed.py.
//
// As packed.cu has it, but a weight goes from memory to shared memory, each thread's pieces to places of
// its own, and from there to registers: more is on its way than registers hold, and the copies run on
// into the next tile. The scales of smaller groups multiply each lane's own sums of one token, which is
// fp16 divided by a power of two, or of several tokens the weights themselves.
#define RING 1
#include "finish.cuh"
#include "ring.cuh"

// Grid: blocks that take tiles in turn.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_product(const __grid_constant__ PackedArgs args) {
    DYNAMIC_SHARED(shared);
    let_next_start();
    Rows at, load_at;
    i32 load_tile = blockIdx.x, loaded = 0;
    load_at.find(args, load_tile);
    auto copy_next = [&](i32 stage, bool has_x) {
        if (load_tile < args.num_tiles) {
            char* place = shared + RING_PLACE + stage * STAGE_BYTES;
            copy_unit(args, place, load_at, loaded * WARPS + warp_id());
            if (X_PIECES && has_x) copy_x(args, place, loaded * WARPS + warp_id());
            if (++loaded == args.warp_units) {
                loaded = 0, load_tile += gridDim.x;
                load_at.find(args, load_tile);
            }
        }
        commit_copies();
    };
    for (i32 i = 0; i < AHEAD; i++) copy_next(i, false);
    Token token;
    if (X_KIND == X_SHARED) token.load_gains(args);
    wait_for_earlier_kernels();
    float token_scale = 1.0f;
    if (X_KIND == X_SHARED) {
        token.load_values(args);
        token_scale = token.prepare(args, shared);
        __syncthreads();
    }
    if (X_PIECES) {
        for (i32 i = 0; i < AHEAD; i++)
            copy_x(args, shared + RING_PLACE + i * STAGE_BYTES, i % args.warp_units * WARPS + warp_id());
        commit_copies();
        wait_copies<0>();
    }
    i32 stage = 0, count = 0;
    for (i32 tile = blockIdx.x; tile < args.num_tiles; tile += gridDim.x, count++) {
        Sums sums;
        sums.clear();
        at.find(args, tile);
        for (i32 i = 0; i < args.warp_units; i++) {
            wait_copies<AHEAD - 1>();
            const char* place = shared + RING_PLACE + stage * STAGE_BYTES;
            Unit unit;
            read_unit(args, place, unit, at, i * WARPS + warp_id());
            multiply_unit(args, unit, shared, place, i * WARPS + warp_id(), sums);
            copy_next(stage, true);
            stage = stage + 1 == AHEAD ? 0 : stage + 1;
        }
        char* place = shared + SUMS_PLACE + count % SUM_TILES * SUMS_BYTES;
        share_sums(sums, place);
        __syncthreads();  // also: sums of the tile before have been read
        finish_tile(args, place, tile, count, token_scale);
        if (SUM_TILES == 1) __syncthreads();
    }
    wait_copies<0>();
}
