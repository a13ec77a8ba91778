"""The whole engine on tiny models: every fast way gives what the plain model gives."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from compiled_engine.engine import Engine
from compiled_engine.request import Request, SamplingParams
from compiled_engine.settings import token_buckets
from tests.helpers.engines import (
    GREEDY,
    assert_idle,
    compiled_tiny_engine,
    reference_greedy,
    run_requests,
    tiny_engine,
)
from tests.helpers.tiny_model import write_tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECOMPILE_PROMPTS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 127, 129)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        family: write_tiny_model(base / family, family=family, seed=3)
        for family in ("llama", "qwen3")
    }


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], device: str) -> Engine:
    return tiny_engine(folders["llama"], device=device)


@pytest.fixture(scope="module")
def compiled(folders: dict[str, Path], device: str) -> Engine:
    return compiled_tiny_engine(folders["qwen3"], device)


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 250) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_engine_greedy_equals_plain_model(folders, family, device):
    made = tiny_engine(folders[family], device=device)
    prompts = prompts_of(1, 1, 2, 3, 4, 5, 8, 17, 64, 65, 130)
    result = run_requests(made, prompts)
    assert result.tokens == [reference_greedy(made, p, 8) for p in prompts]
    assert set(result.reasons) == {"length"}


def test_engine_alone_equals_batched(engine):
    prompts = prompts_of(2, *range(1, 25))
    together = run_requests(engine, prompts, stagger=1).tokens
    alone = [run_requests(engine, [p]).tokens[0] for p in prompts]
    assert together == alone


def test_engine_overlap_equals_normal_loop(folders, device):
    prompts = prompts_of(3, 3, 40, 7, 90, 1)
    normal = tiny_engine(folders["llama"], device=device, overlap_schedule="off")
    assert not normal.loop.is_overlapped
    overlapped = tiny_engine(folders["llama"], device=device, overlap_schedule="on")
    assert overlapped.loop.is_overlapped
    expected = run_requests(normal, prompts, stagger=2)
    got = run_requests(overlapped, prompts, stagger=2)
    assert got.tokens == expected.tokens
    assert got.reasons == expected.reasons


def test_engine_warm_prefix_equals_cold(engine):
    prompts = prompts_of(4, 60, 61, 64, 100)
    cold = run_requests(engine, prompts)
    warm = run_requests(engine, prompts)
    assert warm.tokens == cold.tokens
    assert warm.cached == [56, 60, 60, 96]  # whole pages of 4, the last token always recomputed


def test_engine_without_prefix_cache_equals_with(folders, device, engine):
    prompts = prompts_of(5, 33, 33) * 2
    plain = tiny_engine(folders["llama"], device=device, enable_prefix_caching=False)
    result = run_requests(plain, prompts)
    assert result.cached == [0, 0, 0, 0]
    assert result.tokens == run_requests(engine, prompts).tokens


@pytest.mark.parametrize(("chunk", "page"), [(64, 4), (7, 1), (13, 16)])
def test_engine_retracted_equals_unretracted(folders, device, engine, chunk, page):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = prompts_of(6, 20, 21, 22, 23, 24, 25)
    sizes = {"chunked_prefill_size": chunk, "block_size": page, "max_total_tokens": 160}
    small = tiny_engine(folders["llama"], device=device, **sizes)
    result = run_requests(small, prompts, params)
    assert result.tokens == run_requests(engine, prompts, params).tokens
    stats = small.loop.stats
    retracted = stats.take_retracted()
    assert sum(retracted.values()) == stats.num_retractions > 0
    assert 0 not in retracted  # the oldest request never gives way
    assert not stats.take_retracted()


def test_engine_burst_computes_shared_prompt_once(engine):
    shared = prompts_of(7, 80)[0]
    prompts = [[*shared, 10 + i, 11 + i, 12 + i] for i in range(8)]
    before = engine.loop.stats.num_cached_tokens
    result = run_requests(engine, prompts)
    assert sorted(result.cached) == [0] + [80] * 7
    assert engine.loop.stats.num_cached_tokens - before == 7 * 80


def test_engine_salts_never_share(engine):
    prompt = prompts_of(8, 50)[0]
    result = run_requests(engine, [prompt] * 3, stagger=30, salts=["a", "b", "a"])
    assert result.cached == [0, 0, 48]


def test_engine_logits_equal_plain_model(folders, device):
    """Chunked prefill, decode step by step, and prefix hits give the full pass's logits."""
    # One step after the other and no replays, so that it is known which step made which logits.
    options = {"chunked_prefill_size": 16, "cudagraph_mode": "none", "overlap_schedule": "off"}
    for family in ("llama", "qwen3"):
        made = tiny_engine(folders[family], device=device, **options)
        seen: list[torch.Tensor] = []
        head = made.loop.executor.pieces.head

        def keep(residual, head=head, seen=seen):
            logits = head(residual)
            seen.append(logits[:1].clone())
            return logits

        made.loop.executor.pieces.head = keep
        prompt = prompts_of(9, 50)[0]
        # Four chunks of 16 before the first sampled token; with its prefix cached only one.
        for first in (3, 0):
            seen.clear()
            tokens = run_requests(made, [prompt]).tokens[0]
            full = torch.tensor(prompt + tokens, device=made.settings.device)
            with torch.no_grad():
                every = made.loop.executor.model(full, torch.arange(len(full), device=full.device))
            expected, got = every[49:57], torch.cat(seen[first : first + 8])
            assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_engine_compiled_equals_eager(folders, device, compiled):
    plain = tiny_engine(folders["qwen3"], device=device)
    prompts = prompts_of(10, 1, 5, 33, 64, 100, 130)
    assert run_requests(compiled, prompts).tokens == run_requests(plain, prompts).tokens
    drawn = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=7, seed=6, max_tokens=8, ignore_eos=True),
        SamplingParams(
            temperature=1.0, presence_penalty=0.5, seed=7, max_tokens=8, ignore_eos=True
        ),
    ]
    few = prompts[:3]
    assert run_requests(compiled, few, drawn).tokens == run_requests(plain, few, drawn).tokens


def test_engine_compiled_never_recompiles_or_breaks(compiled, device):
    counters = compiled.driver.refresh()
    assert counters.num_graph_breaks == 0
    # embed and head; penalties and parameters, or three ways to sample, begin and end; then the
    # versions of the layer
    num_others = 4 if device == "cuda" else 7
    made = counters.num_graphs + counters.num_loaded  # another test may have compiled them
    assert made == num_others + len(compiled.loop.executor.pieces.versions)
    assert counters.num_unrecorded == 0
    with counters.expect(num_recompiles=0, num_graphs=0, num_graph_breaks=0):
        for count in range(1, 18):
            run_requests(compiled, prompts_of(count, *([3] * count)))
        for length in RECOMPILE_PROMPTS:
            run_requests(compiled, prompts_of(length, length))
        run_requests(compiled, prompts_of(0, 5), SamplingParams(temperature=1.0, max_tokens=3))
        run_requests(
            compiled,
            prompts_of(0, 5, 6),
            SamplingParams(temperature=0.5, min_tokens=2, max_tokens=3),
        )
        compiled.driver.refresh()


def test_engine_abort_returns_everything(engine):
    loop = engine.loop
    for index, prompt in enumerate(prompts_of(11, *range(10, 50))):
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=GREEDY))
    rng = random.Random(0)
    alive = set(range(40))
    for _ in range(200):
        if alive and rng.random() < 0.6:
            victim = rng.choice(sorted(alive))
            alive.discard(victim)
            loop.abort(victim)
        for event in loop.step():
            assert event.request_id in alive
            if event.finish_reason:
                alive.discard(event.request_id)
        if not loop.has_work:
            break
    loop.drain()
    assert_idle(engine)


def test_engine_stop_rules(engine):
    prompt = prompts_of(12, 12)[0]
    tokens = run_requests(engine, [prompt]).tokens[0]
    stopped = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(tokens[3],))
    result = run_requests(engine, [prompt], stopped)
    first = tokens.index(tokens[3])
    assert result.tokens[0] == tokens[: first + 1]
    assert result.reasons == ["stop"]
    held = SamplingParams(
        temperature=0.0, max_tokens=8, min_tokens=8, stop_token_ids=(tokens[3],), ignore_eos=True
    )
    result = run_requests(engine, [prompt], held)
    assert len(result.tokens[0]) == 8
    assert tokens[3] not in result.tokens[0][:-1]


def test_engine_sampling_alone_equals_batched(engine):
    prompts = prompts_of(13, 4, 9, 30, 31, 5, 6)
    params = [
        SamplingParams(
            temperature=0.3 * (1 + i % 4),
            top_k=(0, 5, 20)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            frequency_penalty=0.2 * (i % 2),
            seed=i,
            max_tokens=10,
            ignore_eos=True,
        )
        for i in range(6)
    ]
    together = run_requests(engine, prompts, params).tokens
    alone = [run_requests(engine, [p], q).tokens[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone


def test_engine_priority_runs_first(folders):
    made = tiny_engine(folders["llama"], max_num_seqs=1)
    for index, priority in enumerate((5, 5, -3)):
        made.loop.submit(
            Request(
                request_id=index,
                prompt_token_ids=prompts_of(index, 6)[0],
                params=GREEDY,
                priority=priority,
            )
        )
    ends = []
    while made.loop.has_work:
        ends += [e.request_id for e in made.loop.step() if e.finish_reason]
    ends += [e.request_id for e in made.loop.drain() if e.finish_reason]
    assert ends == [2, 0, 1]


def test_token_buckets_pad_at_most_an_eighth():
    buckets = token_buckets(512)
    assert buckets[:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert buckets[-1] == 512
    for smaller, larger in itertools.pairwise(buckets):
        assert smaller < larger <= max(smaller + 1, smaller * 1.125)
