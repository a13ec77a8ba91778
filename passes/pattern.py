"""Small helpers over FX graphs and Inductor's pattern matcher, shared by the passes.

The only place in `passes/` that touches private Inductor names (seen in torch 2.11 to 2.14):
`CustomGraphPass`, `auto_functionalized_v2`, `fwd_only` tracing through `Match.replace_by_example`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.fx import Graph, Node

__all__ = [
    "UNBOUNDED",
    "CustomGraphPass",
    "Graph",
    "Node",
    "args_of",
    "auto_functionalized_v2",
    "calls",
    "copy_meta",
    "expand_functionalized",
    "expander",
    "functionalized_calls",
    "getitems",
    "inline_call",
    "is_call",
    "is_item_of",
    "is_like",
    "is_same_size",
    "other_addend",
    "size_range",
    "sliced",
    "unconverted",
    "value_of",
    "whole_bases",
]


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor that stands for a node's result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node} is no tensor"
    return value


def args_of(node: Node) -> tuple[Any, ...]:
    """A node's positional arguments; their kinds are the op's business."""
    return node.args


def is_call(node: Any, overload: Any) -> bool:
    """`node` is a call of `overload`."""
    return isinstance(node, Node) and node.target is overload


def unconverted(node: Node, dtype: torch.dtype | None) -> Node:
    """What a cast to `dtype` (any, if None) is made from; the node itself if it is no cast."""
    if node.target is torch.ops.prims.convert_element_type.default:
        source = node.args[0]
        assert isinstance(source, Node)
        if dtype is None or node.args[1] == dtype:
            return source
    return node


def sliced(node: Any) -> tuple[Node, int, int, int] | None:
    """Source, dim (not negative), start and stop of a slice with known ends and step 1."""
    if not is_call(node, torch.ops.aten.slice.Tensor):
        return None
    source, *rest = args_of(node)
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = (*rest, *defaults[len(rest) :])
    value = value_of(source)
    size = value.shape[dim]
    start, stop = start or 0, size if stop is None else stop
    if step != 1 or not all(isinstance(v, int) for v in (size, start, stop)) or start < 0:
        return None
    return source, dim % value.dim(), start, min(stop, size)


def is_same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every size the graph may be run with."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def calls(graph: Graph, overload: Any) -> Iterator[Node]:
    """Call nodes of `overload`, in order; safe against changes while iterating."""
    yield from [n for n in graph.nodes if n.op == "call_function" and n.target is overload]


def functionalized_calls(graph: Graph, overload: Any) -> Iterator[Node]:
    """`auto_functionalized_v2` nodes that stand for the mutable `overload`."""
    for node in calls(graph, auto_functionalized_v2):
        if node.args[0] is overload:
            yield node


def is_item_of(node: Any, overload: Any, index: int) -> bool:
    """`node` is output `index` of a call of `overload`."""
    return (
        isinstance(node, Node)
        and node.target is operator.getitem
        and bool(node.args[1] == index)
        and isinstance(node.args[0], Node)
        and node.args[0].target is overload
    )


def is_like(node: object, other: Node) -> bool:
    """`node` has the shape and dtype of `other`."""
    if not isinstance(node, Node):
        return False
    value, expected = node.meta["val"], other.meta["val"]
    return bool(value.shape == expected.shape and value.dtype == expected.dtype)


def other_addend(node: Node, product: Node) -> Node | None:
    """What `node` adds to the product, if it is a plain add of two equal shapes and dtypes."""
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    others = [arg for arg in node.args if arg is not product]
    if len(others) != 1 or not isinstance(others[0], Node) or not is_like(others[0], product):
        return None
    return others[0]


def getitems(node: Node) -> dict[int, list[Node]]:
    """Users of a multi-output node by output index."""
    found: dict[int, list[Node]] = {}
    for user in node.users:
        assert user.target is operator.getitem, f"{user} takes {node} whole"
        index = user.args[1]
        assert isinstance(index, int)
        found.setdefault(index, []).append(user)
    return found


def copy_meta(target: Node, source: Node) -> None:
    """Gives `target` the fake value of `source`."""
    if "val" in source.meta:
        target.meta["val"] = source.meta["val"]


def whole_bases(node: Node, names: tuple[str, ...]) -> dict[str, int] | None:
    """Base index of each mutated argument, or None if one is a view of its base.

    Functionalisation records a slice or strides for a view, and for a whole base at most that it
    is an alias.
    """
    found: dict[str, int] = {}
    for name in names:
        index = node.kwargs.get(f"_{name}_base_index")
        is_view = any(f"_{name}_{key}" in node.kwargs for key in ("slice_dim", "size"))
        if not isinstance(index, int) or is_view:
            return None
        found[name] = index
    return found


def expand_functionalized(
    graph: Graph,
    node: Node,
    overload: Any,
    body: Callable[..., tuple[torch.Tensor, ...]],
) -> bool:
    """Replaces a functionalised mutable call by its functional body; False if a view is in the way.

    Inductor then sees plain ATen writes, fuses their producers into them and does them in place.
    """
    schema = overload._schema
    mutated = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    bases = whole_bases(node, mutated)
    if bases is None:
        return False
    all_bases = node.kwargs["_all_bases"]
    assert isinstance(all_bases, (list, tuple))
    arguments = [
        all_bases[bases[a.name]] if a.name in bases else node.kwargs[a.name]
        for a in schema.arguments
    ]
    outputs = _trace_into(graph, node, body, arguments)
    # Outputs: results first, then new values in schema order; users number bases after the results.
    num_results = max(1, len(schema.returns))
    results = len(schema.returns)
    for index, users in getitems(node).items():
        if index < num_results:
            value = outputs[index]
        else:
            names = [name for name in mutated if bases[name] == index - num_results]
            assert len(names) == 1, (names, index)
            value = outputs[results + mutated.index(names[0])]
        for user in users:
            user.replace_all_uses_with(value)
            graph.erase_node(user)
    graph.erase_node(node)
    return True


def inline_call(graph: Graph, node: Node, body: Callable[..., Any]) -> None:
    """Replaces one call of a pure op by its body; the expander does so for all calls."""
    outputs = _trace_into(graph, node, body, list(node.args))
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(outputs[0])
    else:
        for index, users in getitems(node).items():
            for user in users:
                user.replace_all_uses_with(outputs[index])
                graph.erase_node(user)
    graph.erase_node(node)


# A size that a compile was told no limit of.
UNBOUNDED = 2**31 - 1


def size_range(size: torch.SymInt) -> tuple[int, int]:
    """Smallest and largest value that a size may have, as the compile was told."""
    return symbol_range(size.node.expr, size.node.shape_env)


def symbol_range(expression: Any, shape_env: Any) -> tuple[int, int]:
    """The same for an expression over the sizes of a compile, a symbol for one."""
    from torch.utils._sympy.value_ranges import bound_sympy  # 2.11 to 2.14

    bounds = bound_sympy(expression, shape_env.var_to_range)

    def number(bound: Any) -> int:
        return int(bound) if bound.is_finite and bound < UNBOUNDED else UNBOUNDED

    return max(1, number(bounds.lower)), number(bounds.upper)


def _trace_into(
    graph: Graph, before: Node, body: Callable[..., Any], arguments: list[Any]
) -> list[Node]:
    """Traces `body` over the fake values of `arguments` and inlines the nodes before `before`."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = [a for a in arguments if isinstance(a, Node)]
    places = [i for i, a in enumerate(arguments) if isinstance(a, Node)]

    def call(*values: torch.Tensor) -> list[torch.Tensor]:
        full = list(arguments)
        for place, value in zip(places, values, strict=True):
            full[place] = value
        out = body(*full)
        return list(out) if isinstance(out, tuple) else [out]

    fakes = [node.meta["val"] for node in tensors]
    mode = torch._guards.detect_fake_mode(fakes)
    assert mode is not None, "graph values carry no fake mode"
    with mode, torch.no_grad():
        traced = make_fx(call, select_decomp_table(), tracing_mode="real")(*fakes)
    traced.graph.eliminate_dead_code()
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    mapping: dict[Node, Any] = dict(zip(placeholders, tensors, strict=True))
    with graph.inserting_before(before):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                out = inner.args[0]
                return [mapping[n] for n in out]
            mapping[inner] = graph.node_copy(inner, lambda n: mapping[n])
    raise AssertionError("traced body has no output")


def expander(overload: Any, body: Callable[..., Any]) -> PatternMatcherPass:
    """A pass that replaces every call of a pure op by its body."""
    found = PatternMatcherPass(pass_name=f"expand_{overload._schema.name}")

    def expand(match: Match, *args: Any, **kwargs: Any) -> None:
        match.replace_by_example(lambda *tensors: body(*tensors, **kwargs), list(args))

    register_graph_pattern(CallFunctionVarArgs(overload), pass_dict=found)(expand)
    return found
