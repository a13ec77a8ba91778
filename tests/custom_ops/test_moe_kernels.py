"""The Triton kernels of `route` and `experts`: interpreted, and which of them is chosen."""

from __future__ import annotations

import math

import pytest
import torch

from compiled_engine.custom_ops import moe_block, moe_choice, moe_sizes
from compiled_engine.custom_ops.moe_cuda import traits_of
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.registry import Target
from tests.helpers.interpreted import run_interpreted

pytest.importorskip("triton")

HOPPER = Target("cuda", 90)


@pytest.mark.parametrize("name", ["rows", "stream", "tiles", "route", "route_steps"])
def test_interpreted_kernels_equal_the_references(name):
    run_interpreted("tests.helpers.interpreted_moe", name)


@pytest.mark.parametrize("name", ["rows", "stream", "broken"])
def test_interpreted_kernels_of_whole_mixtures_equal_the_references(name):
    run_interpreted("tests.helpers.interpreted_moe_block", name)


def operands(num_tokens, format="", dtype=torch.bfloat16, size=64, inner=32):
    """Of 8 experts, 2 a token, on the meta device."""
    with torch.device("meta"):
        packed = {
            "": (1, dtype),
            "mxfp4": (2, torch.uint8),
            "nvfp4": (2, torch.uint8),
            "fp8_block": (1, torch.float8_e4m3fn),
        }[format]
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
            *(None, None, None, None),
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
    with pytest.raises(ValueError, match="no kernel best; there are packed_token, packed, rows"):
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


@pytest.mark.parametrize("format", ["", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 500, 8192])
def test_sizes_suit_the_format(format, num_tokens):
    traits = traits_of(operands(num_tokens, format))
    first, second = moe_sizes.pick_tiles(traits)
    assert first.pairs == second.pairs
    assert not (format and (first.has_descriptors or second.has_descriptors))
    for config in (*moe_sizes.pick_rows(traits), *moe_sizes.pick_stream(traits)):
        assert config.block % 32 == 0


def block(num_tokens, *, num_groups=1, size=64, format=""):
    """A whole mixture with the experts of `operands`."""
    experts = operands(num_tokens, format, size=size)
    with torch.device("meta"):
        router = torch.empty(8, size, dtype=torch.bfloat16)
        routing = (2, "softmax", True, num_groups, 1, 1.0)
        head = (experts.x, router[0], 1e-6, router, None, None, *routing)
        return moe_block.BlockOperands(*head, *experts[1:5], *experts[9:17], experts.x)


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (block(1), "apart"),
        (block(2), "stream"),
        (block(64), "stream"),
        (block(65), "apart"),  # sorting them is not known to be slower
        (block(8, num_groups=4), "apart"),
        (block(2, size=8192), "apart"),
        (block(2, format="mxfp4"), "apart"),
    ],
)
def test_the_kernel_of_a_whole_mixture_follows_its_shape(given, kernel):
    traits = moe_block.block_traits_of(given)
    assert moe_choice.select_block("", HOPPER, torch.bfloat16, traits) == kernel


def test_a_kernel_of_a_whole_mixture_says_why_not():
    def reason(name, given):
        traits = moe_block.block_traits_of(given)
        with pytest.raises(ValueError, match="sparse_mlp") as raised:
            moe_choice.select_block(name, HOPPER, torch.bfloat16, traits)
        return str(raised.value)

    assert "takes 128 tokens, not 129" in reason("stream", block(129))
    assert "no groups" in reason("stream", block(2, num_groups=2))
    assert "4096 values, not 8192" in reason("stream", block(1, size=8192))
    assert "has no kernel fast; there are stream, apart, torch" in reason("fast", block(1))
    other = block(1)._replace(router=torch.empty(8, 64, device="meta"))
    assert "same dtype for x, norm and router" in reason("stream", other)


def test_weights_in_e4m3_go_to_kernels_where_the_device_converts_them():
    traits = traits_of(operands(4, "fp8_block"))
    whole = moe_block.block_traits_of(block(4, format="fp8_block"))
    for arch, kernel, whole_kernel in ((80, "torch", "apart"), (89, "stream", "stream")):
        target = Target("cuda", arch)
        assert moe_choice.select_experts("", target, torch.bfloat16, traits) == kernel
        assert moe_choice.select_block("", target, torch.bfloat16, whole) == whole_kernel
    for name in ("rows", "stream", "tiles"):
        with pytest.raises(ValueError, match="needs sm_89 for weights or scales in e4m3"):
            moe_choice.select_experts(name, Target("cuda", 80), torch.bfloat16, traits)


@pytest.mark.parametrize(
    ("arch", "size", "kernel"),
    [(90, 4096, "stream"), (80, 2048, "stream"), (80, 4096, "apart"), (86, 2056, "apart")],
)
def test_rows_that_shared_memory_does_not_hold_are_normed_apart(arch, size, kernel):
    traits = moe_block.block_traits_of(block(20, size=size))
    assert moe_choice.select_block("", Target("cuda", arch), torch.bfloat16, traits) == kernel
    if kernel == "apart":
        with pytest.raises(ValueError, match="needs 196608 bytes of shared memory, there are"):
            moe_choice.select_block("stream", Target("cuda", arch), torch.bfloat16, traits)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 64])
def test_stages_of_streamed_weights_are_those_that_shared_memory_holds(num_tokens):
    traits = traits_of(operands(num_tokens))
    wanted = moe_sizes.pick_stream(traits)
    held = {
        arch: moe_sizes.pick_stream(moe_choice.with_target(traits, Target("cuda", arch)))
        for arch in (80, 86, 90)
    }
    assert held[80] == held[90] == wanted
    for config in held[86]:
        assert config.stages * (config.rows + config.pairs) * config.block * 2 <= 101376
