"""`fused_linear`: which kernel runs and why, and the kernels in Triton's interpreter and on a GPU.

The interpreter must be chosen before Triton is imported, so those runs are one child process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from compiled_engine.custom_ops import gemm
from compiled_engine.custom_ops.registry import Target
from tests.helpers.fused_linear import CASES, HOPPER_CASES, Case, check_case
from tests.helpers.source_tree import ROOT

H200 = Target("cuda", 90)
TRAITS = {
    "num_tokens": 2,
    "size": 4096,
    "has_one_dtype": 1,
    "is_weight_contiguous": 1,
    "is_last_dim_contiguous": 1,
    "is_aligned": 1,
    "is_hopper": 1,
}


@pytest.mark.parametrize(
    ("num_tokens", "kernel"), [(0, "torch"), (1, "row"), (2, "tile"), (32, "tile"), (33, "torch")]
)
def test_select_kernel_goes_by_the_number_of_tokens(num_tokens: int, kernel: str):
    traits = {**TRAITS, "num_tokens": num_tokens}
    assert gemm.select_kernel("", H200, torch.bfloat16, traits) == kernel


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 33}, "takes 1 to 32 tokens, not 33"),
        ({"size": 4104}, "needs a multiple of 16 columns, these are 4104"),
        ({"has_one_dtype": 0}, "needs the same dtype for all tensors"),
        ({"is_weight_contiguous": 0}, "needs a contiguous weight"),
        ({"is_last_dim_contiguous": 0}, "needs a contiguous last dim of x and residual"),
    ],
)
def test_select_kernel_says_why_it_takes_another(change: dict[str, int], reason: str):
    traits = {**TRAITS, **change}
    assert gemm.select_kernel("", H200, torch.bfloat16, traits) == "torch"
    with pytest.raises(ValueError, match=f"kernel tile {reason}"):
        gemm.select_kernel("tile", H200, torch.bfloat16, traits)
    assert gemm.select_kernel("torch", H200, torch.bfloat16, traits) == "torch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_hopper": 0}, "needs compute capability 9"),
        ({"is_aligned": 0}, "needs rows of x and the weight at multiples of 16 bytes"),
        ({"num_tokens": 33}, "takes 1 to 32 tokens, not 33"),
    ],
)
def test_select_kernel_says_what_the_hopper_kernel_cannot_take(change: dict[str, int], reason: str):
    assert gemm.select_kernel("hopper", H200, torch.bfloat16, TRAITS) == "hopper"
    with pytest.raises(ValueError, match=f"kernel hopper {reason}"):
        gemm.select_kernel("hopper", H200, torch.bfloat16, {**TRAITS, **change})


def test_select_kernel_refuses_other_devices_dtypes_and_names():
    for target, dtype in ((Target("cuda", 75), torch.float16), (H200, torch.float32)):
        assert gemm.select_kernel("", target, dtype, TRAITS) == "torch"
    with pytest.raises(ValueError, match="no kernel fast; there are row, tile, hopper, torch"):
        gemm.select_kernel("fast", H200, torch.bfloat16, TRAITS)


def test_traits_of_arguments_say_what_is_in_the_way():
    x, weight = torch.zeros(3, 32), torch.zeros(8, 32)
    assert gemm.fused_linear_traits(x, weight, None, None, x[:, :8]) == {
        **TRAITS,
        "num_tokens": 3,
        "size": 32,
        "is_hopper": 0,
    }
    odd = gemm.fused_linear_traits(x.half(), weight.T.contiguous().T, None, None, x.T)
    flags = ("has_one_dtype", "is_weight_contiguous", "is_last_dim_contiguous")
    assert [odd[flag] for flag in flags] == [0, 0, 0]
    assert not gemm.fused_linear_traits(x[:, 4:], weight, None, None, None)["is_aligned"]


def _run_module(name: str, environment: dict[str, str]) -> str:
    """Last line of what a module of the tests prints as a program."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", name],
        cwd=ROOT,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_kernels_equal_the_reference_in_the_interpreter():
    last = _run_module("tests.helpers.fused_linear", {"TRITON_INTERPRET": "1"})
    assert last == f"{len(CASES)} cases right"


def test_hopper_kernel_compiles_and_shares_its_work_equally():
    assert _run_module("tests.helpers.fused_linear_hopper", {}) == "no spills; shares right"


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in CASES])
def test_kernels_equal_the_reference_on_the_gpu(case: Case):
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.label) for case in HOPPER_CASES])
def test_hopper_kernel_equals_the_reference(case: Case):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    check_case(case, "cuda")
