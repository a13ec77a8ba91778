"""Pieces that are called past Dynamo: what they keep alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.compile import direct
from compiled_engine.compile.direct import DirectPiece


def interpreted(options: dict[str, Any], keep: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that compiles nothing."""
    return lambda graph, examples: keep(graph, graph.forward)


def layer(weight: Tensor, cache: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor]:
    return (x @ weight * scale + cache,)


def test_a_piece_that_is_gone_keeps_no_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct, "inductor_backend", interpreted)
    piece = DirectPiece(layer, "layer", num_static=2, num_shared=1, options={})
    shared = (torch.tensor(2.0),)
    layers = [(torch.randn(4, 4), torch.randn(4)) for _ in range(3)]
    x = torch.randn(2, 4)
    for _ in range(2):
        for key, static in enumerate(layers):
            (got,) = piece(key, static, shared, x)
            assert torch.equal(got, layer(*static, *shared, x)[0])
    kept = [weakref.ref(tensor) for static in layers for tensor in static]
    del piece, layers, static
    gc.collect()
    assert [ref() for ref in kept] == [None] * 6
