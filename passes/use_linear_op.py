"""Matrix products with a weight go through `ce.linear`, which picks a kernel by the row count.

    before:  y = aten.mm(x, permute(w, [1, 0]))              after:  y = ce.linear(x, w, None)
             y = aten.addmm(b, x, permute(w, [1, 0]))                y = ce.linear(x, w, b)

Conditions: on the CPU, where the op has kernels of its own; x [T, k] and w [n, k] of one dtype, the
bias one vector, default scales. Elsewhere the products stay with Inductor.
Numerics: sums in fp32 in another order than the library's; within the dtype's rounding.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.pattern import Graph, Node, calls, copy_meta

NAME = "use_linear_op"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many products were replaced."""
    aten = torch.ops.aten
    matches = 0
    for node in calls(graph, aten.mm.default):
        x, transposed = node.args
        matches += _replace(graph, node, x, transposed, None)
    for node in calls(graph, aten.addmm.default):
        bias, x, transposed = node.args
        if node.kwargs or not isinstance(bias, Node) or bias.meta["val"].dim() != 1:
            continue
        matches += _replace(graph, node, x, transposed, bias)
    return matches


def _replace(graph: Graph, node: Node, x: object, transposed: object, bias: Node | None) -> bool:
    if not isinstance(x, Node) or not isinstance(transposed, Node):
        return False
    if transposed.target is not torch.ops.aten.permute.default:
        return False
    weight, order = transposed.args
    if not isinstance(weight, Node) or order != [1, 0]:
        return False
    values = [n.meta["val"] for n in (x, weight, bias) if n is not None]
    if any(v.device.type != "cpu" or v.dtype != values[0].dtype for v in values):
        return False
    if bias is not None and bias.meta["val"].shape != weight.meta["val"].shape[:1]:
        return False  # a bias of one value is broadcast
    if values[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    with graph.inserting_before(node):
        product = graph.call_function(torch.ops.ce.linear.default, (x, weight, bias))
    copy_meta(product, node)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
    return True
