"""Benches of an engine in this process: step times at batch sizes, and tokens per second.

Prompts are random token ids, so no prefix is shared and no tokenizer is needed. Every number is
wall time around `StepLoop.step`, which on a GPU launches one step and reads the one before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compiled_engine.bench.stats import Summary, summarize
from compiled_engine.engine import Engine
from compiled_engine.errors import ConfigError
from compiled_engine.request import Request, SamplingParams, TokenEvent

OnDone = Callable[[], None]


@dataclass(frozen=True)
class LatencyRow:
    """One batch size.

    Attributes:
        prefill_ms: first step launched to the first token of the last request, over the repeats.
        decode_ms: steps in which all requests get one token each.
        decode_tokens_per_s: of the whole batch, at the median step.
    """

    batch_size: int
    input_len: int
    prefill_ms: Summary
    decode_ms: Summary
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Throughput:
    """All requests at once, first submit to last token."""

    num_requests: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


class RequestMaker:
    """Requests with random prompts and a fixed number of tokens.

    Raises:
        ConfigError: the lengths do not fit the model.
    """

    def __init__(self, engine: Engine, *, input_len: int, output_len: int, seed: int) -> None:
        limits = engine.limits
        longest = min(limits.max_model_len, limits.max_total_tokens)
        if input_len + output_len > longest:
            raise ConfigError(
                f"--input-len {input_len} plus --output-len {output_len} is more than the "
                f"{longest} tokens of this engine",
                param="input_len",
            )
        self._input_len = input_len
        self._vocab_size = limits.vocab_size
        self._params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self._random = random.Random(seed)
        self._next_id = 0

    def make(self, count: int) -> list[Request]:
        """The next requests; ids never repeat."""
        made = []
        for _ in range(count):
            self._next_id += 1
            prompt = [self._random.randrange(self._vocab_size) for _ in range(self._input_len)]
            made.append(
                Request(request_id=self._next_id, prompt_token_ids=prompt, params=self._params)
            )
        return made


def measure_latency(
    engine: Engine,
    batch_size: int,
    *,
    input_len: int,
    output_len: int,
    num_repeats: int,
    seed: int,
    on_done: OnDone,
) -> LatencyRow:
    """Times a batch of equal requests, after one repeat that is not counted.

    Raises:
        ConfigError: the batch or the lengths do not fit the engine.
    """
    if batch_size > engine.settings.max_num_seqs:
        raise ConfigError(
            f"--batch-size {batch_size} is more than --max-num-seqs {engine.settings.max_num_seqs}",
            param="batch_size",
        )
    maker = RequestMaker(engine, input_len=input_len, output_len=output_len, seed=seed)
    prefills_ms: list[float] = []
    decodes_ms: list[float] = []
    for repeat in range(num_repeats + 1):
        prefill_ms, steps_ms = _time_batch(engine, maker.make(batch_size))
        if repeat:
            prefills_ms.append(prefill_ms)
            decodes_ms.extend(steps_ms)
            on_done()
    prefill, decode = summarize(prefills_ms), summarize(decodes_ms)
    assert prefill is not None
    if decode is None:
        raise ConfigError(
            f"--output-len {output_len} leaves no step in which all {batch_size} requests decode; "
            "raise it",
            param="output_len",
        )
    return LatencyRow(
        batch_size, input_len, prefill, decode, batch_size * 1e3 / decode.p50 if decode.p50 else 0.0
    )


def measure_throughput(
    engine: Engine,
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    seed: int,
    on_done: OnDone,
) -> Throughput:
    """Submits everything at once and runs until the last token."""
    maker = RequestMaker(engine, input_len=input_len, output_len=output_len, seed=seed)
    for _ in _events(engine, maker.make(1)):
        pass  # lazy initialisation is not what is measured
    requests = maker.make(num_requests)
    num_output = num_cached = 0
    start = time.perf_counter()
    for event in _events(engine, requests):
        num_output += len(event.token_ids)
        if event.finish_reason is not None:
            num_cached += event.num_cached_tokens
            on_done()
    duration_s = time.perf_counter() - start
    num_prompt = num_requests * input_len
    return Throughput(
        num_requests=num_requests,
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_output_tokens=num_output,
        requests_per_s=num_requests / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
    )


def _events(engine: Engine, requests: list[Request]) -> Iterator[TokenEvent]:
    for request in requests:
        engine.loop.submit(request)
    while engine.loop.has_work:
        yield from engine.loop.step()
    yield from engine.loop.drain()


def _time_batch(engine: Engine, requests: list[Request]) -> tuple[float, list[float]]:
    """Milliseconds until every request has a token, and of each later step that gives all one."""
    loop = engine.loop
    for request in requests:
        loop.submit(request)
    unstarted = {request.request_id for request in requests}
    prefill_ms = 0.0
    decodes_ms = []
    start = time.perf_counter()
    while loop.has_work:
        before = time.perf_counter()
        was_decoding = not unstarted
        events = loop.step()
        now = time.perf_counter()
        unstarted -= {event.request_id for event in events}
        if not was_decoding and not unstarted:
            prefill_ms = (now - start) * 1e3
        elif was_decoding and len(events) == len(requests):
            decodes_ms.append((now - before) * 1e3)
    loop.drain()
    return prefill_ms, decodes_ms
