"""A mixture of experts takes its norm, its router and the add behind it into one op.

    before:  n = ce.rms_norm(x, g, eps)
             p = aten.mm(n, permute(router, [1, 0]))  or  addmm with a bias
             w, i, o, f = ce.route(p, score_bias, ...)
             e = ce.experts(n, gate_up, down, ..., w, i, o, f, ...)
             y = residual + e
    after:   y = ce.sparse_mlp(x, g, eps, router, bias, score_bias, ..., gate_up, ..., residual)

Conditions: on a GPU, x [T, h] and the router's weight [E, h] of one 16-bit dtype, a bias of one
vector; nothing else reads the logits or the routes. The norm stays apart if something else reads
it, or if it is of another dtype than its input; the add, if it is not of two equal shapes and
dtypes. For pieces compiled for few tokens only: with many rows the norm, the router and the add are
a small part, and others fuse them.
Numerics: as the matched spelling's, but the sum of the experts is added to the residual in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_engine.passes.fuse_linear import product_of
from compiled_engine.passes.pattern import (
    Graph,
    Node,
    calls,
    copy_meta,
    getitems,
    is_like,
    other_addend,
)

NAME = "fuse_sparse_mlp"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many mixtures became the op."""
    return sum(_replace(graph, node) for node in calls(graph, torch.ops.ce.experts.default))


def _replace(graph: Graph, experts: Node) -> bool:
    x, gate_up, down, gate_up_bias, down_bias, *rest = experts.args
    routes, kind = rest[:4], rest[4:]
    if experts.kwargs or len(kind) != 8 or not isinstance(x, Node):
        return False
    route = _route_of(routes, experts)
    if route is None:
        return False
    logits, score_bias, *routing = route.args
    if not isinstance(logits, Node) or list(logits.users) != [route] or len(routing) != 6:
        return False
    is_product = logits.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    product = product_of(logits) if is_product else None
    if product is None or product.x is not x:
        return False
    norm_weight, eps = None, 0.0
    is_norm = x.target is torch.ops.ce.rms_norm.default
    if is_norm and set(x.users) == {logits, experts} and is_like(x.args[0], x):
        x, norm_weight, eps = x.args  # type: ignore[assignment]
    output, residual = experts, None
    if len(experts.users) == 1:
        (user,) = experts.users
        residual = other_addend(user, experts)
        output = experts if residual is None else user
    router = (x, norm_weight, eps, product.weight, product.bias, score_bias, *routing)
    stacks = (gate_up, down, gate_up_bias, down_bias)
    with graph.inserting_before(output):
        fused = graph.call_function(
            torch.ops.ce.sparse_mlp.default, (*router, *stacks, *kind, residual)
        )
    copy_meta(fused, output)
    output.replace_all_uses_with(fused)
    for node in dict.fromkeys((output, experts, *routes, route, logits)):
        graph.erase_node(node)  # type: ignore[arg-type]
    return True


def _route_of(routes: Sequence[object], experts: Node) -> Node | None:
    """The `route` whose four results are `routes`, if nothing but `experts` reads them."""
    first = routes[0]
    if not isinstance(first, Node) or not first.args or not isinstance(first.args[0], Node):
        return None
    route = first.args[0]
    if route.target is not torch.ops.ce.route.default:
        return None
    items = getitems(route)
    if any(items.get(index) != [node] for index, node in enumerate(routes)):
        return None
    if any(set(users[0].users) != {experts} for users in items.values()):
        return None
    return route
