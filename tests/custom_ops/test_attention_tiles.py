"""The tile kernels of paged attention: the portable one interpreted, both on a GPU."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.custom_ops.attention_tiles import hopper_rejects, tile_tokens
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tile_attention import LIMITS, ON_GPU, Case, TileStep, relative_error


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens"),
    [(32, 8, 32), (8, 8, 128), (28, 4, 128), (12, 2, 64), (64, 8, 16), (128, 1, 2)],
)
def test_tile_tokens(heads: int, kv_heads: int, tokens: int):
    assert tile_tokens(heads, kv_heads, 128) == tokens


def test_portable_kernel_interpreted():
    run_interpreted("tests.helpers.tile_attention")


def test_hopper_rejects_says_why():
    step = TileStep(Case(name="any", sequences=((2, 2),)))
    assert hopper_rejects(step.q, step.k_cache, step.v_cache) == "needs compute capability 9.0"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_prefill_attention(case: Case):
    error = relative_error(TileStep(case, "cuda"))
    assert error <= LIMITS[case.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_portable_kernel(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "compiled_engine.custom_ops.attention_tiles.hopper_rejects", lambda *_: "asked not to"
    )
    error = relative_error(TileStep(case, "cuda"))
    assert error <= LIMITS[case.dtype]


@pytest.mark.gpu
def test_captured_launch_serves_other_lists():
    step = TileStep(
        Case(name="a", sequences=((300, 900), (40, 40)), heads=(8, 2), head_dim=128), "cuda"
    )
    expected = step.oracle()
    step.run()
    graph = torch.cuda.CUDAGraph()
    tiles = [t.clone() for t in step.tiles]
    step.tiles[2].fill_(1)
    with torch.cuda.graph(graph):
        got = step.run()
    for part, source in zip(step.tiles, tiles, strict=True):
        part.copy_(source)
    graph.replay()
    written = ~expected.isnan()
    got = got.cpu().double()
    assert torch.equal(~got.isnan(), written)
    assert (got - expected)[written].norm() / expected[written].norm() <= LIMITS[step.q.dtype]
