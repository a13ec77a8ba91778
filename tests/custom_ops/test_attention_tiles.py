"""The tile kernels of paged attention: the portable one interpreted, both on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from compiled_engine.custom_ops.attention_tiles import hopper_rejects, tile_tokens
from tests.helpers.interpreted import run_interpreted
from tests.helpers.source_tree import ROOT
from tests.helpers.tile_attention import (
    LIMITS,
    ON_GPU,
    Case,
    TileStep,
    quantized_difference,
    relative_error,
)

# Few tokens behind many: the Hopper kernel cuts the keys of their tiles into parts.
CUT = (
    Case(name="33 behind 20000", sequences=((33, 20033),), heads=(32, 8), head_dim=128),
    Case(
        name="many lengths",
        sequences=((40, 40000), (2, 3000), (129, 700), (1, 5000), (5, 9)),
        heads=(8, 2),
        head_dim=128,
    ),
    Case(name="300 behind 12000", sequences=((300, 12300),), heads=(8, 2), head_dim=128),
    Case(
        name="cut window",
        sequences=((100, 9000), (17, 400)),
        heads=(8, 2),
        head_dim=128,
        window=3000,
    ),
    Case(
        name="cut, cap and sinks",
        sequences=((64, 10000),),
        page_size=64,
        soft_cap=20.0,
        has_sinks=True,
    ),
    Case(
        name="cut, wide",
        sequences=((50, 6000), (3, 2500)),
        heads=(8, 4),
        head_dim=256,
        window=2000,
        has_sinks=True,
    ),
    Case(name="cut, group 64", sequences=((60, 5000),), heads=(64, 1), head_dim=128, page_size=32),
    Case(name="cut, odd group", sequences=((20, 9000),), heads=(14, 2), dtype=torch.float16),
)


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


def test_hopper_kernel_compiles_and_cuts_its_items():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.attention_tiles_hopper"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "compiled; parts right"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU + CUT, ids=lambda case: case.name)
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
@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("case", ON_GPU + CUT, ids=lambda case: case.name)
def test_results_in_8_bits_are_the_plain_ones_quantised(
    case: Case, is_portable: bool, monkeypatch: pytest.MonkeyPatch
):
    if is_portable:
        monkeypatch.setattr(
            "compiled_engine.custom_ops.attention_tiles.hopper_rejects", lambda *_: "asked not to"
        )
    assert quantized_difference(TileStep(case, "cuda")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_results_do_not_depend_on_who_comes_last(case: Case):
    step = TileStep(case, "cuda")
    first = step.run()
    for _ in range(5):
        assert torch.equal(first.view(torch.int16), step.run().view(torch.int16))


@pytest.mark.gpu
def test_captured_launch_serves_other_lists():
    sequences = ((300, 900), (40, 40), (20, 9000))
    step = TileStep(Case(name="a", sequences=sequences, heads=(8, 2), head_dim=128), "cuda")
    expected = step.oracle()
    step.run()
    graph = torch.cuda.CUDAGraph()
    tiles = [t.clone() for t in step.tiles]
    step.tiles[2].fill_(1)
    with torch.cuda.graph(graph):
        got = step.run()
    for part, source in zip(step.tiles, tiles, strict=True):
        part.copy_(source)
    for _ in range(3):
        graph.replay()
    written = ~expected.isnan()
    got = got.cpu().double()
    assert torch.equal(~got.isnan(), written)
    assert (got - expected)[written].norm() / expected[written].norm() <= LIMITS[step.q.dtype]
