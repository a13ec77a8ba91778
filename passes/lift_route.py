"""Routers of mixtures of experts, written out, become one op with the sort of their pairs.

    before:  f = convert(logits, fp32);  s = exp(f - max f) / sum exp(f - max f)    or  sigmoid(f)
             w, i = topk(s, k)                          or  i = topk(s + bias, k);  w = gather(s, i)
             w = w / sum w;  w = w * 2.5
             e, o = sort(reshape(i));  offsets = searchsorted(e, iota(E + 1))
             y = ce.experts(x, ..., w, i, o, offsets, ...)
    after:   w, i, o, offsets = ce.route(logits, bias, k, "softmax", True, 1, 1, 2.5)
             y = ce.experts(x, ..., w, i, o, offsets, ...)

Likewise a softmax of the chosen logits (the same as all of them renormalised), and DeepSeek's
choice from the best groups, in which a group counts as the sum of its two best. The sort is
`models/hf_attention.py`'s. Division by the sum and the factor are optional.
Conditions: weights, ids, order and offsets of a call of `experts` all come from one `topk` over the
experts; scores and choice are in fp32; what keeps a sum from being 0 is at most 1e-9.
Numerics: weights stay in fp32, where some models round them to their dtype. Where scores are equal
the lower expert is chosen, which `topk` leaves open.
Source: the routers of transformers' modelling code.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    args_of,
    calls,
    is_call,
    is_item_of,
    unconverted,
    value_of,
)

NAME = "lift_route"

# Places of weights, ids, order and offsets among the arguments of `experts`.
_FIRST, _LAST = 5, 9
_MOST_TINY = 1e-9


class _Choice(NamedTuple):
    """How experts are chosen, and by what a weight is known."""

    logits: Node
    bias: Node | None
    top_k: int
    scoring: str
    num_groups: int
    top_groups: int
    scores: Node | None


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many routers became the op."""
    matches = 0
    for experts in calls(graph, torch.ops.ce.experts.default):
        weights, ids, order, offsets = args_of(experts)[_FIRST:_LAST]
        topk = _sorted_pairs(ids, order, offsets)
        choice = None if topk is None else _choice(topk)
        if topk is None or choice is None:
            continue
        found = _weights(weights, topk, choice)
        if found is not None:
            _replace(graph, experts, choice, *found)
            matches += 1
    if matches:
        graph.eliminate_dead_code()
    return matches


def _replace(graph: Graph, experts: Node, choice: _Choice, renormalize: bool, scale: float) -> None:
    bias = choice.bias
    with graph.inserting_before(experts):
        if bias is not None and value_of(bias).dtype != torch.float32:
            convert = torch.ops.prims.convert_element_type.default
            narrow, bias = bias, graph.call_function(convert, (bias, torch.float32))
            bias.meta["val"] = value_of(narrow).float()
        arguments = (
            choice.logits, bias, choice.top_k, choice.scoring, renormalize, choice.num_groups,
            choice.top_groups, scale,
        )  # fmt: skip
        route = graph.call_function(torch.ops.ce.route.default, arguments)
        old = args_of(experts)
        route.meta["val"] = tuple(value_of(node) for node in old[_FIRST:_LAST])
        new = [graph.call_function(operator.getitem, (route, i)) for i in range(_LAST - _FIRST)]
        for item, value in zip(new, route.meta["val"], strict=True):
            item.meta["val"] = value
    experts.args = (*old[:_FIRST], *new, *old[_LAST:])


def _sorted_pairs(ids: Any, order: Any, offsets: Any) -> Node | None:
    """The `topk` whose places these are, sorted and counted."""
    if not all(isinstance(node, Node) for node in (ids, order, offsets)):
        return None
    aten = torch.ops.aten
    chosen, places = unconverted(ids, torch.int32), unconverted(order, torch.int32)
    if not is_item_of(chosen, aten.topk.default, 1) or not is_item_of(places, aten.sort.stable, 1):
        return None
    sort, topk = args_of(places)[0], args_of(chosen)[0]
    flat = args_of(sort)[0]
    if sort.kwargs != {"stable": True} or not is_call(flat, aten.reshape.default):
        return None
    if args_of(flat)[0] is not chosen or value_of(flat).dim() != 1:
        return None
    if not is_call(offsets, aten.searchsorted.Tensor) or offsets.kwargs != {"out_int32": True}:
        return None
    values, edges = args_of(offsets)
    num_experts = value_of(args_of(topk)[0]).shape[-1]
    is_counted = is_item_of(values, aten.sort.stable, 0) and args_of(values)[0] is sort
    is_whole = is_call(edges, torch.ops.prims.iota.default) and args_of(edges) == (num_experts + 1,)
    is_whole = is_whole and (edges.kwargs["start"], edges.kwargs["step"]) == (0, 1)
    return topk if is_counted and is_whole else None


def _top(node: Node) -> tuple[Node, int] | None:
    """Source and number of the largest of the last dim."""
    source, count, *rest = args_of(node)
    dim, is_largest = (*rest, *(-1, True)[len(rest) :])[:2]
    is_last = dim in (-1, value_of(source).dim() - 1)
    return (source, count) if is_last and is_largest and not node.kwargs else None


def _choice(topk: Node) -> _Choice | None:
    found = _top(topk)
    if found is None or value_of(found[0]).dim() != 2:
        return None
    chosen_from, top_k = found
    source, groups = _grouped(chosen_from)
    bias = None
    scores, added = source, None
    if is_call(source, torch.ops.aten.add.Tensor) and not source.kwargs:
        scores, added = args_of(source)
        bias = _bias(added, source)
        if bias is None:
            return None
    scored = _scored(scores)
    if scored is not None:
        return _Choice(scored[1], bias, top_k, scored[0], *groups, scores)
    # The logits themselves; a softmax of the chosen ones follows.
    if bias is None and groups == (1, 1) and value_of(source).is_floating_point():
        return _Choice(unconverted(source, torch.float32), None, top_k, "softmax", 1, 1, None)
    return None


def _bias(node: Any, total: Node) -> Node | None:
    """[E], what is added to every token's scores."""
    if not isinstance(node, Node) or value_of(node).dim() != 1:
        return None
    return node if value_of(node).shape[0] == value_of(total).shape[1] else None


def _scored(node: Any) -> tuple[str, Node] | None:
    """Scoring and logits of scores over the last dim, computed in fp32."""
    aten = torch.ops.aten
    if not isinstance(node, Node) or value_of(node).dtype != torch.float32:
        return None
    if is_call(node, aten.sigmoid.default):
        return "sigmoid", unconverted(args_of(node)[0], torch.float32)
    full = _softmax(node)
    return None if full is None else ("softmax", unconverted(full, torch.float32))


def _softmax(node: Any) -> Node | None:
    """`f` of `exp(f - max f) / sum exp(f - max f)` over the last dim."""
    aten = torch.ops.aten
    if not is_call(node, aten.div.Tensor) or len(args_of(node)) != 2:
        return None
    power, total = args_of(node)
    if not is_call(power, aten.exp.default) or _summed(total) != power:
        return None
    shifted = args_of(power)[0]
    if not is_call(shifted, aten.sub.Tensor) or shifted.kwargs:
        return None
    full, top = args_of(shifted)
    is_top = is_call(top, aten.amax.default) and args_of(top)[0] is full and _is_over_last(top)
    return full if is_top else None


def _summed(node: Any) -> Node | None:
    """`x` of a sum over the last dim, which is kept."""
    is_sum = is_call(node, torch.ops.aten.sum.dim_IntList) and _is_over_last(node)
    return args_of(node)[0] if is_sum else None


def _is_over_last(node: Node) -> bool:
    source, dims, *keep = args_of(node)
    return list(dims) in ([-1], [value_of(source).dim() - 1]) and keep == [True] and not node.kwargs


def _weights(node: Any, topk: Node, choice: _Choice) -> tuple[bool, float] | None:
    """Whether weights are divided by their sum, and their factor; None if they are others."""
    aten = torch.ops.aten
    renormalize, scale = False, 1.0
    while isinstance(node, Node):
        if is_call(node, torch.ops.prims.convert_element_type.default):
            node = args_of(node)[0]
        elif is_call(node, aten.mul.Tensor) and isinstance(args_of(node)[1], (int, float)):
            if renormalize:  # a factor in front of the division is none of the weights'
                return None
            scale *= args_of(node)[1]
            node = args_of(node)[0]
        elif choice.scores is not None and (divided := _renormalized(node)) is not None:
            if renormalize:
                return None
            renormalize, node = True, divided
        else:
            break
    if choice.scores is None:  # a softmax of the chosen
        full = _softmax(node)
        chosen = None if full is None else unconverted(full, torch.float32)
        return (True, scale) if _is_value_of(chosen, topk) else None
    is_own = choice.bias is None and choice.num_groups == 1 and _is_value_of(node, topk)
    return (renormalize, scale) if is_own or _is_gathered(node, topk, choice.scores) else None


def _renormalized(node: Node) -> Node | None:
    """`w` of `w / sum w`, the sum maybe kept from being 0."""
    aten = torch.ops.aten
    if not is_call(node, aten.div.Tensor) or len(args_of(node)) != 2:
        return None
    weights, total = args_of(node)
    if is_call(total, aten.add.Tensor) or is_call(total, aten.clamp_min.default):
        total, tiny = args_of(total)
        if not isinstance(tiny, (int, float)) or not 0 <= tiny <= _MOST_TINY:
            return None
    return weights if isinstance(weights, Node) and _summed(total) is weights else None


def _is_value_of(node: Any, topk: Node) -> bool:
    return is_item_of(node, torch.ops.aten.topk.default, 0) and node.args[0] is topk


def _is_gathered(node: Any, topk: Node, scores: Node) -> bool:
    if not is_call(node, torch.ops.aten.gather.default):
        return False
    source, dim, places = args_of(node)
    is_place = is_item_of(places, torch.ops.aten.topk.default, 1) and places.args[0] is topk
    return bool(source is scores and dim in (-1, 1) and is_place)


def _grouped(node: Node) -> tuple[Node, tuple[int, int]]:
    """What is chosen from, and the number of groups and of those that are kept; (1, 1) if none.

    `where(not bool(reshape(expand(scatter(0, best groups, 1)))), -inf, choice)`.
    """
    aten = torch.ops.aten
    if not is_call(node, aten.where.self):
        return node, (1, 1)
    hidden, filler, choice = args_of(node)
    plain = (node, (1, 1))
    is_low = is_call(filler, aten.scalar_tensor.default) or is_call(filler, aten.full.default)
    if not is_low or float("-inf") not in args_of(filler):
        return plain
    if not is_call(hidden, aten.bitwise_not.default):
        return plain
    kept = args_of(hidden)[0]
    kept = unconverted(kept, torch.bool)
    spread = (
        aten.reshape.default, aten.clone.default, aten.expand.default, aten.unsqueeze.default,
    )  # fmt: skip
    shapes = []
    while kept.target in spread:
        shapes.append(value_of(kept).shape[1:])
        kept = args_of(kept)[0]
    if not is_call(kept, aten.scatter.value) or args_of(kept)[1] not in (-1, 1):
        return plain
    zeros, _, places, one = args_of(kept)
    if not is_call(zeros, aten.full.default) or args_of(zeros)[1] != 0 or one != 1:
        return plain
    num_groups, size = value_of(kept).shape[1], value_of(choice).shape[1]
    expected = {(size,), (num_groups, size // num_groups), (num_groups, 1)}
    if {tuple(shape) for shape in shapes} != expected:
        return plain
    best = args_of(places)[0] if is_item_of(places, aten.topk.default, 1) else None
    top_groups = None if best is None else _best_groups(best, choice, num_groups)
    return plain if top_groups is None else (choice, (num_groups, top_groups))


def _best_groups(best: Node, choice: Node, num_groups: int) -> int | None:
    """How many groups are kept, if a group counts as the sum of its two best."""
    aten = torch.ops.aten
    found = _top(best)
    if found is None or not is_call(found[0], aten.sum.dim_IntList):
        return None
    pairs, dims, *keep = args_of(found[0])
    if list(dims) not in ([-1], [2]) or keep or not is_item_of(pairs, aten.topk.default, 0):
        return None
    two = _top(args_of(pairs)[0])
    if two is None or two[1] != 2 or not is_call(two[0], aten.reshape.default):
        return None
    shape = tuple(value_of(two[0]).shape[1:])
    is_cut = shape == (num_groups, value_of(choice).shape[1] // num_groups)
    return found[1] if is_cut and args_of(two[0])[0] is choice else None
