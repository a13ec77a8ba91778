"""A gated activation and the quantisation of its result become one op.

    before:  a = ce.silu_and_mul(x)                after:  q, s = ce.gated_activation_quant(
             q, s = ce.quantize_fp8(a, "token", None)          x, "silu", 0, 0, "fp8_token", None)

Likewise `ce.gelu_and_mul`, exact ("gelu") and by tanh ("gelu_tanh"), and `ce.swiglu_clamped` with
its two numbers.
Conditions: nothing but the quantiser reads the activation; it has two dims. Every activation
format.
Numerics: exact, the op's body is the matched spelling.
Source: the fused activation and quantisation of vLLM and SGLang.
"""

from __future__ import annotations

import torch

from compiled_engine.custom_ops.activation import gelu_name
from compiled_engine.passes.fuse_norm_quant import replace_outputs
from compiled_engine.passes.pattern import Graph, Node, args_of
from compiled_engine.passes.quant_pattern import quantizers

NAME = "fuse_activation_quant"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many activations took their quantiser in."""
    matches = 0
    for quantizer, activation_format, static_scale in quantizers(graph):
        activated = quantizer.args[0]
        if not isinstance(activated, Node) or len(activated.users) != 1:
            continue
        activation = _activation(activated)
        if activation is None or activated.meta["val"].dim() != 2:
            continue
        arguments = (args_of(activated)[0], *activation, activation_format, static_scale)
        with graph.inserting_before(quantizer):
            fused = graph.call_function(torch.ops.ce.gated_activation_quant.default, arguments)
        fused.meta["val"] = quantizer.meta["val"]
        replace_outputs(graph, quantizer, fused)
        matches += 1
    return matches


def _activation(node: Node) -> tuple[str, float, float] | None:
    """Name and numbers as `reference.gated_activation` takes them; None for another op."""
    ce = torch.ops.ce
    if node.target is ce.silu_and_mul.default:
        return "silu", 0.0, 0.0
    if node.target is ce.gelu_and_mul.default:
        return gelu_name(args_of(node)[1]), 0.0, 0.0
    if node.target is ce.swiglu_clamped.default:
        _, alpha, limit = args_of(node)
        return "swiglu_clamped", alpha, limit
    return None
