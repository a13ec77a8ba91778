"""Quantised layers of many rows become a product of quantised operands.

    before:  q, s = ce.quantize_fp8(x, "token", None)
             p = aten.mm(ce.dequantize(q, s, ...), permute(ce.dequantize(w, t, ...), [1, 0]))
    after:   p = ce.scaled_linear(q, s, w, t, bias, "fp8_channel", "fp8_token", dtype)

    before:  p = aten.mm(x, permute(ce.dequantize(w, t, ...), [1, 0]))
    after:   p = ce.quantized_linear(x, w, t, ..., "nvfp4", "", None, 0.0, None, False)

Conditions: as `lower_quantized_linear`, which takes all of them in pieces of few tokens. The first
form needs weights and activations that can be multiplied as they are (`quant.SCALED_PAIRS`); all
others take the second. Norm, gate and residual stay beside the op: with many rows they are work of
their own, and the quantiser is fused into them (`fuse_norm_quant`, `fuse_activation_quant`).
Numerics: the op's body is the matched spelling; kernels apply the scales to fp32 sums.
"""

from __future__ import annotations

import torch

from compiled_engine.custom_ops.quant import SCALED_PAIRS
from compiled_engine.passes.pattern import Graph, copy_meta
from compiled_engine.passes.quant_pattern import QuantProduct, products

NAME = "lower_scaled_linear"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many products became an op."""
    matches = 0
    for product in products(graph):
        _replace(graph, product)
        matches += 1
    if matches:  # quantisers that nobody reads now are not for the passes behind this one
        graph.eliminate_dead_code()
    return matches


def _replace(graph: Graph, product: QuantProduct) -> None:
    formats = (product.format, product.activation_format)
    with graph.inserting_before(product.node):
        if formats in SCALED_PAIRS:
            operands = (product.q, product.q_scale, *product.weight[:2], product.bias)
            lowered = graph.call_function(
                torch.ops.ce.scaled_linear.default,
                (*operands, *formats, product.node.meta["val"].dtype),
            )
        else:
            operands = (product.x, *product.weight, product.input_scale, product.bias)
            lowered = graph.call_function(
                torch.ops.ce.quantized_linear.default,
                (*operands, *formats, None, 0.0, None, False),
            )
    copy_meta(lowered, product.node)
    product.node.replace_all_uses_with(lowered)
    graph.erase_node(product.node)
