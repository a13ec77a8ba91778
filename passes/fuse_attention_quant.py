"""Attention and the quantisation of its result with a static scale become one op.

    before:  o = ce.paged_attention(q, ..., scale)           [T, H, D]
             x = aten.reshape(o, [T, H * D])
             y, s = ce.quantize_fp8(x, "tensor", static_scale)
    after:   y = ce.paged_attention_quant(q, ..., scale, static_scale);  s = static_scale

Scales that are made of the values are not fused: one of a token needs all its heads, which no
program of an attention kernel has, so a kernel would still have to read the result again, as the
quantiser by itself does. In pieces of few tokens the product quantises what it reads
(`lower_quantized_linear`), and nothing is left to fuse.
Conditions: nothing but the quantiser reads the result; it is as wide as all heads; the scale is not
returned by the graph.
Numerics: exact, the op's body is the matched spelling; kernels round to the dtype of q first.
Source: the fusion of attention and quantisation of vLLM, which takes static scales alone too.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.pattern import Graph, Node, args_of, copy_meta, getitems, is_call
from compiled_engine.passes.quant_pattern import quantizers

NAME = "fuse_attention_quant"
_SCALE_PLACE = 11  # of the static scale, behind the factor of scores


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many calls of attention took their quantiser in."""
    matches = 0
    for quantizer, activation_format, static_scale in list(quantizers(graph)):
        attention = _attention(quantizer)
        if activation_format != "fp8_tensor" or static_scale is None or attention is None:
            continue
        items = getitems(quantizer)
        if any(user.op == "output" for item in items.get(1, []) for user in item.users):
            continue
        given = args_of(attention)
        arguments = (*given[:_SCALE_PLACE], static_scale, *given[_SCALE_PLACE:])
        with graph.inserting_before(quantizer):
            fused = graph.call_function(
                torch.ops.ce.paged_attention_quant.default, arguments, dict(attention.kwargs)
            )
        for index, users in items.items():
            for user in users:
                if index == 0:
                    copy_meta(fused, user)
                user.replace_all_uses_with(static_scale if index else fused)
                graph.erase_node(user)
        if "val" not in fused.meta:  # nobody reads the values
            fused.meta["val"] = quantizer.meta["val"][0]
        graph.erase_node(quantizer)
        matches += 1
    if matches:
        graph.eliminate_dead_code()
    return matches


def _attention(quantizer: Node) -> Node | None:
    """The attention whose whole result is quantised, and that nobody else reads."""
    flat = args_of(quantizer)[0]
    if not is_call(flat, torch.ops.aten.reshape.default) or len(flat.users) != 1:
        return None
    attention = args_of(flat)[0]
    if not is_call(attention, torch.ops.ce.paged_attention.default) or len(attention.users) != 1:
        return None
    value, result = flat.meta["val"], attention.meta["val"]
    is_flat = value.dim() == 2 and value.shape[1] == result.shape[1] * result.shape[2]
    return attention if is_flat else None
