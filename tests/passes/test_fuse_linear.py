"""Products with their norm, gate and residual become `fused_linear`; near misses stay.

Graphs are traced over fake GPU tensors, so they need no GPU; numbers are compared by running the
graphs before and after on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine.custom_ops import rms_norm, silu_and_mul
from compiled_engine.passes import decode_attention, fuse_linear, use_library_op

BF16 = torch.bfloat16
T, K, N = 5, 32, 24


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product as Inductor's graphs spell it."""
    transposed = torch.ops.aten.permute.default(weight, [1, 0])
    if bias is None:
        return torch.ops.aten.mm.default(x, transposed)
    return torch.ops.aten.addmm.default(bias, x, transposed)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def traced(function: Callable[..., Any], inputs: list[Tensor], device: str = "cuda") -> GraphModule:
    with FakeTensorMode():
        fakes = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs]
        return make_fx(function)(*fakes)


def rewritten(
    function: Callable[..., Any],
    inputs: list[Tensor],
    *,
    expected: int,
    device: str = "cuda",
    apply: Callable[[Graph], int] = fuse_linear.apply,
) -> list[Node]:
    """Runs the pass, compares numbers, and returns the new op's nodes."""
    before = traced(function, inputs, device)
    after = copy.deepcopy(before)
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    assert apply(after.graph) == expected
    after.graph.eliminate_dead_code()
    after.graph.lint()
    after.recompile()
    for got, want in zip(_listed(after(*inputs)), _listed(before(*inputs)), strict=True):
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
    return found(after.graph, torch.ops.ce.fused_linear.default)


def found(graph: Graph, target: Any) -> list[Node]:
    return [node for node in graph.nodes if node.target is target]


def _listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def names(node: Node) -> list[Any]:
    return [arg.name if isinstance(arg, Node) else arg for arg in node.args]


def test_fuse_linear_takes_norm_and_residual():
    def function(x: Tensor, norm: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual + product(rms_norm(x, norm, 1e-5), weight)

    inputs = tensors((T, K), (K,), (N, K), (T, N))
    (node,) = rewritten(function, inputs, expected=1)
    assert names(node) == ["x_1", "weight_1", None, "norm_1", 1e-5, "residual_1", False]


def test_fuse_linear_takes_bias_and_gate():
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return silu_and_mul(product(x, weight, bias))

    (node,) = rewritten(function, tensors((T, K), (2 * N, K), (2 * N,)), expected=1)
    assert names(node) == ["x_1", "weight_1", "bias_1", None, 0.0, None, True]


def test_fuse_linear_of_a_layer_leaves_no_product():
    def function(
        x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, second: Tensor, head: Tensor
    ) -> Tensor:
        hidden = silu_and_mul(product(rms_norm(x, norm, 1e-5), gate_up))
        x = x + product(hidden, down)
        return product(rms_norm(x, second, 1e-6), head)

    inputs = tensors((T, K), (K,), (2 * N, K), (K, N), (K,), (40, K))
    nodes = rewritten(function, inputs, expected=3)
    assert names(nodes[0])[3:] == ["norm_1", 1e-5, None, True]
    assert names(nodes[1])[3:] == [None, 0.0, "x_1", False]
    assert names(nodes[2])[3:] == ["second_1", 1e-6, None, False]


def test_fuse_linear_keeps_a_product_that_others_read():
    def function(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = product(x, weight)
        return residual + y, y

    (node,) = rewritten(function, tensors((T, K), (N, K), (T, N)), expected=1)
    assert names(node)[5] is None


def test_fuse_linear_uses_a_norm_twice():
    def function(x: Tensor, norm: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms_norm(x, norm, 1e-5)
        return product(normed, first), product(normed, second)

    nodes = rewritten(function, tensors((T, K), (K,), (N, K), (7, K)), expected=2)
    assert [names(node)[3] for node in nodes] == ["norm_1", "norm_1"]


def test_fuse_linear_leaves_a_broadcast_add():
    def function(x: Tensor, weight: Tensor, row: Tensor) -> Tensor:
        return product(x, weight) + row

    (node,) = rewritten(function, tensors((T, K), (N, K), (1, N)), expected=1)
    assert names(node)[5] is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fuse_linear_is_for_16_bit_on_a_gpu(device: str):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight)

    dtype = torch.float32 if device == "cuda" else BF16
    assert not rewritten(function, tensors((T, K), (N, K), dtype=dtype), expected=0, device=device)


def test_fuse_linear_leaves_products_without_a_weight():
    def function(x: Tensor, other: Tensor) -> Tensor:
        return torch.ops.aten.mm.default(x, other)

    assert not rewritten(function, tensors((T, K), (K, N)), expected=0)


def test_decode_attention_marks_every_call():
    def function(q: Tensor, cache: Tensor, table: Tensor, ints: Tensor, longs: Tensor) -> Tensor:
        out = torch.ops.ce.paged_attention.default(
            q, cache, cache, table, ints, ints, ints, longs, longs, ints, 0.5
        )
        return torch.ops.ce.paged_attention.default(
            out, cache, cache, table, ints, ints, ints, longs, longs, ints, 0.5, 7
        )

    floats = tensors((2, 4, 16), (3, 4, 2, 16))
    ints = torch.zeros(2, dtype=torch.int32)
    graph = traced(function, [*floats, ints[None], ints, ints.long()]).graph
    assert decode_attention.apply(graph) == 2
    calls = found(graph, torch.ops.ce.paged_attention.default)
    assert [node.kwargs for node in calls] == [{"is_decode": True}] * 2
    assert calls[1].args[11] == 7


def plain(function: Callable[..., Any], inputs: list[Tensor], expected: int) -> list[Node]:
    return rewritten(function, inputs, expected=expected, apply=use_library_op.apply)


def test_use_library_op_takes_sums_and_leaves_norms_and_gates():
    def function(
        x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, head: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = silu_and_mul(product(rms_norm(x, norm, 1e-5), gate_up))
        x = product(hidden, down) + x
        return x, product(x, head)

    inputs = tensors((T, K), (K,), (2 * N, K), (K, N), (40, K))
    first, second, third = plain(function, inputs, expected=3)
    assert names(first) == ["rms_norm", "gate_up_1", None, None, 0.0, None, False]
    assert names(second) == ["silu_and_mul", "down_1", None, None, 0.0, "x_1", False]
    assert names(third)[1:] == ["head_1", None, None, 0.0, None, False]
    assert third.args[0] is second


@pytest.mark.parametrize("what", ["read twice", "row", "other dtype", "scaled"])
def test_use_library_op_adds_only_what_it_can(what: str):
    def function(x: Tensor, weight: Tensor, residual: Tensor, row: Tensor) -> Any:
        y = product(x, weight)
        if what == "read twice":
            return residual + y, y
        if what == "row":
            return row + y
        if what == "other dtype":
            return residual.float() + y
        return torch.add(residual, y, alpha=2)

    (node,) = plain(function, tensors((T, K), (N, K), (T, N), (1, N)), expected=1)
    assert names(node)[5] is None


@pytest.mark.parametrize("what", ["bias", "cpu", "fp32"])
def test_use_library_op_leaves_other_products(what: str):
    def function(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + product(x, weight, bias if what == "bias" else None)

    dtype = torch.float32 if what == "fp32" else BF16
    inputs = tensors((T, K), (N, K), (N,), (T, N), dtype=dtype)
    before = traced(function, inputs, "cpu" if what == "cpu" else "cuda")
    assert use_library_op.apply(before.graph) == 0
