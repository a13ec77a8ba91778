"""Timing on the device: the package's own, by which it also picks kernels."""

from __future__ import annotations

from compiled_engine.custom_ops.timing import event_ms, graph_ms

__all__ = ["event_ms", "graph_ms"]
