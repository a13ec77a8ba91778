"""Linears over rows of one matrix that read the same tensor become one product.

    before:  q = mm(x, permute(w[0:a], [1, 0]))         after:  y = mm(x, permute(w, [1, 0]))
             k = mm(x, permute(w[a:b], [1, 0]))                 q = y[:, 0:a];  k = y[:, a:b]
             v = mm(x, permute(w[b:n], [1, 0]))                 v = y[:, b:n]

Models that keep query, key and value, or gate and up, apart are loaded with one matrix for them
(`models/hf_linears.py`), so nothing is put together while a step runs. With biases, `addmm` of rows
of one bias likewise.
Conditions: the row ranges follow each other and cover the matrix; a bias is cut alike.
Numerics: the library may sum a wider product in another order.
Source: horizontal fusion; the fused projections of vLLM and SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled_engine.passes.pattern import Graph, Node, args_of, calls, copy_meta, sliced, value_of

NAME = "merge_linears"


class _Part(NamedTuple):
    """A product with rows `[start, stop)` of a matrix."""

    node: Node
    start: int
    stop: int


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many groups became one product."""
    groups: dict[tuple[Node, Node, Node | None], list[_Part]] = {}
    aten = torch.ops.aten
    for overload in (aten.mm.default, aten.addmm.default):
        for node in calls(graph, overload):
            found = _part(node)
            if found is not None:
                key, part = found
                groups.setdefault(key, []).append(part)
    merged = 0
    for (x, weight, bias), parts in groups.items():
        parts.sort(key=lambda part: part.start)
        ends = [0, *(part.stop for part in parts)]
        starts = [*(part.start for part in parts), value_of(weight).shape[0]]
        if len(parts) > 1 and starts == ends:
            _merge(graph, x, weight, bias, parts)
            merged += 1
    return merged


def _part(node: Node) -> tuple[tuple[Node, Node, Node | None], _Part] | None:
    *first, x, transposed = args_of(node)
    if node.kwargs or not isinstance(x, Node) or not isinstance(transposed, Node):
        return None
    if transposed.target is not torch.ops.aten.permute.default or args_of(transposed)[1] != [1, 0]:
        return None
    cut = _rows(args_of(transposed)[0])
    if cut is None:
        return None
    weight, start, stop = cut
    bias: Node | None = None
    if first:
        bias_cut = _rows(first[0])
        if bias_cut is None or bias_cut[1:] != (start, stop):
            return None
        bias = bias_cut[0]
        if value_of(bias).dim() != 1 or value_of(bias).shape[0] != value_of(weight).shape[0]:
            return None
    return (x, weight, bias), _Part(node, start, stop)


def _rows(node: object) -> tuple[Node, int, int] | None:
    """The tensor that a slice of its first dim is cut from, and the range."""
    cut = sliced(node)
    if cut is None or cut[1] != 0 or cut[2] >= cut[3]:
        return None
    return cut[0], cut[2], cut[3]


def _merge(graph: Graph, x: Node, weight: Node, bias: Node | None, parts: list[_Part]) -> None:
    aten = torch.ops.aten
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min((part.node for part in parts), key=order.__getitem__)
    with graph.inserting_before(first):
        transposed = graph.call_function(aten.permute.default, (weight, [1, 0]))
        transposed.meta["val"] = value_of(weight).t()
        if bias is None:
            product = graph.call_function(aten.mm.default, (x, transposed))
        else:
            product = graph.call_function(aten.addmm.default, (bias, x, transposed))
        size = value_of(weight).shape[0]
        product.meta["val"] = value_of(parts[0].node).new_empty((value_of(x).shape[0], size))
        for node, start, stop in parts:
            cut = graph.call_function(aten.slice.Tensor, (product, 1, start, stop))
            cut.meta["val"] = torch.ops.aten.slice.Tensor(product.meta["val"], 1, start, stop)
            node.replace_all_uses_with(cut)
            copy_meta(node, cut)
    for node, _, _ in parts:
        graph.erase_node(node)
    graph.eliminate_dead_code()
