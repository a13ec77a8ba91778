"""RMS norms written out become one op.

    before:  f = convert(x, fp32);  v = mean(pow(f, 2), [-1], True);  n = f * rsqrt(v + eps)
             y = w * convert(n, x's dtype)         or  y = convert((offset + w) * n)
    after:   y = ce.rms_norm(x, w, eps)            or  y = ce.scaled_rms_norm(x, w, eps, offset)

The first spelling is Llama's and most others'; the second, in which the weight is applied before
the result is rounded, is that of OLMo 2 (offset 0) and of Gemma (offset 1: weights lie near 0).
Operands stand in either order, and a square may be a product.
Conditions: the mean is over the last dim, the weight is one vector as long as it; statistics are in
fp32. Values in between that something else reads too are computed for it still.
Numerics: exact, the ops' bodies are the matched spellings.
Source: the RMS norms of transformers' modelling code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    args_of,
    calls,
    copy_meta,
    is_call,
    is_same_size,
    unconverted,
    value_of,
)

NAME = "lift_rms_norm"


class _Normed(NamedTuple):
    """`x / sqrt(mean(x^2) + eps)` in fp32."""

    x: Node
    eps: float


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many norms became an op."""
    matches = 0
    for node in calls(graph, torch.ops.aten.mul.Tensor):
        matches += _lift(graph, node)
    graph.eliminate_dead_code()
    return matches


def _lift(graph: Graph, product: Node) -> bool:
    if len(args_of(product)) != 2 or product.kwargs:
        return False
    for weight, scaled in (args_of(product), args_of(product)[::-1]):
        if not isinstance(weight, Node) or not isinstance(scaled, Node):
            continue
        plain = _normed(unconverted(scaled, None))
        if plain is None:
            continue
        x = value_of(plain.x)
        is_plain = value_of(scaled).dtype == x.dtype and not _without_offset(weight)[1]
        if is_plain and _is_weight(weight, x, same_dtype=True):
            op = torch.ops.ce.rms_norm.default
            return _replace(graph, product, op, (plain.x, weight, plain.eps))
        late = _late(product, scaled, weight, x)
        if late is not None:
            output, inner, offset = late
            arguments = (plain.x, inner, plain.eps, offset)
            return _replace(graph, output, torch.ops.ce.scaled_rms_norm.default, arguments)
    return False


def _late(
    product: Node, scaled: Node, weight: Node, x: torch.Tensor
) -> tuple[Node, Node, float] | None:
    """Output, weight and offset of a norm whose weight is applied in fp32."""
    if value_of(scaled).dtype != torch.float32 or value_of(product).dtype != torch.float32:
        return None
    inner, offset = _without_offset(weight)
    if offset and value_of(weight).dtype != torch.float32:
        return None  # a sum that is rounded before it is applied
    inner = unconverted(inner, torch.float32)
    if not _is_weight(inner, x, same_dtype=False):
        return None
    if x.dtype == torch.float32:
        return product, inner, offset
    (output,) = list(product.users) if len(product.users) == 1 else (None,)
    convert = torch.ops.prims.convert_element_type.default
    if output is None or output.target is not convert or value_of(output).dtype != x.dtype:
        return None
    return output, inner, offset


def _without_offset(weight: Node) -> tuple[Node, float]:
    """`(w, number)` of `w + number`."""
    if weight.target is torch.ops.aten.add.Tensor and not weight.kwargs:
        for inner, number in (args_of(weight), args_of(weight)[::-1]):
            if isinstance(inner, Node) and isinstance(number, (int, float)):
                return inner, float(number)
    return weight, 0.0


def _is_weight(weight: Node, x: torch.Tensor, *, same_dtype: bool) -> bool:
    value = value_of(weight)
    if value.dim() != 1 or not is_same_size(value.shape[0], x.shape[-1]):
        return False
    return value.is_floating_point() and (not same_dtype or value.dtype == x.dtype)


def _normed(node: Node) -> _Normed | None:
    """Takes `f * rsqrt(mean(f^2) + eps)` apart."""
    if node.target is not torch.ops.aten.mul.Tensor or len(args_of(node)) != 2:
        return None
    for full, factor in (args_of(node), args_of(node)[::-1]):
        if not isinstance(full, Node) or not is_call(factor, torch.ops.aten.rsqrt.default):
            continue
        shifted = args_of(factor)[0]
        if not is_call(shifted, torch.ops.aten.add.Tensor) or shifted.kwargs:
            continue
        mean, eps = args_of(shifted)
        if not isinstance(eps, float) or not _is_mean_of_squares(mean, full):
            continue
        if value_of(full).dtype != torch.float32:
            continue
        return _Normed(unconverted(full, torch.float32), eps)
    return None


def _is_mean_of_squares(node: Any, full: Node) -> bool:
    aten = torch.ops.aten
    if not is_call(node, aten.mean.dim) or args_of(node)[1:] != ([-1], True) or node.kwargs:
        return False
    square = args_of(node)[0]
    if is_call(square, aten.pow.Tensor_Scalar):
        return bool(args_of(square)[0] is full and args_of(square)[1] == 2)
    return (
        is_call(square, aten.mul.Tensor)
        and args_of(square)[0] is full
        and args_of(square)[1] is full
    )


def _replace(graph: Graph, output: Node, op: Any, arguments: tuple[Any, ...]) -> bool:
    with graph.inserting_before(output):
        lifted = graph.call_function(op, arguments)
    copy_meta(lifted, output)
    output.replace_all_uses_with(lifted)
    graph.erase_node(output)
    return True
