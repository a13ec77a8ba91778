"""Residual add and RMS norm become one op.

    before:  r = x + residual            after:  y, r = ce.add_rms_norm(x, residual, w, eps)
             y = ce.rms_norm(r, w, eps)

Conditions: the add is a plain two-tensor add (alpha 1) of equal shapes and dtypes, so nothing is
broadcast or promoted. `r` may be read by others: it is an output of the new op. The weight may have
another dtype than `r`: the op's body promotes exactly as `rms_norm` does.
Numerics: exact, the op's body is the matched spelling.
Source: the fused add and norm of vLLM and SGLang.
"""

from __future__ import annotations

import operator

import torch

from compiled_engine.passes.pattern import Graph, Node, calls, copy_meta

NAME = "fuse_add_rms_norm"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many pairs became one op."""
    matches = 0
    for norm in calls(graph, torch.ops.ce.rms_norm.default):
        total, weight, eps = norm.args
        if not isinstance(total, Node) or not _is_plain_add(total):
            continue
        left, right = total.args
        with graph.inserting_before(norm):
            fused = graph.call_function(
                torch.ops.ce.add_rms_norm.default, (right, left, weight, eps)
            )
            fused.meta["val"] = (norm.meta["val"], total.meta["val"])
            normed = graph.call_function(operator.getitem, (fused, 0))
            summed = graph.call_function(operator.getitem, (fused, 1))
        copy_meta(normed, norm)
        copy_meta(summed, total)
        norm.replace_all_uses_with(normed)
        graph.erase_node(norm)
        _move_reads(graph, total, summed, fused)
        matches += 1
    return matches


def _is_plain_add(node: Node) -> bool:
    if node.target is not torch.ops.aten.add.Tensor:
        return False
    if len(node.args) != 2 or node.kwargs:
        return False
    values = [a.meta["val"] for a in node.args if isinstance(a, Node)]
    return (
        len(values) == 2
        and values[0].shape == values[1].shape
        and values[0].dtype == values[1].dtype
    )


def _move_reads(graph: Graph, total: Node, summed: Node, fused: Node) -> None:
    """Later readers of the sum read the op's output; earlier ones keep the plain add."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for user in list(total.users):
        if user is not fused and order[user] > order[summed]:
            user.replace_input_with(total, summed)
    if not total.users:
        graph.erase_node(total)
