"""Quantised layers of few rows take their norm in front and what follows into one op.

    before:  n = ce.rms_norm(x, g, eps)
             q, s = ce.quantize_fp8(n, "token", None)
             p = aten.mm(ce.dequantize(q, s, ...), permute(ce.dequantize(w, ...), [1, 0]))
             y = ce.silu_and_mul(p)  or  residual + p  or  p
    after:   y = ce.quantized_linear(x, w, ..., format, "fp8_token", g, eps, residual, is_gated)

Conditions: the product's operands have one dtype, the dequantised columns are those of x. Norm,
quantiser (of any activation format), bias, gate and residual are optional; what something else
reads too keeps its plain value. For pieces compiled for few tokens only: the op reads the packed
weight once at memory speed. `lower_scaled_linear` is for the others.
Numerics: the op's body is the matched spelling; kernels round less often, see `fuse_linear`.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.pattern import Graph, copy_meta, is_like, other_addend
from compiled_engine.passes.quant_pattern import QuantProduct, products

NAME = "lower_quantized_linear"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many products became the op."""
    matches = 0
    for product in products(graph):
        _replace(graph, product)
        matches += 1
    if matches:  # quantisers that nobody reads now are not for the passes behind this one
        graph.eliminate_dead_code()
    return matches


def _replace(graph: Graph, product: QuantProduct) -> None:
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
    weights = (*product.weight, product.input_scale, product.bias)
    formats = (product.format, product.activation_format)
    arguments = (x, *weights, *formats, norm_weight, eps, residual, is_gated)
    with graph.inserting_before(output):
        fused = graph.call_function(torch.ops.ce.quantized_linear.default, arguments)
    copy_meta(fused, output)
    output.replace_all_uses_with(fused)
    graph.erase_node(output)
    if output is not product.node:
        graph.erase_node(product.node)
