"""The kernel "mma" of `fused_linear`: emulated, compiled, its sizes; on a GPU as it is."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import pytest
import torch

from compiled_engine.custom_ops.cuda_build import compile_source
from compiled_engine.custom_ops.gemm_choice import AT_ONCE, Shape, pick_config
from compiled_engine.custom_ops.gemm_mma import (
    MAX_SHARED_BYTES,
    NUM_THREADS,
    SOURCE,
    Variant,
    mma_rejects,
    variant_of,
    why_not_made,
)
from compiled_engine.custom_ops.gemm_skinny import MmaConfig, Operands, launch
from tests.helpers.emulated_mma import run_emulated
from tests.helpers.fused_linear import (
    LIMITS,
    MODELS,
    Case,
    Product,
    exact_result,
    make_operands,
    products_of,
    relative_error,
)

FP16 = torch.float16
REGISTERS = 65536  # of a multiprocessor
# Rows, columns and parts of a weight of every shape.
SHAPES = {
    Shape.FEW_ROWS: (4096, 4096, "r"),
    Shape.MORE_ROWS: (6144, 4096, "bn"),
    Shape.LONG_ROWS: (4096, 12288, "r"),
    Shape.MANY_ROWS: (24576, 4096, "ng"),
    Shape.VOCABULARY: (151936, 4096, "n"),
}


@dataclass(frozen=True)
class Call:
    """Tokens, outputs, columns, parts (b, n, r, g), sizes and ."""

    num_tokens: int
    num_outputs: int
    size: int
    parts: str
    config: MmaConfig
    dtype: torch.dtype = torch.bfloat16

    def operands(self, device: str = "cpu") -> Operands:
        sizes = (self.num_tokens, self.num_outputs, self.size)
        # the sizes of a case are of no use here
        case = Case(*sizes, self.parts, config=None, dtype=self.dtype)  # type: ignore[arg-type]
        return make_operands(case, device)


CALLS = {
    "plain": Call(2, 40, 208, "", MmaConfig(16, 128, 4, 2, 2)),
    "all-parts": Call(8, 90, 400, "bnr", MmaConfig(48, 128, 4, 3, 2)),
    "gated": Call(3, 37, 144, "bnrg", MmaConfig(32, 128, 4, 3, 3)),
    "gated-192": Call(9, 100, 208, "ng", MmaConfig(192, 64, 1, 3, 2)),
    "odd-rows": Call(17, 150, 272, "bnr", MmaConfig(32, 64, 2, 3, 3)),
    "gated-one-part": Call(8, 90, 144, "ng", MmaConfig(64, 64, 1, 4, 2)),
    "few-columns": Call(5, 33, 48, "n", MmaConfig(32, 128, 4, 3, 3)),
    "fp16": Call(24, 50, 336, "br", MmaConfig(48, 256, 4, 2, 2), dtype=FP16),
    "early": Call(2, 40, 976, "r", MmaConfig(32, 64, 2, 5, 3, AT_ONCE)),
    "all-at-once": Call(7, 150, 1024, "bnr", MmaConfig(16, 256, 4, 2, 2, AT_ONCE, 3)),
    "gated-staggered": Call(8, 200, 960, "ng", MmaConfig(32, 128, 4, 3, 2, 3, 5)),
    "staggered": Call(12, 90, 704, "nrg", MmaConfig(64, 64, 1, 3, 3, 0, 7)),
    "staggered-by-one": Call(17, 70, 1000, "bn", MmaConfig(32, 128, 4, 2, 2, 1, 1)),
}


@pytest.mark.parametrize("has_bulk", [True, False], ids=["bulk", "pieces"])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_emulated(name: str, has_bulk: bool):
    call = CALLS[name]
    operands = call.operands()
    results = [
        run_emulated(operands, call.config, order=order, has_bulk=has_bulk)
        for order in (0, 1, 7)  # of threads and copies
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert relative_error(results[0], exact_result(operands)) <= LIMITS[call.dtype]


def test_what_lies_outside_of_x_and_the_weight_does_not_count():
    call = CALLS["all-parts"]
    operands = call.operands()
    x = torch.full((call.num_tokens + 1, call.size + 16), float("nan"), dtype=call.dtype)
    x[:-1, : call.size] = operands.x
    weight = torch.full((call.num_outputs + 1, call.size), float("nan"), dtype=call.dtype)
    weight[:-1] = operands.weight
    framed = operands._replace(x=x[:-1, : call.size], weight=weight[:-1])
    for has_bulk in (True, False):
        got = run_emulated(framed, call.config, has_bulk=has_bulk)
        assert relative_error(got, exact_result(operands)) <= LIMITS[call.dtype]


# --- sizes ----------------------------------------------------------------------------------------

# Small weights with the sizes that are chosen for them: whole models, and tiles larger than these.
SMALL = (
    *MODELS["SmolLM2-135M"][:4],
    *products_of(64, 128, 64, 32, 300),
    Product(96, 72, "bn"),
    Product(6, 64, "r"),
    Product(48, 8, "bng"),
)
LARGE = ("Llama-3.2-1B", "Qwen3-8B")


def label(product: Product) -> str:
    return f"{product.rows}x{product.size}-{product.parts}"


def limit(product: Product, dtype: torch.dtype = torch.bfloat16) -> float:
    """Of the relative error; over few columns the rounding of x times g is not averaged out."""
    return LIMITS[dtype] * (2 if product.size < 256 else 1)


def chosen(product: Product, num_tokens: int) -> Call:
    """A call with the sizes that are chosen."""
    outputs = product.rows // (2 if "g" in product.parts else 1)
    config = pick_config("mma", product.traits(num_tokens))
    assert isinstance(config, MmaConfig)
    return Call(num_tokens, outputs, product.size, product.parts, config)


@pytest.mark.parametrize("num_tokens", [2, 8])
@pytest.mark.parametrize("product", SMALL, ids=label)
def test_chosen_sizes_emulated(product: Product, num_tokens: int):
    call = chosen(product, num_tokens)
    operands = call.operands()
    got = run_emulated(operands, call.config, order=num_tokens)
    assert relative_error(got, exact_result(operands)) <= limit(product)


@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize("num_tokens", [3, 7, 13, 27])
def test_sizes_of_every_shape_emulated(shape: Shape, num_tokens: int):
    """With a few rows of such a weight, and more blocks of columns than the rings hold."""
    rows, size, parts = SHAPES[shape]
    whole = chosen(Product(rows, size, parts), num_tokens)
    call = replace(whole, num_outputs=min(whole.num_outputs, 150), size=2832)
    operands = call.operands()
    got = run_emulated(operands, call.config)
    assert relative_error(got, exact_result(operands)) <= LIMITS[call.dtype]


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 16, 24, 32])
@pytest.mark.parametrize("model", MODELS)
def test_chosen_sizes_can_be_made(model: str, num_tokens: int):
    for product in MODELS[model]:
        call = chosen(product, num_tokens)
        assert why_not_made(call.config) is None, call
        variant = variant_of(meta_operands(product, num_tokens), call.config)
        if num_tokens <= 8:  # the next kernel has room beside it
            assert 2 * variant.shared_bytes <= MAX_SHARED_BYTES
        assert variant.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k_warps": 3}, "k_warps of 1, 2 or 4"),
        ({"rows": 40}, "rows in 2 parts of 16"),
        ({"rows": 512}, "more than 256 rows"),
        ({"block": 96}, "blocks of 64 columns"),
        ({"block": 64, "k_warps": 4}, "blocks in 4 parts of 32"),
        ({"x_stages": 1}, "2 <= x_stages <= stages"),
        ({"x_stages": 3}, "2 <= x_stages <= stages"),
    ],
)
def test_sizes_that_cannot_be_made_say_why(change, reason):
    fine = MmaConfig(96, 128, 2, 2, 2)
    assert why_not_made(fine) is None
    assert why_not_made(replace(fine, **change)) == reason


def test_rejections_say_why():
    traits = Product(4096, 4096, "r").traits(8)
    assert mma_rejects(traits) is None
    assert mma_rejects({**traits, "num_tokens": 33}) == "takes 1 to 32 tokens, not 33"
    assert mma_rejects({**traits, "size": 4100}) == "needs a multiple of 8 columns, these are 4100"


def meta_operands(product: Product, num_tokens: int) -> Operands:
    """Operands without values."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    parts, outputs = product.parts, product.rows // (2 if "g" in product.parts else 1)
    return Operands(
        x=make(num_tokens, product.size),
        weight=make(product.rows, product.size),
        bias=make(product.rows) if "b" in parts else None,
        norm_weight=make(product.size) if "n" in parts else None,
        eps=1e-6,
        residual=make(num_tokens, outputs) if "r" in parts else None,
        is_gated="g" in parts,
    )


# --- compiled, and on a GPU -----------------------------------------------------------------------


@functools.cache
def chosen_variants() -> tuple[Variant, ...]:
    """Of all models, for up to 8 tokens and for more."""
    found = {
        variant_of(meta_operands(product, tokens), chosen(product, tokens).config): None
        for tokens in (8, 16, 32)
        for products in MODELS.values()
        for product in products
    }
    return tuple(found)


@pytest.mark.parametrize("is_half", [False, True], ids=["bf16", "fp16"])
def test_chosen_kernels_compile_without_spills(is_half: bool):
    pytest.importorskip("cuda.bindings.nvrtc")
    for variant in chosen_variants():
        if is_half and (variant.has_norm or variant.tokens > 8):
            continue  # the norm of fp16 is a kernel of its own
        log = compile_source(SOURCE, "sm_90a", replace(variant, is_half=is_half).flags).log
        assert "0 bytes stack frame, 0 bytes spill stores" in log, log
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
        assert variant.resident * NUM_THREADS * max(registers) <= REGISTERS, log


def test_kernels_for_older_chips_compile_without_spills():
    pytest.importorskip("cuda.bindings.nvrtc")
    for name in ("all-parts", "gated-one-part", "fp16"):
        call = CALLS[name]
        variant = variant_of(call.operands(), call.config)
        log = compile_source(SOURCE, "sm_80", variant.flags).log
        assert "0 bytes stack frame, 0 bytes spill stores" in log, log


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_equals_the_reference(name: str):
    call = CALLS[name]
    operands = call.operands("cuda")
    for _ in range(2):
        got = launch("mma", operands, call.config)
        assert relative_error(got, exact_result(operands)) <= LIMITS[call.dtype]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("impl", ["mma", ""])
@pytest.mark.parametrize("num_tokens", range(2, 9))
def test_the_op_equals_the_reference(num_tokens: int, impl: str):
    if impl and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    large = [product for model in LARGE for product in MODELS[model]]
    for product in (*SMALL, *large):
        operands = chosen(product, num_tokens).operands("cuda")
        got = torch.ops.ce.fused_linear(*operands, impl)
        assert relative_error(got, exact_result(operands)) <= limit(product), product


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("product", SMALL, ids=label)
def test_the_op_equals_the_reference_in_fp16(product: Product):
    operands = replace(chosen(product, 5), dtype=FP16).operands("cuda")
    got = torch.ops.ce.fused_linear(*operands)
    assert relative_error(got, exact_result(operands)) <= limit(product, FP16)
