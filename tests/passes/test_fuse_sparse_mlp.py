"""Mixtures of experts with their norm, router and add become `sparse_mlp`; near misses stay.

Graphs are traced over fake GPU tensors, so they need no GPU; numbers are compared by running the
graphs before and after on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from compiled_engine.custom_ops import ExpertWeights, experts, rms_norm, route
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.passes import fuse_sparse_mlp
from compiled_engine.passes.names import PieceTraits
from compiled_engine.passes.pipeline import PassPipeline
from tests.passes.test_fuse_linear import found, names, product, rewritten, tensors

T, H, E, K, INNER = 3, 32, 6, 2, 16
SHAPES = ((T, H), (H,), (E, H), (E, 2 * INNER, H), (E, H, INNER))
ROUTING = [K, "softmax", True, 1, 1, 1.0]


def mixture(normed: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return experts(normed, route(logits, None, K), ExpertWeights(gate_up, down))


def whole(x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    normed = rms_norm(x, norm, 1e-5)
    return x + mixture(normed, product(normed, router), gate_up, down)


def nodes_of(
    function: Callable[..., Any], inputs: list[Tensor], *, expected: int, device: str = "cuda"
) -> list[Node]:
    """The new ops; `rewritten` compares numbers."""
    graph = {}

    def apply(given: Any) -> int:
        graph["after"] = given
        return fuse_sparse_mlp.apply(given)

    rewritten(function, inputs, expected=expected, device=device, apply=apply)
    return found(graph["after"], torch.ops.ce.sparse_mlp.default)


def test_fuse_sparse_mlp_takes_norm_router_and_add():
    (node,) = nodes_of(whole, tensors(*SHAPES), expected=1)
    stacks = ["gate_up_1", "down_1", None, None, "silu", 0.0, float("inf")]
    head = ["x_1", "norm_1", 1e-5, "router_1", None, None, *ROUTING]
    assert names(node) == [*head, *stacks, *([None] * 4), "", "x_1"]
    assert {user.op for user in node.users} == {"output"}


def test_fuse_sparse_mlp_takes_the_biases_of_router_and_scores():
    def function(
        x: Tensor, bias: Tensor, scores: Tensor, router: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        logits = product(x, router, bias)
        routes = route(logits, scores, K, scoring="sigmoid", renormalize=False, scale=2.5)
        return experts(x, routes, ExpertWeights(gate_up, down))

    inputs = tensors((T, H), (E,), (E,), *SHAPES[2:])
    (node,) = nodes_of(function, inputs, expected=1)
    assert names(node)[:6] == ["x_1", None, 0.0, "router_1", "bias_1", "scores_1"]
    assert names(node)[6:12] == [K, "sigmoid", False, 1, 1, 2.5]
    assert names(node)[-1] is None


def test_fuse_sparse_mlp_takes_all_scales_of_the_experts():
    def function(x: Tensor, router: Tensor, *packed: Tensor) -> Tensor:
        gate_up, down, first, second, first_global, second_global = packed
        scales = first.to(torch.float8_e4m3fn), second.to(torch.float8_e4m3fn)
        weights = gate_up.to(torch.uint8), down.to(torch.uint8)
        stacks = (*weights, None, None, *scales, first_global, second_global, "nvfp4")
        return x + experts(x, route(product(x, router), None, K), ExpertWeights(*stacks))

    inner = 2 * INNER
    packed = ((E, 2 * inner, H // 2), (E, H, inner // 2))
    scales = ((E, 2 * inner, H // 16), (E, H, inner // 16), (E, 2), (E, 1))
    (node,) = nodes_of(function, tensors((T, H), (E, H), *packed, *scales), expected=1)
    found_scales = node.args[-6:-2]
    shapes = [tuple(scale.meta["val"].shape) for scale in found_scales]
    assert shapes == list(scales)
    assert node.args[-2] == "nvfp4"


def test_fuse_sparse_mlp_keeps_a_norm_that_others_read():
    def function(
        x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = rms_norm(x, norm, 1e-5)
        return x + mixture(normed, product(normed, router), gate_up, down), normed

    (node,) = nodes_of(function, tensors(*SHAPES), expected=1)
    assert names(node)[:3] == ["rms_norm", None, 0.0]
    assert names(node)[-1] == "x_1"


def test_fuse_sparse_mlp_keeps_a_norm_of_another_dtype():
    def function(x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        normed = rms_norm(x, norm, 1e-5).to(torch.bfloat16)
        return mixture(normed, product(normed, router), gate_up, down)

    inputs = tensors(*SHAPES)
    inputs[1] = inputs[1].float()
    (node,) = nodes_of(function, inputs, expected=1)
    assert names(node)[1] is None


def test_fuse_sparse_mlp_leaves_an_add_of_several_or_of_another_shape():
    def broadcast(x: Tensor, norm: Tensor, *rest: Tensor) -> Tensor:
        return norm + mixture(x, product(x, rest[0]), *rest[1:])

    def read_twice(x: Tensor, norm: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        y = mixture(x, product(x, rest[0]), *rest[1:])
        return x + y, y

    for function in (broadcast, read_twice):
        (node,) = nodes_of(function, tensors(*SHAPES), expected=1)
        assert names(node)[-1] is None


def _logits_read(x: Tensor, norm: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    logits = product(x, rest[0])
    return mixture(x, logits, *rest[1:]), logits


def _routes_read(x: Tensor, norm: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    routes = route(product(x, rest[0]), None, K)
    return experts(x, routes, ExpertWeights(*rest[1:])), routes.ids


def _other_input(x: Tensor, norm: Tensor, *rest: Tensor) -> Tensor:
    return mixture(x + 1, product(x, rest[0]), *rest[1:])


def _no_product(x: Tensor, norm: Tensor, *rest: Tensor) -> Tensor:
    return mixture(x, x.sum(1, keepdim=True).expand(T, E), *rest[1:])


@pytest.mark.parametrize("function", [_logits_read, _routes_read, _other_input, _no_product])
def test_fuse_sparse_mlp_leaves(function: Callable[..., Any]):
    assert nodes_of(function, tensors(*SHAPES), expected=0) == []


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "cuda")])
def test_fuse_sparse_mlp_is_for_16_bit_on_a_gpu(dtype: torch.dtype, device: str):
    inputs = tensors(*SHAPES, dtype=dtype)
    assert nodes_of(whole, inputs, expected=0, device=device) == []


def test_an_option_for_a_part_leaves_the_parts_apart():
    def names_of(*overrides: str) -> list[str]:
        pipeline = PassPipeline(on_pass=lambda *_: None, registry=make_registry(overrides))
        return [module.NAME for module in pipeline.fusions]

    assert fuse_sparse_mlp.NAME in names_of()
    assert fuse_sparse_mlp.NAME in names_of("sparse_mlp=apart")
    assert fuse_sparse_mlp.NAME not in names_of("experts=stream")
    assert fuse_sparse_mlp.NAME not in names_of("route=torch")


def test_it_is_for_pieces_of_few_tokens():
    assert fuse_sparse_mlp.NAME in PieceTraits().skipped()
    assert fuse_sparse_mlp.NAME not in PieceTraits(is_few=True).skipped()
