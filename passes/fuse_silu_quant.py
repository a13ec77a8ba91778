"""The gated activation and the quantisation of its result become one op.

    before:  a = ce.silu_and_mul(x)                after:  q, s = ce.silu_and_mul_quant(
             q, s = ce.quantize_fp8(a, "token", None)              x, "fp8_token", None)

Conditions: nothing but the quantiser reads the activation; it has two dims. Every activation
format.
Numerics: exact, the op's body is the matched spelling.
Source: the fused activation and quantisation of vLLM and SGLang.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.fuse_norm_quant import replace_outputs
from compiled_engine.passes.pattern import Graph, Node
from compiled_engine.passes.quant_pattern import quantizers

NAME = "fuse_silu_quant"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many activations took their quantiser in."""
    matches = 0
    for quantizer, activation_format, static_scale in quantizers(graph):
        activated = quantizer.args[0]
        if not isinstance(activated, Node) or len(activated.users) != 1:
            continue
        is_gated = activated.target is torch.ops.ce.silu_and_mul.default
        if not is_gated or activated.meta["val"].dim() != 2:
            continue
        arguments = (activated.args[0], activation_format, static_scale)
        with graph.inserting_before(quantizer):
            fused = graph.call_function(torch.ops.ce.silu_and_mul_quant.default, arguments)
        fused.meta["val"] = quantizer.meta["val"]
        replace_outputs(graph, quantizer, fused)
        matches += 1
    return matches
