"""The Triton kernels of `route` and `experts`: interpreted, and which of them is chosen."""

from __future__ import annotations

import math

import pytest
import torch

from compiled_engine.custom_ops import moe_choice
from compiled_engine.custom_ops.moe_cuda import traits_of
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.registry import Target
from tests.helpers.interpreted import run_interpreted

pytest.importorskip("triton")

HOPPER = Target("cuda", 90)


@pytest.mark.parametrize("name", ["rows", "stream", "tiles", "route", "route_steps"])
def test_interpreted_kernels_equal_the_references(name):
    run_interpreted("tests.helpers.interpreted_moe", name)


def operands(num_tokens, format="", dtype=torch.bfloat16, size=64, inner=32):
    """Of 8 experts, 2 a token, on the meta device."""
    with torch.device("meta"):
        packed = {"": (1, dtype), "mxfp4": (2, torch.uint8)}[format]
        return ExpertOperands(
            torch.empty(num_tokens, size, dtype=dtype),
            torch.empty(8, 2 * inner, size // packed[0], dtype=packed[1]),
            torch.empty(8, size, inner // packed[0], dtype=packed[1]),
            None,
            None,
            torch.empty(num_tokens, 2),
            torch.empty(num_tokens, 2, dtype=torch.int32),
            torch.empty(2 * num_tokens, dtype=torch.int32),
            torch.empty(9, dtype=torch.int32),
            "silu",
            0.0,
            math.inf,
            None,
            None,
            format,
        )


@pytest.mark.parametrize(
    ("num_tokens", "kernel"),
    [(1, "rows"), (8, "stream"), (64, "stream"), (128, "tiles"), (8192, "tiles")],
)
def test_the_kernel_follows_the_tokens(num_tokens, kernel):
    traits = traits_of(operands(num_tokens))
    assert moe_choice.select_experts("", HOPPER, torch.bfloat16, traits) == kernel


def test_a_kernel_asked_for_by_name_serves_or_says_why_not():
    traits = traits_of(operands(8192))
    assert moe_choice.select_experts("stream", HOPPER, torch.bfloat16, traits) == "stream"
    with pytest.raises(ValueError, match="kernel rows takes 4096 pairs of token and expert"):
        moe_choice.select_experts("rows", HOPPER, torch.bfloat16, traits)
    with pytest.raises(ValueError, match="no kernel best; there are packed, rows, stream"):
        moe_choice.select_experts("best", HOPPER, torch.bfloat16, traits)


def test_what_no_kernel_takes_goes_to_the_reference():
    traits = traits_of(operands(4, dtype=torch.float32))
    assert moe_choice.select_experts("", HOPPER, torch.float32, traits) == "torch"
    traits = traits_of(operands(4)) | {"has_both_biases": False, "is_silu": False}
    assert moe_choice.select_experts("", HOPPER, torch.bfloat16, traits) == "torch"
    traits = traits_of(operands(4, "mxfp4", size=48))
    assert moe_choice.select_experts("", HOPPER, torch.bfloat16, traits) == "torch"


def test_a_router_of_too_many_experts_goes_to_the_reference():
    for num_experts, kernel in ((1024, "triton"), (1025, "torch")):
        traits = moe_choice.route_traits(torch.empty(3, num_experts), 1)
        assert moe_choice.route_kernel(HOPPER, torch.bfloat16, traits) == kernel


@pytest.mark.parametrize("format", ["", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 500, 8192])
def test_sizes_suit_the_format(format, num_tokens):
    traits = traits_of(operands(num_tokens, format))
    first, second = moe_choice.pick_tiles(traits)
    assert first.pairs == second.pairs
    assert not (format and (first.has_descriptors or second.has_descriptors))
    for config in (*moe_choice.pick_rows(traits), *moe_choice.pick_stream(traits)):
        assert config.block % 32 == 0
