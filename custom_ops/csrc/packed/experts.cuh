// What the kernels of packed experts share.
#pragma once
#include "args.cuh"

#ifndef DOWN
#define DOWN 0  // whether it is the second product
#endif
#ifndef CLAMPED
#define CLAMPED 0
#endif

// Of a gate's sum and the value's; `args` has alpha and the limit.
template <typename Args> DEVICE float activate(const Args& args, float gate, float up) {
    if (CLAMPED) {
        gate = gate > args.limit ? args.limit : gate;  // NaN stays
        up = (up > args.limit ? args.limit : up < -args.limit ? -args.limit : up) + 1.0f;
    }
    return gate / (1.0f + power_of_two(-LOG2E * (CLAMPED ? args.alpha : 1.0f) * gate)) * up;
}
