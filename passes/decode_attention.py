"""Attention of decode pieces treats every token as a sequence of its own.

    before:  o = ce.paged_attention(q, ..., is_decode=False)
    after:   o = ce.paged_attention(q, ..., is_decode=True)

Conditions: the piece is compiled for decode steps. The result is the same for any plan, chunks of a
prompt included; only their cost differs, so the host may be wrong about what a step holds.
Numerics: another order of the same sums.
"""

from __future__ import annotations

import torch

from compiled_engine.passes.pattern import Graph, calls

NAME = "decode_attention"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many calls were switched."""
    matches = 0
    for node in calls(graph, torch.ops.ce.paged_attention.default):
        node.update_kwarg("is_decode", True)
        matches += 1
    return matches
