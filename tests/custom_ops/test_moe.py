"""Routing against a scalar spelling of it, and experts in every format against the plain loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import Activation, ExpertWeights, Routes, experts, route
from compiled_engine.custom_ops import reference_moe as bodies
from compiled_engine.custom_ops.moe import expert_arguments, random_expert_weights
from compiled_engine.custom_ops.reference import swiglu_clamped
from tests.helpers.tolerances import assert_close


def scalar_route(
    logits: list[float], bias: list[float] | None, top_k: int, options: dict[str, Any]
) -> tuple[list[float], list[int]]:
    """Weights and experts of one token, number by number."""
    if options["scoring"] == "softmax":
        top = max(logits)
        total = sum(math.exp(v - top) for v in logits)
        scores = [math.exp(v - top) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(choice) // options["num_groups"]
    groups = [choice[g * size : (g + 1) * size] for g in range(options["num_groups"])]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: (-worth[g], g))[: options["top_groups"]]
    allowed = [e for e in range(len(choice)) if e // size in best]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
    weights = [scores[e] for e in ids]
    divisor = sum(weights) if options["renormalize"] else 1.0
    return [w / divisor * options["scale"] for w in weights], ids


PLAIN = {"scoring": "softmax", "renormalize": True, "num_groups": 1, "top_groups": 1, "scale": 1.0}
DEEPSEEK = {**PLAIN, "scoring": "sigmoid", "scale": 2.5}
ROUTES = {
    "T7-E8-k2": (7, 8, 2, PLAIN),
    "T5-E128-k8": (5, 128, 8, PLAIN),
    "T5-E7-k1-raw": (5, 7, 1, {**PLAIN, "renormalize": False}),
    "T3-E5-k5": (3, 5, 5, PLAIN),
    "T3-E61-k16": (3, 61, 16, PLAIN),
    "T9-E9-k3-sigmoid": (9, 9, 3, {**DEEPSEEK, "renormalize": False}),
    "T9-E16-k4-4-groups": (9, 16, 4, {**DEEPSEEK, "num_groups": 4, "top_groups": 2}),
    "T4-E256-k8-8-groups": (4, 256, 8, {**DEEPSEEK, "num_groups": 8, "top_groups": 4}),
    "T4-E6-k2-6-groups": (4, 6, 2, {**DEEPSEEK, "num_groups": 6, "top_groups": 3}),
    "T1-E1-k1": (1, 1, 1, PLAIN),
    "T0-E4-k2": (0, 4, 2, PLAIN),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", ROUTES)
def test_route_equals_scalar_spelling(case: str, with_bias: bool):
    num_tokens, num_experts, top_k, options = ROUTES[case]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
    bias = torch.randn(num_experts, generator=generator) * 0.3 if with_bias else None
    got = route(logits, bias, top_k, **options)
    assert_permutation(got, num_experts)
    for token in range(num_tokens):
        listed = None if bias is None else bias.double().tolist()
        weights, ids = scalar_route(logits[token].double().tolist(), listed, top_k, options)
        assert got.ids[token].tolist() == ids
        assert got.weights[token].tolist() == pytest.approx(weights, rel=1e-5)


def assert_permutation(routes: Routes, num_experts: int) -> None:
    """`order` and `offsets` sort the pairs by expert, then by pair."""
    flat, offsets = routes.ids.flatten().tolist(), routes.offsets.tolist()
    assert routes.order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert (len(offsets), offsets[0], offsets[-1]) == (num_experts + 1, 0, len(flat))
    for expert in range(num_experts):
        assert offsets[expert + 1] - offsets[expert] == flat.count(expert)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_route_takes_the_lower_of_equal_experts(scoring: str):
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0] * 5])
    got = route(logits, None, 4, scoring=scoring)
    assert got.ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e4])
def test_route_stays_in_range_for_any_logits(value: float):
    """Padding rows may hold anything; their experts must exist."""
    logits = torch.full((2, 6), value)
    for options in (PLAIN, {**DEEPSEEK, "num_groups": 3, "top_groups": 2}):
        got = route(logits, None, 3, **options)
        assert sorted(set(got.ids.flatten().tolist()) - set(range(6))) == []
        assert_permutation(got, 6)
    if value == -1e4:  # every sigmoid is 0
        assert got.weights.tolist() == [[0.0] * 3] * 2


SHAPES = {
    "T1-E8-k2": (1, 8, 2, 64, 32),
    "T5-E7-k3": (5, 7, 3, 64, 96),
    "T64-E3-k1": (64, 3, 1, 32, 64),
    "T9-E40-k16": (9, 40, 16, 32, 32),
    "T2-E60-k1-most-empty": (2, 60, 1, 32, 32),
    "T0-E4-k2": (0, 4, 2, 32, 32),
}
ACTIVATIONS = {"silu": Activation(), "clamped": Activation("swiglu_clamped", 1.702, 0.8)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", ["", "mxfp4", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_the_plain_loop(shape: str, format: str, activation: str):
    x, routes, weights = experts_case(SHAPES[shape], format)
    chosen = ACTIVATIONS[activation]
    got = experts(x, routes, weights, chosen)
    expected = bodies.experts(*expert_arguments(x, routes, weights, chosen))
    assert_close("experts", got, expected)
    arguments = expert_arguments(x, routes, weights, chosen)
    assert torch.equal(torch.ops.ce.experts.default(*arguments, impl="torch"), expected)


def test_experts_on_a_cpu_refuse_what_does_not_run_there():
    arguments = expert_arguments(*experts_case((2, 3, 1, 32, 32), ""), Activation())
    with pytest.raises(ValueError, match="stream does not run on a CPU; grouped and torch do"):
        torch.ops.ce.experts.default(*arguments, impl="stream")


def experts_case(shape: tuple[int, ...], format: str) -> tuple[Tensor, Routes, ExpertWeights]:
    num_tokens, num_experts, top_k, hidden, inner = shape
    generator = torch.Generator().manual_seed(1)
    weights = random_expert_weights(
        num_experts,
        hidden,
        inner,
        dtype=torch.float32,
        generator=generator,
        format=format,
        has_bias=True,
    )
    x = torch.randn(num_tokens, hidden, generator=generator)
    return x, route(torch.randn(num_tokens, num_experts, generator=generator), None, top_k), weights


def test_experts_of_one_token_are_its_own_products():
    """The plain loop itself, against the formula written out for one pair after the other."""
    x, routes, weights = experts_case((4, 5, 2, 16, 8), "")
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    got = bodies.experts(*expert_arguments(x, routes, weights, Activation()))
    for token in range(4):
        total = torch.zeros(16, dtype=torch.float64)
        for weight, e in zip(routes.weights[token], routes.ids[token].tolist(), strict=True):
            y = weights.gate_up[e].double() @ x[token].double() + weights.gate_up_bias[e]
            gate, up = y[:8], y[8:]
            inner = gate / (1 + torch.exp(-gate)) * up
            total += float(weight) * (weights.down[e].double() @ inner + weights.down_bias[e])
        assert_close("token", got[token], total)


def test_clamped_swiglu_clamps_the_gate_above_and_up_on_both_sides():
    gate, up = torch.tensor([-9.0, 9.0, 0.5]), torch.tensor([9.0, -9.0, 0.5])
    got = swiglu_clamped(torch.cat((gate, up)), 1.5, 2.0)
    expected = [
        (u + 1) * g / (1 + math.exp(-1.5 * g)) for g, u in ((-9.0, 2.0), (2.0, -2.0), (0.5, 0.5))
    ]
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (2, 320)])
def test_mxfp4_values_are_transformers_own(shape: tuple[int, int]):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    num_rows, num_columns = shape
    packed = torch.randint(0, 256, (num_rows, num_columns // 2)).to(torch.uint8)
    scale = torch.randint(100, 150, (num_rows, num_columns // 32)).to(torch.uint8)
    got = bodies.dequantize_expert(packed, scale, "mxfp4", torch.float32)
    blocks = packed.view(1, num_rows, -1, 16)
    expected = convert_moe_packed_tensors(blocks, scale[None], dtype=torch.float32)[0].T
    assert torch.equal(got, expected)


def test_fp8_blocks_are_scaled_by_their_own_scale():
    weight = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).view(2, 3)
    got = bodies.dequantize_expert(weight, scale, "fp8_block", torch.float32)
    rows, columns = torch.arange(130)[:, None] // 128, torch.arange(257)[None] // 128
    assert torch.equal(got, scale[rows, columns])
