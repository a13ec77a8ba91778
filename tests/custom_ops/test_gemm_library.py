"""The library's product with a residual, called directly: against a product in fp64, on a GPU.

Which products it is chosen for is tested, without a GPU, in `test_fused_linear.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import gemm
from compiled_engine.custom_ops.gemm_library import library_product
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Target
from tests.helpers.fused_linear import Product

SIZES = [
    (1, 8, 8),
    (3, 24, 40),
    (33, 128, 96),
    (200, 4096, 4096),
    (129, 4096, 12288),
    (2048, 512, 1024),  # kernels are timed
    (0, 8, 16),
]


def made(num_tokens: int, rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    return normal(num_tokens, rows), normal(num_tokens, size), normal(rows, size) * size**-0.5


def check(got: Tensor, residual: Tensor, x: Tensor, weight: Tensor) -> None:
    wanted = residual.double() + x.double() @ weight.double().T
    limit = 2**-8 if got.dtype == torch.bfloat16 else 2**-10
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_sum_is_rounded_once(sizes: tuple[int, int, int], dtype: torch.dtype):
    residual, x, weight = made(*sizes, dtype)
    before = residual.clone()
    check(library_product(residual, x, weight), residual, x, weight)
    assert torch.equal(residual, before)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 2500])
def test_product_alone(num_tokens: int):
    residual, x, weight = made(num_tokens, 48, 64, torch.bfloat16)
    check(library_product(None, x, weight), torch.zeros_like(residual), x, weight)


@pytest.mark.gpu
def test_operands_may_be_parts_of_wider_tensors():
    residual, x, weight = made(37, 48, 64, torch.bfloat16)
    wide_x, wide_residual = torch.cat((x, x), 1), torch.cat((residual, residual), 1)
    check(library_product(wide_residual[:, 48:], wide_x[:, 64:], weight), residual, x, weight)


@pytest.mark.gpu
def test_captured_product_reads_new_operands():
    residual, x, weight = made(40, 64, 64, torch.bfloat16)
    library_product(residual, x, weight)  # the library's own start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library_product(residual, x, weight)
    for _ in range(2):
        x.normal_()
        residual.normal_()
        graph.replay()
        check(out, residual, x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("has_norm", [False, True])
def test_op_equals_its_twin(has_norm: bool):
    residual, x, weight = made(150, 96, 64, torch.bfloat16)
    norm = torch.rand(64, device="cuda").bfloat16() if has_norm else None
    arguments = (x, weight, None, norm, 1e-6, residual, False)
    got, twin, plain = (
        torch.ops.ce.fused_linear(*arguments, impl) for impl in ("cublaslt", "library", "torch")
    )
    torch.testing.assert_close(got, twin, rtol=0.02, atol=0.02)
    torch.testing.assert_close(got, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("parts", "change", "reason"),
    [
        ("br", {}, "adds no bias and has no gate"),
        ("g", {}, "adds no bias and has no gate"),
        ("r", {"has_cublaslt": 0}, "needs the cuBLAS that torch for CUDA comes with"),
        ("r", {"is_residual_aligned": 0}, "needs rows of all tensors at multiples of 16 bytes"),
        ("r", {"rows": 100}, "needs rows of all tensors at multiples of 16 bytes"),
        ("r", {"is_last_dim_contiguous": 0}, "needs a contiguous last dim of x and residual"),
        ("r", {"has_one_dtype": 0}, "needs the same dtype for all tensors"),
    ],
)
def test_refusal_says_why(parts: str, change: dict[str, int], reason: str):
    traits = {**Product(4096, 4096, parts).traits(200), **change}
    with pytest.raises(ValueError, match=f"kernel cublaslt {reason}"):
        gemm.select_kernel("cublaslt", Target("cuda", 90), torch.bfloat16, traits)


def test_products_without_a_residual_are_timed_from_many_tokens_on():
    registry, target = make_registry(), Target("cuda", 90)
    for num_tokens, name in ((2047, "library"), (2048, "cublaslt"), (8192, "cublaslt")):
        traits = Product(6144, 4096, "").traits(num_tokens)
        choice = registry.choose("fused_linear", "few", target, torch.bfloat16, traits)
        assert choice.candidate.name == name
