"""The whole engine on tiny models whose layers differ: experts, windows, sinks.

Eager: what a compiled layer computes is tested once, in the slow tier.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from compiled_engine.layer_kinds import layer_kinds
from compiled_engine.request import SamplingParams
from tests.helpers.engines import reference_greedy, run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(base / family, family=family, seed=3) for family in FAMILIES}


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 250) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain_model_in_chunks_and_with_prefix_hits(folders, family, device):
    made = tiny_engine(folders[family], chunked_prefill_size=16, device=device)
    prompts = prompts_of(1, 1, 3, 12, 17, 61)
    expected = [reference_greedy(made, p, 8) for p in prompts]
    cold = run_requests(made, prompts)
    assert cold.tokens == expected
    warm = run_requests(made, prompts)
    assert warm.tokens == expected
    assert warm.cached[-1] == 60
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "answers must differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_retracted_equals_unretracted(folders, family):
    prompts = prompts_of(2, 20, 21, 22, 23)
    small = tiny_engine(folders[family], max_total_tokens=112, chunked_prefill_size=13)
    got = run_requests(small, prompts, LONG)
    assert small.loop.stats.num_retractions > 0
    assert got.tokens == run_requests(tiny_engine(folders[family]), prompts, LONG).tokens


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen3_moe", (0, 1, 0)), ("mixtral", (0, 0)), ("gpt_oss", (0, 1, 0))],
)
def test_layers_that_differ_share_no_code(folders, family, kinds):
    model = tiny_engine(folders[family]).loop.executor.model
    assert layer_kinds(model.layers) == kinds


def test_layer_kinds_see_constants_shapes_and_dtypes_but_no_values(folders):
    layers = list(tiny_engine(folders["mixtral"]).loop.executor.model.layers)
    with torch.no_grad():
        layers[1].mlp.gate.weight.add_(1.0)
    assert layer_kinds(layers) == (0, 0)
    layers[1].self_attn.window = 7
    assert layer_kinds(layers) == (0, 1)
    layers[1].self_attn.window = layers[0].self_attn.window
    layers[1].mlp.activation = layers[1].mlp.activation._replace(name="swiglu_clamped")
    assert layer_kinds(layers) == (0, 1)
    layers[1].mlp.activation = layers[0].mlp.activation
    assert layer_kinds(layers) == (0, 0)
    layers[1].mlp.gate.half()
    assert layer_kinds(layers) == (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_equals_eager(folders, family, device):
    """Every kind of layer gets code of its own; nothing is compiled while requests run."""
    prompts = prompts_of(3, 1, 5, 33, 64, 100)
    compiled = tiny_engine(folders[family], enforce_eager=False, device=device)
    got = run_requests(compiled, prompts)
    assert got.tokens == run_requests(tiny_engine(folders[family], device=device), prompts).tokens
    counters = compiled.driver.refresh()
    assert (counters.num_graph_breaks, counters.num_recompiles) == (0, 0)
