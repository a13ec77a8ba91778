"""Products of steps with many tokens go to the library through our op, a sum with them.

    before:  p = aten.mm(x, permute(w, [1, 0]))
             y = residual + p  (p read by nothing else)  or  p
    after:   y = ce.fused_linear(x, w, None, None, 0.0, residual or None, False)

Conditions: on a GPU, x [T, k] and w [n, k] of one 16-bit dtype, a sum of two equal shapes and
dtypes. For pieces that `fuse_linear` is not for: with many tokens a norm and a gate are kernels of
their own, but the library adds as it writes, where a sum by itself reads and writes all of it
again; and of the library's kernels the op takes the one that is the fastest here.
Numerics: a sum is rounded once, not twice.
"""

from __future__ import annotations

from compiled_engine.passes.fuse_linear import use_plain
from compiled_engine.passes.pattern import Graph

NAME = "use_library_op"


def apply(graph: Graph) -> int:
    """Rewrites the graph in place; returns how many products became the op."""
    return use_plain(graph)
