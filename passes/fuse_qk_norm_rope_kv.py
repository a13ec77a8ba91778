"""Rotary embedding (with or without q/k norm) and the KV write become one op.

    before:  q2, k2 = ce.qk_norm_rope(q, k, qw, kw, cos, sin, eps)      (or ce.rope(q, k, cos, sin))
             ce.kv_write(k2, v, k_cache, v_cache, slot_mapping)
    after:   q2 = ce.qk_norm_rope_kv_write(q, k, v, qw, kw, cos, sin, eps, k_cache, v_cache, slots)

Conditions: the written keys are output 1 of the op, and nobody else reads them (paged attention
reads the cache); otherwise the pair stays as it is. In the graph the write is functionalised; the
cache arguments keep their names, so their base and view keywords carry over unchanged.
Numerics: exact, the op's body is the matched spelling.
Source: fused q/k-norm + RoPE and RoPE + cache-write kernels of TensorRT-LLM, vLLM and SGLang.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from compiled_engine.passes.pattern import (
    Graph,
    Node,
    auto_functionalized_v2,
    copy_meta,
    functionalized_calls,
    getitems,
    is_item_of,
)

NAME = "fuse_qk_norm_rope_kv"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many pairs became one op."""
    ce = torch.ops.ce
    with_norm = ("q", "k", "q_weight", "k_weight", "cos", "sin", "eps")
    plain = ("q", "k", "cos", "sin")
    return _fuse(
        graph, ce.qk_norm_rope.default, ce.qk_norm_rope_kv_write.default, with_norm
    ) + _fuse(graph, ce.rope.default, ce.rope_kv_write.default, plain)


def _fuse(graph: Graph, source_op: Any, fused_op: Any, names: tuple[str, ...]) -> int:
    matches = 0
    for write in functionalized_calls(graph, torch.ops.ce.kv_write.default):
        keys = write.kwargs["k"]
        if not is_item_of(keys, source_op, 1):
            continue
        assert isinstance(keys, Node)
        source = keys.args[0]
        assert isinstance(source, Node)
        outputs = getitems(source)
        is_only_written = len(outputs[1]) == 1 and list(keys.users) == [write]
        is_only_written = is_only_written and write.kwargs["v"] is not keys
        if not is_only_written or _reads_before(graph, outputs.get(0, []), write):
            continue
        given = dict(zip((*names, "interleaved"), source.args, strict=False))
        kwargs = {**write.kwargs, "interleaved": False, **given}
        with graph.inserting_before(write):
            fused = graph.call_function(auto_functionalized_v2, (fused_op,), kwargs)
            query = graph.call_function(operator.getitem, (fused, 0))
        first = source.args[0]
        assert isinstance(first, Node)
        copy_meta(query, outputs[0][0] if outputs.get(0) else first)
        written = write.meta["val"]
        fused.meta["val"] = (query.meta["val"], *written[1:])
        write.replace_all_uses_with(fused)
        graph.erase_node(write)
        for user in outputs.get(0, []):
            user.replace_all_uses_with(query)
        graph.eliminate_dead_code()
        matches += 1
    return matches


def _reads_before(graph: Graph, queries: list[Node], write: Node) -> bool:
    """Somebody reads the rotated queries before the place of the write."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    return any(order[user] < order[write] for query in queries for user in query.users)
