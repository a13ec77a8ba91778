"""The kernel "wide" of `fused_linear`: emulated, compiled, its sizes; on a GPU as it is."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

from compiled_engine.custom_ops.cuda_build import compile_source
from compiled_engine.custom_ops.gemm_choice import pick_config
from compiled_engine.custom_ops.gemm_skinny import Operands, WideConfig, launch
from compiled_engine.custom_ops.gemm_wide import (
    MAX_PARTIALS,
    MAX_SHARED_BYTES,
    PADDED_TOKENS,
    SOURCE,
    Variant,
    make_scratch,
    num_blocks_of_threads,
    num_partials,
    padded_tokens,
    why_not_made,
    wide_rejects,
)
from tests.helpers.emulated_wide import run_emulated
from tests.helpers.fused_linear import (
    LIMITS,
    MODELS,
    Case,
    Product,
    exact_result,
    make_operands,
    relative_error,
)

FP16 = torch.float16
REGISTERS = 65536  # of a multiprocessor
# A call, and the multiprocessors and stages that it has in the emulator; None: as many as fit.
CALLS = {
    "plain": (Case(12, 96, 192, "", WideConfig(1, 1)), 2, 3),
    "split": (Case(9, 96, 192, "r", WideConfig(1, 1, split=2)), 4, None),
    "two-warpgroups": (Case(27, 200, 136, "b", WideConfig(2, 1)), 3, 3),
    "split-in-turn": (Case(60, 320, 264, "br", WideConfig(1, 1, split=4)), 5, 3),
    "gated": (Case(64, 104, 328, "bg", WideConfig(1, 1)), 3, 3),
    "gated-split": (Case(33, 264, 584, "rg", WideConfig(3, 1, split=2)), 2, 4),
    "two-slabs": (Case(17, 515, 400, "br", WideConfig(1, 2, split=2)), 4, 3),
    "odd-parts": (Case(64, 136, 264, "br", WideConfig(1, 1, split=3)), 6, None),
    "many-tokens": (Case(100, 136, 136, "", WideConfig(1, 2)), 4, 2),
    "fp16": (Case(13, 72, 136, "b", WideConfig(1, 1), FP16), 3, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_emulated(name: str):
    case, num_processors, stages = CALLS[name]
    operands = make_operands(case, "cpu")
    results = [
        run_emulated(operands, case.config, num_processors, order=order, stages=stages)
        for order in (0, 1, 7)  # of threads and copies
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert relative_error(results[0], exact_result(operands)) <= LIMITS[case.dtype]


def test_copies_may_arrive_in_any_order():
    """Three warpgroups and few stages: one that is ahead waits for what is not there yet."""
    case = Case(9, 192, 2048, "", WideConfig(3, 1))
    operands = make_operands(case, "cpu")
    exact = exact_result(operands)
    for order in range(2, 14):
        got = run_emulated(operands, case.config, 1, order=order, stages=3)
        assert relative_error(got, exact) <= LIMITS[case.dtype], order


def test_what_lies_outside_of_x_and_the_weight_does_not_count():
    case, num_processors, stages = CALLS["split-in-turn"]
    operands = make_operands(case, "cpu")
    x = torch.full((case.num_tokens + 1, case.size + 16), float("nan"), dtype=case.dtype)
    x[:-1, : case.size] = operands.x
    weight = torch.full((case.num_outputs + 1, case.size), float("nan"), dtype=case.dtype)
    weight[:-1] = operands.weight
    framed = operands._replace(x=x[:-1, : case.size], weight=weight[:-1])
    got = run_emulated(framed, case.config, num_processors, stages=stages)
    assert relative_error(got, exact_result(operands)) <= LIMITS[case.dtype]


# --- sizes ----------------------------------------------------------------------------------------

SMALL = (
    *MODELS["SmolLM2-135M"][:4],
    Product(96, 72, "bn"),
    Product(6, 64, "r"),
    Product(48, 8, "bng"),
)
LARGE = ("Llama-3.2-1B", "Qwen3-8B")


def label(product: Product) -> str:
    return f"{product.rows}x{product.size}-{product.parts}"


def chosen(product: Product, num_tokens: int) -> Case:
    """A call with the sizes that are chosen."""
    return product.case(num_tokens, "wide")


@pytest.mark.parametrize("num_tokens", [17, 33, 65])
def test_chosen_sizes_of_small_weights_emulated(num_tokens: int):
    for product in (Product(96, 72, "b"), Product(6, 64, "r"), Product(48, 8, "bg")):
        case = chosen(product, num_tokens)
        operands = make_operands(case, "cpu")
        got = run_emulated(operands, case.config, 132, order=num_tokens)
        assert relative_error(got, exact_result(operands)) <= LIMITS[case.dtype] * 2


@pytest.mark.parametrize("num_tokens", [9, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("model", MODELS)
def test_chosen_sizes_can_be_made(model: str, num_tokens: int):
    tokens = padded_tokens(num_tokens)
    for product in (*MODELS[model], *SMALL):
        config = chosen(product, num_tokens).config
        assert isinstance(config, WideConfig)
        assert why_not_made(config) is None, config
        assert config.split <= -(-product.size // (64 * config.slabs))
        assert num_partials(product.rows, tokens, config) <= MAX_PARTIALS
        variant = Variant(config, tokens, "g" in product.parts, is_half=False)
        assert variant.stages >= 3, variant
        assert variant.shared_bytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "config", "blocks"),
    [
        (24576, WideConfig(3, 1), 128),
        (4096, WideConfig(2, 1, split=4), 128),
        (151936, WideConfig(2, 1), 132),
        (17, WideConfig(1, 1, split=3), 3),
    ],
)
def test_blocks_are_as_many_as_run_at_once(rows, config, blocks):
    assert num_blocks_of_threads(rows, config, 132) == blocks


def test_parts_of_a_tile_are_in_different_blocks():
    with pytest.raises(AssertionError):
        num_blocks_of_threads(4096, WideConfig(1, 1, split=4), 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warpgroups": 5}, "1 to 4 warpgroups"),
        ({"slabs": 3}, "1 or 2 slabs"),
        ({"split": 0}, "at least one part"),
    ],
)
def test_sizes_that_cannot_be_made_say_why(change, reason):
    fine = WideConfig(2, 1, split=4)
    assert why_not_made(fine) is None
    assert why_not_made(replace(fine, **change)) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_tokens": 129}, "takes 9 to 128 tokens, not 129"),
        ({"num_tokens": 8}, "takes 9 to 128 tokens, not 8"),
        ({"size": 4100}, "needs a multiple of 8 columns, these are 4100"),
        ({"is_aligned": 0}, "needs rows of x and weights at multiples of 16 bytes"),
        ({"has_one_dtype": 0}, "needs the same dtype for all tensors"),
        ({"is_weight_contiguous": 0}, "needs a contiguous weight"),
        ({"is_last_dim_contiguous": 0}, "needs a contiguous last dim of x and residual"),
        ({"rows": 24, "is_gated": 1}, "needs a multiple of 8 gated outputs, not 12"),
    ],
)
def test_rejections_say_why(change, reason):
    traits = Product(4096, 4096, "r").traits(40)
    assert wide_rejects(traits) is None
    assert wide_rejects({**traits, **change}) == reason


def test_scratch_is_filled_with_what_no_sum_is():
    scratch = make_scratch(torch.device("cpu"))
    assert scratch.dtype == torch.float32
    assert scratch.shape == (MAX_PARTIALS,)
    assert bool((scratch.view(torch.int32) == -1).all())


# --- compiled, and on a GPU -----------------------------------------------------------------------


@functools.cache
def chosen_variants() -> tuple[Variant, ...]:
    """Of all models, for all padded numbers of tokens."""
    found = {
        Variant(config, tokens, "g" in product.parts, is_half=False): None
        for tokens in PADDED_TOKENS
        for products in MODELS.values()
        for product in products
        if isinstance(config := pick_config("wide", product.traits(tokens)), WideConfig)
    }
    return tuple(found)


@pytest.mark.parametrize("tokens", PADDED_TOKENS)
def test_chosen_kernels_compile_without_spills(tokens: int):
    pytest.importorskip("cuda.bindings.nvrtc")
    wanted = [variant for variant in chosen_variants() if variant.tokens == tokens]
    assert wanted
    for i, variant in enumerate(wanted):
        log = compile_source(SOURCE, "sm_90a", replace(variant, is_half=i == 0).flags).log
        assert "0 bytes stack frame, 0 bytes spill stores" in log, (variant, log)
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
        assert variant.num_threads * max(registers) <= REGISTERS, (variant, log)


def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_equals_the_reference(name: str):
    needs_hopper()
    case = CALLS[name][0]
    operands = make_operands(case, "cuda")
    for _ in range(3):
        got = launch("wide", operands, case.config)
        assert relative_error(got, exact_result(operands)) <= LIMITS[case.dtype]


def check_op(product: Product, num_tokens: int, impl: str, dtype: torch.dtype) -> None:
    operands: Operands = make_operands(replace(chosen(product, num_tokens), dtype=dtype), "cuda")
    got = torch.ops.ce.fused_linear(*operands, impl)
    limit = LIMITS[dtype] * (2 if product.size < 256 else 1)
    # The library's product is rounded before the gate, as in the matched spelling.
    limit *= 1.5 if impl != "wide" and "g" in product.parts else 1.0
    assert relative_error(got, exact_result(operands)) <= limit, product


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("impl", ["wide", "library", ""])
@pytest.mark.parametrize("num_tokens", [9, 17, 29, 32, 33, 48, 61, 64, 65, 100, 128])
def test_the_op_equals_the_reference(num_tokens: int, impl: str):
    needs_hopper()
    large = [product for model in LARGE for product in MODELS[model]]
    for product in (*SMALL, *large):
        check_op(product, num_tokens, impl, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("impl", ["wide", "library", ""])
@pytest.mark.parametrize("product", SMALL, ids=label)
def test_the_op_equals_the_reference_in_fp16(product: Product, impl: str):
    needs_hopper()
    check_op(product, 37, impl, FP16)
