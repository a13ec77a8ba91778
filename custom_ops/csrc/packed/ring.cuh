// Units on their way through a ring in shared memory: AHEAD stages, each with what the threads of a
// block copy of one unit of each warp. A thread reads only what it copied: no barrier is between.
#pragma once
#include "weights.cuh"

// Starts the copies of a unit of weights: each thread to places that it alone reads. Without a cache policy:
// the assembler of CUDA 12.8 to 13.3 may name a register that nothing wrote as the policy, an illegal instruction.
DEVICE void copy_unit(const PackedArgs& args, char* stage, const Rows& at, i32 number) {
    char *chunks = stage + threadIdx.x * 16, *words = stage + WORDS_PLACE + threadIdx.x * 4;
#pragma unroll
    for (i32 which = 0; which < 2; which++) {
        u32 byte = byte_of(args, number, which);
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                i32 i = (m * 2 + h) * 2 + which;
                copy_async(chunks + i * THREADS * 16, args.weight + (at.bytes[m][h] + byte), 16);
                if (!IS_PACKED) continue;
                u32 place = scale_place(at.scales[m][h], byte * 2);
                copy_word_async(words + i * THREADS * 4, args.scale + (place & ~3u));
                if (FORMAT == INT4 && args.zero)
                    copy_word_async(words + (CHUNKS + i) * THREADS * 4, args.zero + ((OFFSETS ? place : place / 2) & ~3u));
            }
    }
    if (ROW_BLOCK)
#pragma unroll
        for (i32 i = 0; i < SIXTEENS * 2; i++)
            copy_word_async(words + i * THREADS * 4, args.scale + (at.scales[i / 2][i % 2] + block_of(args, number)) * 4);
}

// A unit that has arrived; `at` are the rows of its tile.
DEVICE void read_unit(const PackedArgs& args, const char* stage, Unit& unit, const Rows& at, i32 number) {
    const char *chunks = stage + threadIdx.x * 16, *words = stage + WORDS_PLACE + threadIdx.x * 4;
#pragma unroll
    for (i32 which = 0; which < 2; which++) {
        u32 byte = byte_of(args, number, which);
#pragma unroll
        for (i32 m = 0; m < SIXTEENS; m++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                i32 i = (m * 2 + h) * 2 + which;
                Chunk& chunk = unit.chunks[m][h][which];
                chunk.bytes = *(const Quad*)(chunks + i * THREADS * 16);
                if (!IS_PACKED) continue;
                u32 place = scale_place(at.scales[m][h], byte * 2);
                const char* word = words + i * THREADS * 4;
                if (FORMAT == MXFP4)
                    chunk.scale = *(const unsigned char*)(word + (place & 3));
                else
                    chunk.scale = *(const unsigned short*)(word + (place & 2));
                if (FORMAT == INT4 && OFFSETS)
                    chunk.zero = *(const unsigned short*)(words + (CHUNKS + i) * THREADS * 4 + (place & 2));
                else if (FORMAT == INT4)
                    chunk.zero = args.zero ? *(const unsigned char*)(words + (CHUNKS + i) * THREADS * 4 + (place / 2 & 3)) : 8;
            }
    }
    if (ROW_BLOCK)
#pragma unroll
        for (i32 i = 0; i < SIXTEENS * 2; i++) unit.block_scales[i / 2][i % 2] = *(const float*)(words + i * THREADS * 4);
}

// Starts the copies of what goes with a unit: lane l has token l / 4 of each 8, zeros behind the last.
DEVICE void copy_x(const PackedArgs& args, char* stage, i32 number) {
    char* pieces = stage + PIECES_PLACE + threadIdx.x * 16;
#pragma unroll
    for (i32 n = 0; n < EIGHTS; n++) {
        i32 token = n * 8 + (lane_id() >> 2);
        const char* row = args.x + (i64)token * args.x_stride * X_BYTES;
#pragma unroll
        for (i32 i = 0; i < 2 * X_PIECES; i++) {
            i32 column = column_of(number, i / max(X_PIECES, 1)) + i % max(X_PIECES, 1) * (16 / X_BYTES);
            bool is_there = token < args.num_tokens && column < args.size;
            copy_async(pieces + (n * 2 * X_PIECES + i) * THREADS * 16, is_there ? row + column * X_BYTES : args.x, is_there ? 16 : 0);
        }
    }
}
