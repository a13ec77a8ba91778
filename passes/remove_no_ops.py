"""Ops that change nothing go away: they stand between what the other passes look for.

    before:  a = aten.alias(x);  b = aten.clone(a);  c = convert(b, its own dtype)
             d = aten.reshape(c, its own shape);  e = aten.slice(d, 0, all);  y = e + 0
    after:   y = x

Also views of views that only move or add dims of size 1 and dims as a whole: `permute` of
`squeeze` of `permute` becomes one permute, one reshape, or nothing.
Conditions: shape and dtype are the source's, and for a clone the strides too. What the graph
returns or writes to keeps its clone.
Numerics: exact.
"""

from __future__ import annotations

from typing import Any

import torch

from compiled_engine.passes.pattern import Graph, Node, args_of, is_same_size, value_of

NAME = "remove_no_ops"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many ops went away."""
    removed = 0
    for node in list(graph.nodes):
        source = _no_op_source(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            removed += 1
    return removed + fold_views(graph)


def _no_op_source(node: Node) -> Node | None:
    """What the node is the same as, if it changes nothing."""
    aten = torch.ops.aten
    if node.op != "call_function" or not args_of(node) or not isinstance(args_of(node)[0], Node):
        return None
    source = args_of(node)[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if before.dtype != after.dtype or not _is_same_shape(before, after):
        return None
    if node.target in (aten.clone.default, aten.alias.default):
        is_free = _is_inner(source) and not any(user.op == "output" for user in node.users)
        return source if is_free and _is_same_layout(before, after) else None
    if node.target in (
        aten.reshape.default,
        aten.view.default,
        aten.slice.Tensor,
        aten.expand.default,
        torch.ops.prims.convert_element_type.default,
    ):
        return source if _is_kept(node, source) else None
    if node.target is aten.permute.default:
        is_plain = list(args_of(node)[1]) == list(range(after.dim()))
        return source if is_plain and _is_kept(node, source) else None
    neutral: dict[Any, float] = {
        aten.add.Tensor: 0,
        aten.sub.Tensor: 0,
        aten.mul.Tensor: 1,
        aten.div.Tensor: 1,
    }
    if node.target in neutral and not node.kwargs and _is_kept(node, source):
        other = args_of(node)[1]
        is_number = isinstance(other, (int, float)) and not isinstance(other, bool)
        return source if is_number and other == neutral[node.target] else None
    return None


def _is_kept(node: Node, source: Node) -> bool:
    """Whether nobody outside sees that two values are one now."""
    return source.op != "placeholder" or not any(user.op == "output" for user in node.users)


def _is_inner(node: Node) -> bool:
    """Whether the value is the graph's own, and no part of what it was given."""
    while node.op == "call_function" and _is_view(node) and isinstance(args_of(node)[0], Node):
        node = args_of(node)[0]
    return node.op == "call_function" and "getitem" not in str(node.target)


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    ) or node.target is torch.ops.aten.reshape.default


def _is_same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(map(is_same_size, a.shape, b.shape))


def _is_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(map(is_same_size, a.stride(), b.stride()))


# --- views of views -----------------------------------------------------------------------------


def fold_views(graph: Graph) -> int:
    """Makes one view, or none, of chains that only move whole dims and dims of size 1."""
    folded = 0
    for node in list(graph.nodes):
        dims = _moved_dims(node)
        if dims is None:
            continue
        source = args_of(node)[0]
        base, order = node, dims
        length = 0
        while (step := _moved_dims(base)) is not None:
            order = step if length == 0 else [None if d is None else step[d] for d in order]
            base, length = args_of(base)[0], length + 1
        rank = value_of(base).dim()
        if order == list(range(rank)) and _is_kept(node, base):
            node.replace_all_uses_with(base)
        elif length > 1 and None not in order and len(order) == rank and base is not source:
            with graph.inserting_before(node):
                new = graph.call_function(torch.ops.aten.permute.default, (base, order))
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
        else:
            continue
        graph.erase_node(node)
        folded += 1
    graph.eliminate_dead_code()
    return folded


def _moved_dims(node: Node) -> list[int | None] | None:
    """For each dim of a view the dim of its source that it is; None stands for a new one of size 1.

    None instead of a list: no such view, or one that cuts or joins dims.
    """
    aten = torch.ops.aten
    if node.op != "call_function" or not args_of(node) or not isinstance(args_of(node)[0], Node):
        return None
    source = args_of(node)[0].meta.get("val")
    if not isinstance(source, torch.Tensor):
        return None
    rank = source.dim()
    if node.target is aten.permute.default:
        return [d % rank for d in args_of(node)[1]]
    if node.target is aten.unsqueeze.default:
        place = args_of(node)[1] % (rank + 1)
        dims: list[int | None] = list(range(rank))
        dims.insert(place, None)
        return dims
    is_select = node.target is aten.select.int and args_of(node)[2] == 0
    if node.target is aten.squeeze.dim or is_select:
        place = args_of(node)[1] % rank
        if not (isinstance(source.shape[place], int) and source.shape[place] == 1):
            return None
        return [d for d in range(rank) if d != place]
    return None
