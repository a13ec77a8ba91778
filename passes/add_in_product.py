"""Sums with a product become one op, where nothing else is fused into products.

    before:  p = aten.mm(x, permute(w, [1, 0]))
             y = residual + p                      (p read by nothing else)
    after:   y = ce.fused_linear(x, w, None, None, 0.0, residual, False)

Conditions: on a GPU, x [T, k] and w [n, k] of one 16-bit dtype, the sum of two equal shapes and
dtypes. For pieces that `fuse_linear` is not for: with many tokens a norm and a gate are kernels of
their own, but the library adds as it writes, and a sum by itself reads and writes all of it again.
Numerics: the sum is rounded once, not twice.
"""

from __future__ import annotations

from compiled_engine.passes.fuse_linear import fuse_sums
from compiled_engine.passes.pattern import Graph

NAME = "add_in_product"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many sums became part of a product."""
    return fuse_sums(graph)
