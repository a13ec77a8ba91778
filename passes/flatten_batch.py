"""A batch dim of size 1 goes away: rows are flattened tokens, as the other passes look for them.

    before:  b = unsqueeze(x, 0)                      x [T, h], b [1, T, h]
             n = ce.rms_norm(b, w, eps)
             y = mm(reshape(n, [T, h]), ...)
    after:   n = ce.rms_norm(x, w, eps)
             y = mm(n, ...)

Transformers' code computes batches; ours is one sequence of rows. Every op that treats the batch
dim as one more row dim is done without it. What else reads the value gets it back by `unsqueeze`.
Conditions: the dim has size 1 for every number of tokens; the op is elementwise, a view, or works
on other dims.
Numerics: exact.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from compiled_engine.passes.pattern import Graph, Node, args_of, is_same_size
from compiled_engine.passes.remove_no_ops import fold_views

NAME = "flatten_batch"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many ops lost the dim."""
    flat: dict[Node, Node] = {}
    moved = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _replace_unbatched(graph, node, flat):
            continue
        made = _flattened(graph, node, flat)
        if made is not None:
            flat[node] = made
            moved += made.op == "call_function" and made.meta.get("made_flat", False)
    for node, made in flat.items():
        _give_back(graph, node, made)
    graph.eliminate_dead_code()
    if flat:
        fold_views(graph)
    return int(moved)


def _replace_unbatched(graph: Graph, node: Node, flat: dict[Node, Node]) -> bool:
    """A value that drops the dim itself is the flat one, or a view of it."""
    aten = torch.ops.aten
    source = args_of(node)[0] if args_of(node) else None
    if not isinstance(source, Node) or source not in flat:
        return False
    made = flat[source]
    value = node.meta["val"]
    is_dropped = False
    if node.target is aten.squeeze.dim:
        is_dropped = args_of(node)[1] in (0, -source.meta["val"].dim())
    elif node.target is aten.select.int:
        is_dropped = args_of(node)[1:] == (0, 0)
    elif node.target is aten.reshape.default:
        is_dropped = _has_shape(made, value)
    if is_dropped:
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return is_dropped


def _has_shape(node: Node, value: torch.Tensor) -> bool:
    own = node.meta["val"]
    return own.dim() == value.dim() and all(map(is_same_size, own.shape, value.shape))


def _flattened(graph: Graph, node: Node, flat: dict[Node, Node]) -> Node | None:
    """The same value without its first dim; None if this pass cannot make it."""
    aten = torch.ops.aten
    value = node.meta.get("val")
    if node.target is operator.getitem:
        owner = args_of(node)[0]
        return _new(graph, node, (flat[owner], args_of(node)[1])) if owner in flat else None
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(v, torch.Tensor) and _is_batch_of_one(v) for v in values):
        return None
    source = args_of(node)[0] if args_of(node) else None
    if node.target is aten.unsqueeze.default and isinstance(source, Node):
        rank = source.meta["val"].dim()
        place = args_of(node)[1] % (rank + 1)
        if place == 0:
            return source
        return _new(graph, node, (flat[source], place - 1)) if source in flat else None
    if node.target is aten.reshape.default and isinstance(source, Node):
        return _flat_reshape(graph, node, source, flat)
    if node.target in _BY_DIM and isinstance(source, Node) and source in flat:
        arguments = _BY_DIM[node.target](node)
        return None if arguments is None else _new(graph, node, (flat[source], *arguments))
    if node.target is aten.cat.default:
        return _flat_cat(graph, node, flat)
    if node.target in _pointwise():
        return _flat_pointwise(graph, node, flat)
    return None


def _is_batch_of_one(value: torch.Tensor) -> bool:
    return value.dim() > 1 and isinstance(value.shape[0], int) and value.shape[0] == 1


def _new(graph: Graph, node: Node, args: tuple[Any, ...]) -> Node:
    """The node's op on other arguments, behind it."""
    with graph.inserting_before(node):
        target: Any = node.target
        made = graph.call_function(target, args, dict(node.kwargs))
    value = node.meta["val"]
    made.meta["val"] = (
        [v.squeeze(0) for v in value] if isinstance(value, (tuple, list)) else value.squeeze(0)
    )
    made.meta["made_flat"] = True
    return made


def _flat_reshape(graph: Graph, node: Node, source: Node, flat: dict[Node, Node]) -> Node | None:
    shape = args_of(node)[1]
    assert isinstance(shape, (tuple, list))
    base = flat.get(source, source)
    if base is source and not _drops_nothing(source, node):
        return None
    target = node.meta["val"].squeeze(0)
    if _has_shape(base, target):
        return base
    return _new(graph, node, (base, list(shape[1:])))


def _drops_nothing(source: Node, node: Node) -> bool:
    """Whether a reshape of a value that has no batch dim is one that adds it."""
    own, made = source.meta["val"], node.meta["val"]
    return own.dim() + 1 == made.dim() and all(map(is_same_size, own.shape, made.shape[1:]))


def _flat_cat(graph: Graph, node: Node, flat: dict[Node, Node]) -> Node | None:
    parts = args_of(node)[0]
    assert isinstance(parts, (tuple, list))
    dim = _shifted(node, args_of(node)[1] if len(args_of(node)) > 1 else 0)
    if dim is None or not all(part in flat for part in parts):
        return None
    return _new(graph, node, ([flat[part] for part in parts], dim))


def _flat_pointwise(graph: Graph, node: Node, flat: dict[Node, Node]) -> Node | None:
    """Elementwise ops: operands of the result's rank lose the dim, smaller ones never had it."""
    rank = node.meta["val"].dim()
    args: list[Any] = []
    has_flat = False
    for arg in args_of(node):
        if not isinstance(arg, Node):
            args.append(arg)
            continue
        value = arg.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if value.dim() < rank:
            args.append(arg)
        elif arg in flat:
            args.append(flat[arg])
            has_flat = True
        else:
            return None
    return _new(graph, node, tuple(args)) if has_flat else None


def _shifted(node: Node, dim: Any) -> int | None:
    """A dim counted without the batch's; None if it is the batch's."""
    rank = node.meta["val"].dim() if isinstance(node.meta["val"], torch.Tensor) else None
    if dim < 0:
        return int(dim) if rank is None or dim % rank else None
    return int(dim) - 1 if dim else None


def _slice_arguments(node: Node) -> tuple[Any, ...] | None:
    dim = _shifted(node, args_of(node)[1] if len(args_of(node)) > 1 else 0)
    return None if dim is None else (dim, *args_of(node)[2:])


def _expand_arguments(node: Node) -> tuple[Any, ...] | None:
    sizes = args_of(node)[1]
    is_same_rank = args_of(node)[0].meta["val"].dim() == len(sizes)
    return (list(sizes[1:]),) if is_same_rank else None


def _split_arguments(node: Node) -> tuple[Any, ...] | None:
    dim = args_of(node)[2] if len(args_of(node)) > 2 else 0
    rank = node.meta["val"][0].dim()
    if dim in (0, -rank):
        return None
    return (args_of(node)[1], dim if dim < 0 else dim - 1)


def _permute_arguments(node: Node) -> tuple[Any, ...] | None:
    order = [d % len(args_of(node)[1]) for d in args_of(node)[1]]
    return ([d - 1 for d in order[1:]],) if order[0] == 0 else None


def _mean_arguments(node: Node) -> tuple[Any, ...] | None:
    dims = args_of(node)[1]
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) and d < 0 for d in dims):
        return None
    rank = args_of(node)[0].meta["val"].dim()
    return (list(dims), *args_of(node)[2:]) if all(d % rank for d in dims) else None


def _var_mean_arguments(node: Node) -> tuple[Any, ...] | None:
    dims = args_of(node)[1]
    rank = node.meta["val"][0].dim()
    if not node.kwargs.get("keepdim") or not isinstance(dims, (list, tuple)):
        return None
    return ([d if d < 0 else d - 1 for d in dims],) if all(d % rank for d in dims) else None


def _same_arguments(node: Node) -> tuple[Any, ...]:
    return args_of(node)[1:]


_BY_DIM: dict[Any, Callable[[Node], tuple[Any, ...] | None]] = {
    torch.ops.aten.slice.Tensor: _slice_arguments,
    torch.ops.aten.expand.default: _expand_arguments,
    torch.ops.aten.split.Tensor: _split_arguments,
    torch.ops.aten.split_with_sizes.default: _split_arguments,
    torch.ops.aten.permute.default: _permute_arguments,
    torch.ops.aten.mean.dim: _mean_arguments,
    torch.ops.aten.var_mean.correction: _var_mean_arguments,
    torch.ops.aten.clone.default: _same_arguments,
    torch.ops.aten.alias.default: _same_arguments,
    torch.ops.ce.rms_norm.default: _same_arguments,
    torch.ops.ce.silu_and_mul.default: _same_arguments,
}


def _pointwise() -> frozenset[Any]:
    aten, prims = torch.ops.aten, torch.ops.prims
    return frozenset(
        {
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
            aten.exp.default, aten.rsqrt.default, aten.sqrt.default, aten.sigmoid.default,
            aten.tanh.default, aten.erf.default, aten.pow.Tensor_Scalar, aten.relu.default,
            aten.reciprocal.default, aten.clamp_min.default, aten.clamp_max.default,
            aten.maximum.default, aten.minimum.default, prims.convert_element_type.default,
        }
    )  # fmt: skip


def _give_back(graph: Graph, node: Node, made: Node) -> None:
    """Readers this pass did not rewrite get the dim back."""
    is_own = node.target is torch.ops.aten.unsqueeze.default and args_of(node)[0] is made
    if is_own or not isinstance(node.meta["val"], torch.Tensor) or not node.users:
        return
    with graph.inserting_after(made if made.op == "call_function" else node):
        batched = graph.call_function(torch.ops.aten.unsqueeze.default, (made, 0))
    batched.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(batched)
