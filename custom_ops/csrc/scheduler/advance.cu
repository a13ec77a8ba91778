#include "advance.cuh"

extern "C" __global__ void __launch_bounds__(1024) scheduler_advance(const __grid_constant__ AdvanceArgs a) {
    __shared__ Scratch scratch;
    __shared__ AdvanceShared shared;
    __shared__ __align__(16) char places[PLACES_SHARED];
    wait_for_earlier_kernels();
    let_next_kernel_start();
    advance_step(a, scratch, shared, places);
}
