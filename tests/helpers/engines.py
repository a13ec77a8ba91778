"""Engines over tiny models for tests, and a plain way to run requests through one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from compiled_engine.config import EngineConfig
from compiled_engine.engine import Engine, build_engine
from compiled_engine.request import Request, SamplingParams, validate_request
from perf.gates import building, note_cold_start
from perf.tiny import processor_s

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def tiny_engine(folder: Path, **options: Any) -> Engine:
    """An engine over the model in `folder`: fp32, eager, 20 rows, 64 tokens a step, pages of 4."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 20,
        "chunked_prefill_size": 64,
        "block_size": 4,
        "device": "cpu",
        # The run's one compile cache, see `conftest.py`.
        "cache_dir": Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent,
    }
    return build_engine(EngineConfig(model=str(folder), **{**defaults, **options}), lambda *_: None)


def compiled_tiny_engine(folder: Path, device: str = "cpu") -> Engine:
    """`tiny_engine`, compiled; the gates of `perf` start the same one and want to know the time."""
    cache_dir = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    with building(cache_dir):
        begin = processor_s()
        engine = tiny_engine(folder, device=device, enforce_eager=False)
        counters = engine.driver.refresh()
        if device == "cpu" and counters.num_inductor_compiles and not counters.num_cache_hits:
            note_cold_start(cache_dir, processor_s() - begin)
    return engine


class Run:
    """What one batch of requests gave.

    Attributes:
        tokens: generated ids by request, in the order of the prompts.
        reasons: finish reasons likewise.
        cached: cached prompt tokens likewise.
        logprobs: records of the generated tokens likewise.
        prompt_logprobs: records of the prompts likewise.
    """

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.reasons: list[str | None] = [None] * count
        self.cached = [0] * count
        self.logprobs = [b""] * count
        self.prompt_logprobs = [b""] * count


def run_requests(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams] = GREEDY,
    *,
    stagger: int = 0,
    salts: list[str] | None = None,
    max_steps: int = 5000,
) -> Run:
    """Runs prompts to their end, `stagger` steps between two submits; checks idle at the end."""
    listed = params if isinstance(params, list) else [params] * len(prompts)
    result = Run(len(prompts))
    waiting = []
    for index, prompt in enumerate(prompts):
        salt = salts[index] if salts else ""
        request = Request(
            request_id=index, prompt_token_ids=prompt, params=listed[index], cache_salt=salt
        )
        validate_request(request, engine.limits)
        waiting.append(request)
    loop = engine.loop
    if not stagger:
        while waiting:
            loop.submit(waiting.pop(0))
    steps = 0
    while loop.has_work or waiting:
        if waiting and steps % stagger == 0:
            loop.submit(waiting.pop(0))
        _collect(result, loop.step())
        steps += 1
        assert steps < max_steps, "requests do not end"
    _collect(result, loop.drain())
    assert_idle(engine)
    return result


def _collect(result: Run, events: list[Any]) -> None:
    for event in events:
        index = event.request_id
        assert result.reasons[index] is None, f"event after the end of request {index}"
        result.tokens[index].extend(event.token_ids)
        result.reasons[index] = event.finish_reason
        result.cached[index] = event.num_cached_tokens
        result.logprobs[index] += event.logprobs
        result.prompt_logprobs[index] += event.prompt_logprobs


def assert_idle(engine: Engine) -> None:
    """No row is in use, every page is free or cached, every token page is back, no error."""
    loop, state = engine.loop, engine.loop.executor.state
    shape = loop.executor.shape
    assert not loop.has_work
    assert sorted(loop._free_rows) == list(range(shape.max_rows))
    assert state.state.eq(0).all(), state.state.tolist()
    assert state.groups[0].ref[1:].eq(0).all()
    assert int(state.num_free_token_pages) == shape.num_token_pages
    assert state.error.eq(0).all(), state.error.tolist()
    assert loop.stats.num_pages_active == 0


def reference_greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by the model itself, one full sequence at a time, without a cache."""
    model, device = engine.loop.executor.model, engine.settings.device
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor(tokens, device=device)
            logits = model(ids, torch.arange(len(tokens), device=device))
            tokens.append(int(logits[-1, : engine.settings.vocab_size].argmax()))
    return tokens[len(prompt) :]
