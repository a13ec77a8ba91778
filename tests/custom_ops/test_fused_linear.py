"""`fused_linear`: which kernel runs and why, and the kernels in Triton's interpreter and on a GPU.

The interpreter must be chosen before Triton is imported, so those runs are one child process.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from compiled_engine.custom_ops import gemm
from compiled_engine.custom_ops.gemm_choice import pick_config
from compiled_engine.custom_ops.gemm_library import has_cublaslt
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Choice, Target
from compiled_engine.custom_ops.toolchain import has_nvrtc
from tests.helpers.fused_linear import (
    CASES,
    HOPPER_CASES,
    MODELS,
    ODD_TOKENS,
    Case,
    Product,
    check_case,
)
from tests.helpers.source_tree import ROOT

A100, H200 = Target("cuda", 80), Target("cuda", 90)
NAMES = ("qkv", "o", "gate_up", "down", "head")
LIBRARIES = {"library", "cublaslt"}
TRAITS = {**Product(6144, 4096, "n").traits(12), "is_hopper": 1}


def choice_of(product: Product, num_tokens: int, target: Target = H200, **changes: int) -> Choice:
    is_hopper = target.arch // 10 == 9
    traits = {**product.traits(num_tokens), "is_hopper": is_hopper, **changes}
    choice = make_registry().choose("fused_linear", "few", target, torch.bfloat16, traits)
    # What runs when sizes are only known then is the same.
    assert gemm.select_kernel("", target, torch.bfloat16, traits) == choice.candidate.name
    return choice


@pytest.mark.parametrize(
    ("num_tokens", "kernels"),
    [
        (0, "library cublaslt library cublaslt library"),
        (1, "row row row row row"),
        (2, "mma mma mma mma tile"),
        (8, "mma mma mma mma tile"),
        (9, "tile tile tile wide tile"),
        (16, "tile tile tile wide tile"),
        (17, "hopper tile wide wide hopper"),
        (32, "hopper tile wide wide hopper"),
        (33, "library wide wide wide library"),
        (64, "library wide wide wide library"),
        (65, "library cublaslt wide wide library"),
        (128, "library cublaslt wide wide library"),
        (129, "library cublaslt library cublaslt library"),
    ],
)
def test_choice_goes_by_tokens_and_shape(num_tokens: int, kernels: str):
    products = MODELS["Qwen3-8B"]
    assert [choice_of(p, num_tokens).candidate.name for p in products] == kernels.split()
    older = {"row"} if num_tokens == 1 else {"tile"} if 0 < num_tokens <= 32 else LIBRARIES
    assert {choice_of(p, num_tokens, A100).candidate.name for p in products} == older


@pytest.mark.parametrize(
    ("model", "name", "kernel"),
    [
        ("Llama-3.2-1B", "qkv", "hopper"),
        ("Llama-3.2-1B", "o", "hopper"),
        ("Llama-3.2-1B", "gate_up", "hopper"),
        ("Llama-3.2-1B", "head", "tile"),
        ("SmolLM2-135M", "qkv", "tile"),
        ("SmolLM2-135M", "gate_up", "tile"),
        ("SmolLM2-135M", "head", "hopper"),
        ("tiny", "qkv", "tile"),
        ("tiny", "head", "tile"),
    ],
)
def test_choice_for_other_models_goes_by_the_nearest_shape(model: str, name: str, kernel: str):
    product = MODELS[model][NAMES.index(name)]
    is_vocabulary = product.rows > 65536
    assert choice_of(product, 5).candidate.name == ("tile" if is_vocabulary else "mma")
    without = choice_of(product, 5, has_nvrtc=0)
    assert without.candidate.name == kernel
    assert dict(without.rejected)["mma"] == "needs the cuda-bindings package"


@pytest.mark.parametrize(
    ("product", "num_tokens", "reason"),
    [
        (Product(6144, 4096, "n"), 1, "was not measured at 1 token"),
        (Product(6144, 4096, "n"), 9, "was not measured at 9 to 16 tokens"),
        (Product(4096, 12288, "r"), 16, "was not measured at 9 to 16 tokens"),
        (Product(24576, 4096, "ng"), 17, "was measured slower at 17 to 32 tokens"),
        (
            Product(151936, 4096, "n"),
            8,
            "was measured slower than tile at 2 to 8 tokens, more than 65536 rows",
        ),
        (Product(6144, 4096, "n"), 33, "takes 1 to 32 tokens, not 33"),
        (Product(6144, 4100, "n"), 8, "needs a multiple of 8 columns, these are 4100"),
    ],
)
def test_choice_says_why_not_mma(product: Product, num_tokens: int, reason: str):
    choice = choice_of(product, num_tokens)
    assert dict(choice.rejected)["mma"] == reason


def test_choice_of_mma_leaves_the_others_behind():
    choice = choice_of(Product(6144, 4096, "n"), 4)
    assert choice.candidate.name == "mma"
    assert dict(choice.rejected) == {
        "row": "takes 1 to 1 tokens, not 4",
        "tile": "ranks below mma",
        "hopper": "ranks below mma",
        "wide": "takes 9 to 128 tokens, not 4",
        "cublaslt": "is the same as library without a residual below 2048 tokens",
        "library": "ranks below mma",
        "torch": "ranks below mma",
    }
    older = choice_of(Product(6144, 4096, "n"), 4, A100)
    assert dict(older.rejected)["mma"] == "needs sm_90, this is sm_80"


@pytest.mark.parametrize(
    ("product", "num_tokens", "changes", "reason", "kernel"),
    [
        (
            Product(6144, 4096, "n"),
            40,
            {},
            "was measured no faster than others at 33 to 64 tokens, 4097 to 8192 rows",
            "library",
        ),
        (
            Product(4096, 4096, "r"),
            100,
            {},
            "was measured no faster than others at 65 to 128 tokens, up to 4096 rows",
            "cublaslt",
        ),
        (
            Product(576, 576, "r"),
            40,
            {},
            "leaves most of the device idle: 18 blocks, 32 are enough",
            "cublaslt",
        ),
        (Product(4096, 4096, "r"), 129, {}, "takes 9 to 128 tokens, not 129", "cublaslt"),
        (Product(4096, 9216, "r"), 30, {"has_nvrtc": 0}, "needs the cuda-bindings package", "tile"),
        (
            Product(4104, 4096, "g"),
            30,
            {},
            "needs a multiple of 8 gated outputs, not 2052",
            "hopper",
        ),
    ],
)
def test_choice_says_why_not_wide(product, num_tokens, changes, reason, kernel):
    choice = choice_of(product, num_tokens, **changes)
    assert dict(choice.rejected)["wide"] == reason
    assert choice.candidate.name == kernel
    older = choice_of(product, num_tokens, A100)
    assert dict(older.rejected)["wide"] == "needs sm_90, this is sm_80"


@pytest.mark.parametrize(
    ("product", "num_tokens", "reason"),
    [
        (Product(6144, 4096, "n"), 1, "was measured slower than row at 1 token"),
        (
            Product(4096, 12288, "r"),
            8,
            "was measured no faster than tile at 2 to 8 tokens, rows of more than 8192 columns",
        ),
        (
            Product(24576, 4096, "ng"),
            16,
            "was measured no faster than tile at 9 to 16 tokens, gated or more than 8192 rows",
        ),
        (Product(960, 576, "n"), 4, "leaves most of the device idle: 15 tiles, 32 are enough"),
        (Product(4096, 32784, "n"), 4, "takes up to 32768 columns, not 32784"),
        (Product(600000, 4096, ""), 4, "counts in 32 bits, too few for 600000 x 4096"),
    ],
)
def test_choice_says_why_not_hopper(product: Product, num_tokens: int, reason: str):
    choice = choice_of(product, num_tokens, has_nvrtc=0)
    assert dict(choice.rejected)["hopper"] == reason
    assert choice.candidate.name == ("row" if num_tokens == 1 else "tile")


def test_an_option_may_name_a_slower_kernel():
    traits = {**TRAITS, "num_tokens": 12}
    assert gemm.select_kernel("hopper", H200, torch.bfloat16, traits) == "hopper"
    registry = make_registry(["fused_linear=hopper"])
    choice = registry.choose("fused_linear", "few", H200, torch.bfloat16, traits)
    assert choice.candidate.name == "hopper"
    assert dict(choice.rejected)["tile"] == "an option asks for another"


def test_gated_products_get_tiles_of_pairs():
    for num_tokens, rows in itertools.product((1, 3, 12, 27), (14, 1024, 24576, 90000)):
        traits = Product(rows, 4096, "ng").traits(num_tokens)
        assert pick_config("row", traits).rows % 2 == 0
        assert pick_config("tile", traits).rows % 32 == 0
        assert pick_config("hopper", traits).rows % 128 == 0
        assert pick_config("mma", traits).rows % 32 == 0


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
    best = "library" if traits["has_one_dtype"] else "torch"
    assert gemm.select_kernel("", H200, torch.bfloat16, traits) == best
    with pytest.raises(ValueError, match=f"kernel tile {reason}"):
        gemm.select_kernel("tile", H200, torch.bfloat16, traits)
    assert gemm.select_kernel("torch", H200, torch.bfloat16, traits) == "torch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_hopper": 0}, "needs compute capability 9"),
        ({"is_aligned": 0}, "needs rows of x and weights at multiples of 16 bytes"),
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
    names = "row, tile, mma, wide, hopper, cublaslt, library, torch"
    with pytest.raises(ValueError, match=f"no kernel fast; there are {names}"):
        gemm.select_kernel("fast", H200, torch.bfloat16, TRAITS)


def test_traits_of_arguments_say_what_is_in_the_way():
    x, weight = torch.zeros(3, 32), torch.zeros(8, 32)
    plain = gemm.fused_linear_traits(x, weight, None, None, x[:, :8], is_gated=False)
    flags = {"has_nvrtc": has_nvrtc(), "has_cublaslt": has_cublaslt()}
    assert plain == {**Product(8, 32, "r").traits(3), **flags}
    odd = gemm.fused_linear_traits(x.half(), weight.T.contiguous().T, None, None, x.T, True)
    assert odd["is_gated"]
    flags = ("has_one_dtype", "is_weight_contiguous", "is_last_dim_contiguous")
    assert [odd[flag] for flag in flags] == [0, 0, 0]
    assert not gemm.fused_linear_traits(x[:, 4:], weight, None, None, None, False)["is_aligned"]
    for start, is_aligned in ((0, True), (1, False), (8, True)):
        norm_weight = torch.zeros(40)[start : start + 32]
        found = gemm.fused_linear_traits(x, weight, None, norm_weight, None, False)
        assert found["is_aligned"] == is_aligned


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


@pytest.mark.slow
def test_chosen_kernels_compile_and_fit():
    assert _run_module("tests.helpers.fused_linear_chosen", {}).endswith("kernels fit")


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("num_tokens", [1, *ODD_TOKENS])
@pytest.mark.parametrize("model", ["tiny", "SmolLM2-135M", "Llama-3.2-1B"])
def test_chosen_sizes_are_right_for_other_models(model: str, num_tokens: int):
    target = Target.of(torch.device("cuda"))
    for product in MODELS[model]:
        flags = {"is_hopper": target.arch // 10 == 9, "has_nvrtc": has_nvrtc()}
        traits = {**product.traits(num_tokens), **flags}
        for candidate in gemm.CANDIDATES:
            is_able = candidate.rejection(target, torch.bfloat16, traits) is None
            if is_able and candidate.name not in (*LIBRARIES, "torch"):
                check_case(product.case(num_tokens, candidate.name), "cuda")


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
