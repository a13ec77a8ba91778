"""Matrix products of few rows take their norm in front and what follows into one op.

    before:  n = ce.rms_norm(x, g, eps)
             p = aten.mm(n, permute(w, [1, 0]))
             y = ce.silu_and_mul(p)  or  residual + p  or  p
    after:   y = ce.fused_linear(x, w, bias, g, eps, residual, is_gated)

Conditions: on a GPU, x [T, k] and w [n, k] of one 16-bit dtype, the bias one vector. Each of norm,
gate and residual is optional; a product that something else reads too keeps its plain value. For
pieces compiled for few tokens only: the op reads the weights once at memory speed, and with many
rows the library's product is faster.
Numerics: the norm's scale is applied behind the product and the residual is added in fp32, so the
result is rounded fewer times than the matched spelling's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    calls,
    copy_meta,
    is_like,
    other_addend,
)

NAME = "fuse_linear"


class Product(NamedTuple):
    """A product with a weight: `node = x @ weight.T + bias`."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many products became the op."""
    aten = torch.ops.aten
    matches = 0
    for overload in (aten.mm.default, aten.addmm.default):
        for node in calls(graph, overload):
            # Looked at one by one: an earlier rewrite may have changed what this one reads.
            product = product_of(node)
            if product is not None:
                _replace(graph, product)
                matches += 1
    return matches


def use_plain(graph: Graph) -> int:
    """Products without a bias, with a residual at most; returns how many became the op."""
    matches = 0
    for node in calls(graph, torch.ops.aten.mm.default):
        product = product_of(node)
        if product is None:
            continue
        output, residual = node, None
        if len(node.users) == 1:
            (user,) = node.users
            residual = other_addend(user, node)
            output = node if residual is None else user
        _put(graph, output, (product.x, product.weight, None, None, 0.0, residual, False), node)
        matches += 1
    return matches


def product_of(node: Node) -> Product | None:
    """The product that `node`, an `mm` or `addmm`, is, if `fused_linear` may compute it."""
    aten = torch.ops.aten
    if node.kwargs:
        return None
    *first, x, transposed = node.args
    bias = first[0] if first else None
    if not isinstance(x, Node) or not isinstance(transposed, Node):
        return None
    if transposed.target is not aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    weight = transposed.args[0]
    assert isinstance(weight, Node)
    operands = [x, weight] + ([bias] if isinstance(bias, Node) else [])
    values = [operand.meta["val"] for operand in operands]
    if any(v.device.type != "cuda" or v.dtype != values[0].dtype for v in values):
        return None
    if values[0].dtype not in (torch.bfloat16, torch.float16) or not values[1].is_contiguous():
        return None
    if bias is not None and values[2].shape != values[1].shape[:1]:
        return None
    return Product(node, x, weight, bias if isinstance(bias, Node) else None)


def _replace(graph: Graph, product: Product) -> None:
    x, norm_weight, eps = product.x, None, 0.0
    if x.target is torch.ops.ce.rms_norm.default and is_like(x.args[0], x):
        x, norm_weight, eps = x.args  # type: ignore[assignment]
    output, residual, is_gated = product.node, None, False
    if len(product.node.users) == 1:
        (user,) = product.node.users
        if user.target is torch.ops.ce.silu_and_mul.default:
            output, is_gated = user, True
        elif (added := other_addend(user, product.node)) is not None:
            output, residual = user, added
    arguments = (x, product.weight, product.bias, norm_weight, eps, residual, is_gated)
    _put(graph, output, arguments, product.node)


def _put(graph: Graph, output: Node, arguments: tuple[Any, ...], product: Node) -> None:
    """Puts the op in the place of `output`, which reads `product` or is it."""
    with graph.inserting_before(output):
        fused = graph.call_function(torch.ops.ce.fused_linear.default, arguments)
    copy_meta(fused, output)
    output.replace_all_uses_with(fused)
    graph.erase_node(output)
    if output is not product:
        graph.erase_node(product)
