"""RMS norm, with or without the residual add, and the quantisation of its result become one op.

    before:  n = ce.rms_norm(x, w, eps)
             q, s = ce.quantize_fp8(n, "token", None)
    after:   q, s = ce.rms_norm_quant(x, w, eps, "fp8_token", None)

    before:  n, r = ce.add_rms_norm(x, residual, w, eps)
             q, s = ce.quantize_fp8(n, "token", None)
    after:   q, s, r = ce.add_rms_norm_quant(x, residual, w, eps, "fp8_token", None)

Conditions: nothing but the quantiser reads the normed value; it has two dims and the dtype of what
is normed. Every activation format; a static scale is an input of the graph. Comes behind
`fuse_add_rms_norm`.
Numerics: exact, the op's body is the matched spelling.
Source: the fused norm and quantisation of vLLM and SGLang.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from compiled_engine.passes.pattern import Graph, Node, copy_meta, getitems, is_item_of, is_like
from compiled_engine.passes.quant_pattern import quantizers

NAME = "fuse_norm_quant"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many norms took their quantiser in."""
    ce = torch.ops.ce
    matches = 0
    for quantizer, activation_format, static_scale in quantizers(graph):
        normed = quantizer.args[0]
        if not isinstance(normed, Node) or len(normed.users) != 1 or _dims(normed) != 2:
            continue
        if static_scale is not None and static_scale.op != "placeholder":
            continue
        options = (activation_format, static_scale)
        if normed.target is ce.rms_norm.default and is_like(normed.args[0], normed):
            fused = _call(graph, quantizer, ce.rms_norm_quant.default, (*normed.args, *options))
            fused.meta["val"] = quantizer.meta["val"]
            replace_outputs(graph, quantizer, fused)
        elif is_item_of(normed, ce.add_rms_norm.default, 0) and _is_own_dtype(normed):
            _replace_added(graph, quantizer, normed, options)
        else:
            continue
        matches += 1
    return matches


def _replace_added(graph: Graph, quantizer: Node, normed: Node, options: tuple[Any, ...]) -> None:
    """The fused op stands where the norm stood: the sum may be read before the quantiser."""
    norm = normed.args[0]
    assert isinstance(norm, Node)
    overload = torch.ops.ce.add_rms_norm_quant.default
    fused = _call(graph, norm, overload, (*norm.args, *options))
    fused.meta["val"] = (*quantizer.meta["val"], norm.meta["val"][1])
    for total in getitems(norm).get(1, []):
        with graph.inserting_after(fused):
            summed = graph.call_function(operator.getitem, (fused, 2))
        copy_meta(summed, total)
        total.replace_all_uses_with(summed)
        graph.erase_node(total)
    replace_outputs(graph, quantizer, fused)
    graph.erase_node(normed)
    graph.erase_node(norm)


def _call(graph: Graph, before: Node, overload: Any, arguments: tuple[Any, ...]) -> Node:
    with graph.inserting_before(before):
        return graph.call_function(overload, arguments)


def replace_outputs(graph: Graph, quantizer: Node, fused: Node) -> None:
    """Readers of a quantiser's two outputs read the first two of `fused`; the quantiser goes."""
    for index, users in getitems(quantizer).items():
        for user in users:
            with graph.inserting_before(user):
                item = graph.call_function(operator.getitem, (fused, index))
            copy_meta(item, user)
            user.replace_all_uses_with(item)
            graph.erase_node(user)
    graph.erase_node(quantizer)


def _dims(node: Node) -> int:
    return int(node.meta["val"].dim())


def _is_own_dtype(normed: Node) -> bool:
    """Whether the norm of a sum has the sum's dtype."""
    norm = normed.args[0]
    assert isinstance(norm, Node)
    value, total = norm.meta["val"]
    return bool(value.dtype == total.dtype)
