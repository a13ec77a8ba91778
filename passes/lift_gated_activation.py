"""Gated activations written out over two halves of one tensor become one op.

    before:  gate, up = x[..., :n], x[..., n:]
             f = convert(gate, fp32);  a = convert(f / (exp(-f) + 1), x's dtype);  y = a * up
    after:   y = ce.silu_and_mul(x)

Likewise GELU, exact and by tanh, to `ce.gelu_and_mul`, and the clamped SwiGLU of gpt-oss to
`ce.swiglu_clamped`. The halves are slices, or outputs of a split; `merge_linears` makes them where
a model computes gate and up apart. Operands of the last product stand in either order.
Conditions: gate is the first half and up the second of the same tensor's last dim.
Numerics: exact, the ops' bodies are the matched spellings.
Source: the MLPs of transformers' modelling code.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    args_of,
    calls,
    copy_meta,
    is_call,
    sliced,
    unconverted,
    value_of,
)

NAME = "lift_gated_activation"

_GELU_CUBE = 0.044715
_SQRT_2_OVER_PI = 0.7978845608028654
_SQRT_HALF = 0.7071067811865476


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many activations became an op."""
    matches = 0
    for node in calls(graph, torch.ops.aten.mul.Tensor):
        matches += _lift(graph, node)
    graph.eliminate_dead_code()
    return matches


def _lift(graph: Graph, product: Node) -> bool:
    if len(args_of(product)) != 2 or product.kwargs:
        return False
    for left, right in (args_of(product), args_of(product)[::-1]):
        if not isinstance(left, Node) or not isinstance(right, Node):
            continue
        found = _gated(left, right) or _clamped(left, right)
        if found is None:
            continue
        gate, up, op, arguments = found
        x = _source_of_halves(gate, up)
        if x is None or value_of(product).dtype != value_of(x).dtype:
            continue
        with graph.inserting_before(product):
            lifted = graph.call_function(op, (x, *arguments))
        copy_meta(lifted, product)
        product.replace_all_uses_with(lifted)
        graph.erase_node(product)
        return True
    return False


Found = tuple[Node, Node, Any, tuple[Any, ...]]


def _gated(activated: Node, up: Node) -> Found | None:
    """`act(gate) * up` as gate, up, op and the op's arguments behind the tensor."""
    if value_of(activated).dtype != value_of(up).dtype:
        return None
    inner = unconverted(activated, value_of(up).dtype)
    ce = torch.ops.ce
    for match, op, arguments in (
        (_silu, ce.silu_and_mul.default, ()),
        (_gelu_tanh, ce.gelu_and_mul.default, ("tanh",)),
        (_gelu_erf, ce.gelu_and_mul.default, ("none",)),
    ):
        full = match(inner)
        if full is None or value_of(full).dtype != torch.float32:
            continue
        gate = unconverted(full, torch.float32)
        if value_of(gate).dtype == value_of(up).dtype:
            return gate, up, op, arguments
    return None


def _silu(node: Node) -> Node | None:
    """`f` of `f / (exp(-f) + 1)` or `f * sigmoid(f)`."""
    aten = torch.ops.aten
    if is_call(node, aten.div.Tensor) and len(args_of(node)) == 2:
        full, divisor = args_of(node)
        if is_call(divisor, aten.add.Tensor) and args_of(divisor)[1] == 1:
            power = args_of(divisor)[0]
            if is_call(power, aten.exp.default) and is_call(args_of(power)[0], aten.neg.default):
                is_same = args_of(args_of(power)[0])[0] is full
                return full if is_same and isinstance(full, Node) else None
    for full, factor in _both_ways(node):
        if is_call(factor, aten.sigmoid.default) and args_of(factor)[0] is full:
            return full
    return None


def _gelu_tanh(node: Node) -> Node | None:
    """`f` of `0.5 f (tanh(0.798 (f + 0.0447 f^3)) + 1)`."""
    aten = torch.ops.aten
    for half, shifted in _both_ways(node):
        full = _times(half, 0.5)
        if full is None or not is_call(shifted, aten.add.Tensor) or args_of(shifted)[1] != 1:
            continue
        tanh = args_of(shifted)[0]
        inner = (
            _times(args_of(tanh)[0], _SQRT_2_OVER_PI) if is_call(tanh, aten.tanh.default) else None
        )
        if inner is None or not is_call(inner, aten.add.Tensor) or args_of(inner)[0] is not full:
            continue
        cube = _times(args_of(inner)[1], _GELU_CUBE)
        if cube is not None and _is_cube(cube, full):
            return full
    return None


def _is_cube(node: Node, full: Node) -> bool:
    aten = torch.ops.aten
    if is_call(node, aten.pow.Tensor_Scalar):
        return bool(args_of(node) == (full, 3))
    if not is_call(node, aten.mul.Tensor) or len(args_of(node)) != 2:
        return False
    square, last = args_of(node)
    if last is not full or not isinstance(square, Node):
        return False
    if is_call(square, aten.pow.Tensor_Scalar):
        return bool(args_of(square) == (full, 2))
    return bool(is_call(square, aten.mul.Tensor) and args_of(square) == (full, full))


def _gelu_erf(node: Node) -> Node | None:
    """`f` of `0.5 f (erf(f / sqrt 2) + 1)`."""
    aten = torch.ops.aten
    for half, shifted in _both_ways(node):
        full = _times(half, 0.5)
        if full is None or not is_call(shifted, aten.add.Tensor) or args_of(shifted)[1] != 1:
            continue
        erf = args_of(shifted)[0]
        if is_call(erf, aten.erf.default) and _times(args_of(erf)[0], _SQRT_HALF) is full:
            return full
    return None


def _clamped(left: Node, right: Node) -> Found | None:
    """`(up + 1) * (gate * sigmoid(alpha gate))` with both clamped."""
    aten = torch.ops.aten
    if not is_call(left, aten.add.Tensor) or args_of(left)[1] != 1:
        return None
    up = _clamp(args_of(left)[0])
    for gate, factor in _both_ways(right):
        if not is_call(factor, aten.sigmoid.default):
            continue
        scaled = args_of(factor)[0]
        if not is_call(scaled, aten.mul.Tensor) or args_of(scaled)[0] is not gate:
            continue
        alpha = args_of(scaled)[1]
        limited = _clamp(gate)
        if up is None or limited is None or not isinstance(alpha, float):
            continue
        source, low, high = up
        gate_source, gate_low, gate_high = limited
        if high is None or low != -high or gate_low is not None or gate_high != high:
            continue
        arguments = (alpha, float(high))
        return gate_source, source, torch.ops.ce.swiglu_clamped.default, arguments
    return None


def _clamp(node: Any) -> tuple[Node, float | None, float | None] | None:
    """What is clamped, and to what."""
    aten = torch.ops.aten
    low: float | None = None
    high: float | None = None
    start = node
    while isinstance(node, Node) and len(args_of(node)) == 2:
        if node.target is aten.clamp_min.default and low is None:
            low = args_of(node)[1]
        elif node.target is aten.clamp_max.default and high is None:
            high = args_of(node)[1]
        else:
            break
        node = args_of(node)[0]
    return (node, low, high) if node is not start and isinstance(node, Node) else None


def _both_ways(node: Node) -> list[tuple[Node, Node]]:
    """Operands of a product of two tensors, and the same swapped."""
    if not is_call(node, torch.ops.aten.mul.Tensor) or len(args_of(node)) != 2:
        return []
    left, right = args_of(node)
    if not isinstance(left, Node) or not isinstance(right, Node):
        return []
    return [(left, right), (right, left)]


def _times(node: Any, number: float) -> Node | None:
    """The tensor of `tensor * number`."""
    if is_call(node, torch.ops.aten.mul.Tensor) and args_of(node)[1] == number:
        return args_of(node)[0]
    return None


def _source_of_halves(gate: Node, up: Node) -> Node | None:
    """The tensor whose last dim is gate, then up."""
    first, second = _cut(gate), _cut(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    x = first[0]
    size = value_of(x).shape[-1]
    if not isinstance(size, int) or size % 2:
        return None
    is_halves = first[1:] == (0, size // 2) and second[1:] == (size // 2, size)
    return x if is_halves else None


def _cut(node: Node) -> tuple[Node, int, int] | None:
    """The tensor that a range of the last dim is cut from, and the range."""
    aten = torch.ops.aten
    if node.target is operator.getitem and is_call(args_of(node)[0], aten.split.Tensor):
        split, index = args_of(node)
        source, length, *rest = args_of(split)
        dim = rest[0] if rest else 0
        if not isinstance(source, Node) or not isinstance(length, int):
            return None
        value = value_of(source)
        start = int(index) * length
        is_last = dim in (-1, value.dim() - 1)
        return (source, start, start + length) if is_last else None
    cut = sliced(node)
    if cut is None or cut[1] != value_of(cut[0]).dim() - 1:
        return None
    return cut[0], cut[2], cut[3]
