"""The kernel for packed experts, emulated, against the reference."""

from __future__ import annotations

import functools

import pytest
import torch

from compiled_engine.custom_ops import (
    cuda_build,
    moe,
    moe_packed,
    moe_packed_token,
    moe_sizes,
    reference_moe,
)
from compiled_engine.custom_ops.moe_config import PackedExpertsConfig, PackedTokenConfig
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from tests.helpers import cuda_emulator
from tests.helpers.cubin_copies import copies
from tests.helpers.emulated_experts import run_emulated, run_emulated_token
from tests.helpers.tolerances import assert_close

SMALL = PackedExpertsConfig(8, 1, 2, 2, 1), PackedExpertsConfig(8, 2, 1, 3, 1)
WIDE = PackedExpertsConfig(16, 2, 3, 1, 1), PackedExpertsConfig(24, 1, 2, 4, 1)


def operands_of(
    shape, *, dtype=torch.bfloat16, is_clamped=True, has_bias=True, skew=0.0, format="mxfp4"
):
    """Seeded arguments; shape: tokens, experts, experts a token, sizes."""
    num_tokens, num_experts, top_k, size, inner = shape
    generator = torch.Generator().manual_seed(num_tokens)
    weights = moe.random_expert_weights(
        num_experts,
        size,
        inner,
        dtype=dtype,
        generator=generator,
        format=format,
        has_bias=has_bias,
    )
    x = torch.randn(num_tokens, size + 8, generator=generator).to(dtype)[:, :size]
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits += skew * torch.linspace(0, 1, num_experts)
    routes = moe.Routes(*reference_moe.route(logits, None, top_k, "softmax", True, 1, 1, 1.0))
    activation = moe.Activation("swiglu_clamped", 1.702, 1.5) if is_clamped else moe.Activation()
    return ExpertOperands(*moe.expert_arguments(x, routes, weights, activation))


@pytest.mark.parametrize(
    ("shape", "configs", "options"),
    [
        ((1, 32, 4, 320, 96), SMALL, {}),
        ((1, 70, 5, 96, 64), WIDE, {"dtype": torch.float16}),
        ((9, 3, 2, 64, 544), SMALL, {"skew": 9.0}),
        ((40, 5, 4, 608, 160), WIDE, {"is_clamped": False, "has_bias": False}),
        ((3, 1, 1, 32, 32), SMALL, {}),
        ((1, 32, 8, 320, 96), SMALL, {"format": "nvfp4"}),
        ((9, 3, 2, 64, 544), WIDE, {"format": "nvfp4", "dtype": torch.float16, "skew": 9.0}),
        ((40, 5, 1, 608, 160), WIDE, {"format": "nvfp4", "is_clamped": False, "has_bias": False}),
    ],
)
def test_the_emulated_kernel_equals_the_reference(shape, configs, options):
    operands = operands_of(shape, **options)
    run = functools.partial(run_emulated, operands, *configs)
    got = run()
    assert_close(str(shape), got, reference_moe.experts(*operands), factor=8.0)
    assert torch.equal(got, run(order=cuda_emulator.DESCENDING))


def test_scales_of_any_exponent_are_exact():
    operands = operands_of((4, 2, 1, 64, 32), has_bias=False)
    scale = operands.gate_up_scale
    scale.copy_(torch.randint(0, 250, scale.shape, dtype=torch.uint8))
    operands = operands._replace(x=operands.x * 2.0**-60)
    got = run_emulated(operands, *SMALL)
    assert_close("scales", got, reference_moe.experts(*operands), factor=8.0)
    scale[:, 0, 0] = 255
    assert run_emulated(operands, *SMALL).isnan().all()


def some_scales_of_e4m3(scale):
    """Every positive one in turn, from the smallest that is no normal number to the largest."""
    codes = torch.arange(scale.numel()) % 126 + 1
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).view(scale.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_scales_in_e4m3_are_exact(num_tokens, dtype):
    operands = operands_of((num_tokens, 2, 1, 64, 128), dtype=dtype, has_bias=False, format="nvfp4")
    operands = operands._replace(gate_up_scale=some_scales_of_e4m3(operands.gate_up_scale))
    operands = operands._replace(down_scale=some_scales_of_e4m3(operands.down_scale))
    if num_tokens == 1:
        configs = PackedTokenConfig(1, 2, 2), PackedTokenConfig(1, 2, 2)
        got = run_emulated_token(operands, *configs)
    else:
        got = run_emulated(operands, *SMALL)
    assert_close("scales", got, reference_moe.experts(*operands[:-1]), factor=8.0)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_the_kernel_compiles_without_spills(format):
    operands = operands_of((1, 2, 1, 64, 64), format=format)
    variant = moe_packed.variant_of(operands, SMALL[0], is_down=False)
    cubin = cuda_build.compile_source(moe_packed.SOURCE, "sm_90a", variant.flags)
    assert copies(cubin.code)[1] == 0, "ptxas encoded a copy with a cache policy wrongly"
    assert "0 bytes spill stores" in cubin.log


@pytest.mark.parametrize(
    ("shape", "configs", "options"),
    [
        ((1, 32, 4, 576, 96), (PackedTokenConfig(1, 3, 3), PackedTokenConfig(1, 4, 2)), {}),
        (
            (1, 70, 5, 96, 288),
            (PackedTokenConfig(2, 2, 1, 2), PackedTokenConfig(2, 3, 4)),
            {"dtype": torch.float16},
        ),
        (
            (1, 3, 3, 608, 544),
            (PackedTokenConfig(1, 4, 2), PackedTokenConfig(1, 8, 1)),
            {"is_clamped": False, "has_bias": False},
        ),
        ((1, 1, 1, 32, 32), (PackedTokenConfig(), PackedTokenConfig()), {}),
        (
            (1, 33, 8, 576, 96),
            (PackedTokenConfig(1, 3, 3), PackedTokenConfig(2, 4, 2)),
            {"format": "nvfp4", "is_clamped": False, "has_bias": False},
        ),
        (
            (1, 7, 5, 96, 288),
            (PackedTokenConfig(2, 2, 1, 2), PackedTokenConfig(2, 3, 4)),
            {"format": "nvfp4", "dtype": torch.float16},
        ),
    ],
)
def test_the_emulated_kernel_for_one_token_equals_the_reference(shape, configs, options):
    operands = operands_of(shape, **options)
    run = functools.partial(run_emulated_token, operands, *configs)
    got = run()
    expected = reference_moe.experts(*operands[:-1])
    assert_close(str(shape), got, expected, factor=8.0)
    assert torch.equal(got, run(order=cuda_emulator.DESCENDING))
    residual = torch.randn_like(operands.x.float()).to(operands.x.dtype)
    added = run_emulated_token(operands._replace(residual=residual), *configs)
    assert_close(f"{shape} with a residual", added, residual + expected, factor=8.0)


def test_scales_for_one_token_are_exact():
    operands = operands_of((1, 2, 1, 64, 32), has_bias=False)
    scale = operands.gate_up_scale
    scale.copy_(torch.randint(80, 180, scale.shape, dtype=torch.uint8))
    operands = operands._replace(x=operands.x * 2.0**-40)
    configs = PackedTokenConfig(1, 2, 2), PackedTokenConfig(1, 2, 2)
    got = run_emulated_token(operands, *configs)
    assert_close("scales", got, reference_moe.experts(*operands), factor=8.0)
    scale[:, 0, 0] = 255
    assert run_emulated_token(operands, *configs).isnan().all()


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("is_down", [False, True])
def test_the_kernel_for_one_token_compiles_without_spills(is_down, format):
    operands = operands_of((1, 4, 4, 2880, 2880), format=format)
    config = moe_sizes.pick_packed_token()[is_down]
    variant = moe_packed_token.variant_of(operands, config, is_down=is_down)
    cubin = cuda_build.compile_source(moe_packed_token.SOURCE, "sm_90a", variant.flags)
    assert copies(cubin.code)[1] == 0, "ptxas encoded a copy with a cache policy wrongly"
    assert "0 bytes spill stores" in cubin.log
