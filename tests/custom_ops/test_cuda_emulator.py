"""The CUDA emulator of the tests: that it runs kernels, and that it sees what is wrong with one."""

from __future__ import annotations

import ctypes

import pytest
import torch

from compiled_engine.custom_ops import cuda_build
from tests.helpers.cuda_emulator import Emulated, EmulatorError

SOURCE = """
struct Args { int* out; };
__device__ int next_lane(int value) { return __shfl_down_sync(0xffffffffu, value, 1); }

extern "C" __global__ void right(const __grid_constant__ Args args) {
    __shared__ int values[64];
    values[threadIdx.x] = next_lane(threadIdx.x);
    int odd = __syncthreads_count(threadIdx.x & 1);
    args.out[blockIdx.x * blockDim.x + threadIdx.x] = values[63 - threadIdx.x] + 1000 * odd;
}

extern "C" __global__ void no_barrier(const __grid_constant__ Args args) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    args.out[threadIdx.x] = values[63 - threadIdx.x];
}

extern "C" __global__ void two_barriers(const __grid_constant__ Args args) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void early_return(const __grid_constant__ Args args) {
    if (threadIdx.x == 5) return;
    __syncthreads();
}

extern "C" __global__ void half_a_warp(const __grid_constant__ Args args) {
    if (threadIdx.x & 1) args.out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}
"""


class Args(ctypes.Structure):
    """Of the kernels above."""

    _fields_ = (("out", ctypes.c_void_p),)


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory):
    """A folder with the source above."""
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "kernels.cu").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_build, "CSRC", folder)
        yield


def outcome(kernel: str, order: int, grid: int = 1) -> list[int]:
    out = torch.zeros(grid * 64, dtype=torch.int32)
    Emulated("kernels.cu", 64, order).launch(kernel, grid, Args(out.data_ptr()))
    return out.tolist()


@pytest.mark.parametrize("order", range(4))
def test_right_kernel_does_not_depend_on_the_order(order):
    lanes = [lane if lane % 32 == 31 else lane + 1 for lane in range(64)]
    assert outcome("right", order, grid=2) == [32_000 + lane for lane in lanes[::-1]] * 2


def test_missing_barrier_shows():
    assert outcome("no_barrier", 0) != outcome("no_barrier", 1)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("two_barriers", "thread 32 is at the barrier of line 22, others at line 20"),
        ("early_return", "thread 5 returned while others wait"),
        ("half_a_warp", "deadlock: thread 1 waits at line 32"),
    ],
)
def test_wrong_kernel_ends_with_a_message(kernel, message):
    with pytest.raises(EmulatorError, match=message):
        outcome(kernel, 0)


def test_structs_of_different_size_are_an_error():
    with pytest.raises(EmulatorError, match="Args has 8 bytes, not 16"):
        Emulated("kernels.cu").launch("right", 1, (Args * 2)())
