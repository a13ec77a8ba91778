"""Behind the attention of the last layer only sampled rows go on, and nothing else differs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine import pieces
from compiled_engine.engine import Engine
from compiled_engine.pieces import layer_versions
from compiled_engine.request import SamplingParams
from tests.helpers.engines import reference_greedy, run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model

FAMILIES = ("llama", "qwen3")
# Around what a step and the rows hold, which are 64 and 7.
LENGTHS = (1, 6, 7, 8, 9, 63, 64, 65, 130)
ROWS, TOKENS = 7, 64


@pytest.fixture(scope="module", params=FAMILIES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), family=request.param, seed=4)


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 250) for _ in range(n)] for n in lengths]


def narrow_engine(folder: Path, **options: Any) -> Engine:
    return tiny_engine(folder, max_num_seqs=ROWS, chunked_prefill_size=TOKENS, **options)


def counted_rows(engine: Engine) -> Counter[tuple[int, str, int]]:
    """Calls by (layer, product, rows of its input), filled as the engine runs."""
    found: Counter[tuple[int, str, int]] = Counter()

    def watch(layer: int, name: str, module: torch.nn.Module) -> None:
        def note(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            found[layer, name, arguments[0].shape[0]] += 1

        module.register_forward_pre_hook(note)

    for index, layer in enumerate(engine.loop.executor.model.layers):
        watch(index, "qkv", layer.self_attn.qkv_proj)
        watch(index, "o", layer.self_attn.o_proj)
        watch(index, "gate_up", layer.mlp.gate_up_proj)
        watch(index, "down", layer.mlp.down_proj)
    return found


@pytest.mark.parametrize("scheduling", ["on", "off"])
def test_products_of_the_last_layer_have_as_many_rows_as_are_sampled(folder, scheduling):
    made = narrow_engine(folder, overlap_schedule=scheduling)
    found = counted_rows(made)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    run_requests(made, prompts_of(0, TOKENS), one_token)
    behind = ("o", "gate_up", "down")
    first = {(0, name, TOKENS): 1 for name in ("qkv", *behind)}
    last = {(1, "qkv", TOKENS): 1} | {(1, name, ROWS): 1 for name in behind}
    assert found == first | last
    found.clear()
    # A step with no more tokens than rows may sample each of them.
    run_requests(made, prompts_of(1, ROWS), one_token)
    assert found == {(i, name, ROWS): 1 for i in (0, 1) for name in ("qkv", *behind)}


def test_answers_and_caches_equal_those_of_whole_layers(folder, monkeypatch):
    prompts = prompts_of(2, *LENGTHS)
    cut = narrow_engine(folder)
    got = run_requests(cut, prompts, stagger=2)
    whole = narrow_engine(folder)
    monkeypatch.setattr(whole.loop.executor.pieces, "last_version", lambda *_: None)
    assert got.tokens == run_requests(whole, prompts, stagger=2).tokens
    assert got.tokens == [reference_greedy(cut, p, 8) for p in prompts]
    for mine, others in zip(cut.loop.executor.caches, whole.loop.executor.caches, strict=True):
        # Rows that gave a token wrote its key behind products of other shapes; page 0 is padding.
        torch.testing.assert_close(mine.k_cache[1:], others.k_cache[1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.v_cache[1:], others.v_cache[1:], rtol=1e-4, atol=1e-5)


def test_steps_of_any_size_choose_what_they_sample(folder, monkeypatch):
    """As on a GPU: steps have the size of a bucket, whatever the plan needs."""
    made = narrow_engine(folder)
    executor = made.loop.executor
    monkeypatch.setattr(type(executor), "bucket_of", lambda self, n: TOKENS if n else 0)
    found = counted_rows(made)
    prompts = prompts_of(3, *LENGTHS)
    tokens = run_requests(made, prompts, stagger=1).tokens
    assert {rows for layer, name, rows in found if (layer, name) == (1, "down")} == {ROWS}
    found.clear()
    assert tokens == [reference_greedy(made, p, 8) for p in prompts]


@pytest.mark.parametrize("keep", [[], [2], [4, 0, 4, 4, 1]])
def test_layer_gives_the_rows_that_are_kept(folder, keep):
    made = narrow_engine(folder)
    model = made.loop.executor.model
    kept = torch.tensor(keep, dtype=torch.int64)
    with torch.no_grad():
        residual, rotary = model.embed(torch.arange(5), torch.arange(5))
        whole = model.layers[-1](residual, rotary)
        found = model.layers[-1](residual, rotary, keep=kept)
    assert found.shape == (len(keep), residual.shape[1])
    torch.testing.assert_close(found, whole[kept])


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("max_rows", [1, 2, 31, 32, 33, 64, 256])
@pytest.mark.parametrize("max_tokens", [1, 2, 32, 33, 65, 300])
def test_only_mixed_steps_with_more_tokens_than_rows_are_cut(max_tokens, max_rows, is_gpu):
    made = pieces.StepPieces.__new__(pieces.StepPieces)
    made.versions = versions = layer_versions(max_tokens, max_rows, is_gpu=is_gpu, has_last=True)
    for size in range(1, max_tokens + 1):
        for is_mixed in (True, False):
            version = made.version(size, is_mixed=is_mixed)
            last = made.last_version(version, size)
            if last is not None:
                # The work list of attention is one for all layers of a step.
                assert size > max_rows
                assert not version.is_decode
            else:
                assert size <= max_rows or version.is_decode or size == 1
    without = layer_versions(max_tokens, max_rows, is_gpu=is_gpu, has_last=False)
    assert without == tuple(v for v in versions if not v.is_last)


@pytest.mark.slow
def test_compiled_last_layer_equals_eager(folder, monkeypatch):
    """On a CPU the version is not compiled by default; on a GPU it always is."""
    eager = narrow_engine(folder)

    def all_versions(*sizes: int, **options: Any) -> tuple[pieces.LayerVersion, ...]:
        return layer_versions(*sizes, **{**options, "has_last": True})

    monkeypatch.setattr(pieces, "layer_versions", all_versions)
    compiled = narrow_engine(folder, enforce_eager=False)
    counters = compiled.driver.refresh()
    assert counters.num_graphs + counters.num_loaded == 10
    assert counters.num_unrecorded == 0
    assert counters.num_graph_breaks == 0
    prompts = prompts_of(5, *LENGTHS)
    with counters.expect(num_recompiles=0, num_graphs=0, num_graph_breaks=0):
        tokens = run_requests(compiled, prompts, stagger=1).tokens
        compiled.driver.refresh()
    assert tokens == run_requests(eager, prompts, stagger=1).tokens
