// What the kernels of packed experts share.
#pragma once
#include "args.cuh"

#ifndef DOWN
#define DOWN 0  // whether it is the second product
#endif
#ifndef CLAMPED
#define CLAMPED 0
#endif

// The scale of a whole matrix of an expert: of the first product the gate's, then that of what it multiplies.
DEVICE float global_scale(const PackedArgs& args, i64 expert, i32 part) {
    return FORMAT == NVFP4 ? args.row_scale[GATED ? expert * 2 + part : expert] : 1.0f;
}

// Of a gate's sum and the value's; `args` has alpha and the limit.
template <typename Args> DEVICE float activate(const Args& args, float gate, float up) {
    if (CLAMPED) {
        gate = gate > args.limit ? args.limit : gate;  // NaN stays
        up = (up > args.limit ? args.limit : up < -args.limit ? -args.limit : up) + 1.0f;
    }
    return gate / (1.0f + power_of_two(-LOG2E * (CLAMPED ? args.alpha : 1.0f) * gate)) * up;
}
