"""Steps of the engine's own loop: how long they take, what the host does in them, what waits.

Everything here drives `StepLoop` of a built engine as a server does: submit, then step until there
is no work. Wall time between steps is the host's clock after `step` returns; in the overlapped loop
that is when the record of the step before has been seen.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiled_engine.request import Request, SamplingParams
from perf.ceilings import Ceilings
from perf.qwen3_8b import Prompts, step_bytes
from perf.rows import Measured

BATCH_SIZES = (1, 8, 32, 128)
HOST_BATCH_SIZES = (1, 32, 128)
INPUT_LEN, OUTPUT_LEN = 1024, 256
# Tokens of every row before steps count, so that the loop runs ahead and nothing is left to admit.
SETTLED_TOKENS = 4
MIN_STEPS = 32
LONG_PROMPT_LEN = 65536


@dataclass(frozen=True)
class Steady:
    """Decode steps in which all rows get a token each.

    Attributes:
        step_s: mean seconds of a step.
        context_tokens: tokens in the cache before a step, summed over the rows, mean of the steps.
    """

    step_s: float
    context_tokens: float


class Driver:
    """Requests with ids of their own, through one engine's loop."""

    def __init__(self, engine: Any, prompts: Prompts) -> None:
        self.engine = engine
        self.loop = engine.loop
        self.prompts = prompts
        # Far from the ids that `LLM` gives.
        self._next_id = 1 << 40

    def submit(self, prompt: list[int], output_len: int) -> int:
        """Queues a greedy request of fixed length; returns its id."""
        self._next_id += 1
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        request = Request(request_id=self._next_id, prompt_token_ids=prompt, params=params)
        self.loop.submit(request)
        return self._next_id

    def submit_batch(self, batch_size: int, input_len: int, output_len: int) -> set[int]:
        """Queues equal requests with prompts of their own; returns their ids."""
        prompts = self.prompts.many(batch_size, input_len)
        return {self.submit(prompt, output_len) for prompt in prompts}

    def run_out(self, ids: set[int]) -> None:
        """Aborts the requests and steps until their rows are free."""
        for request_id in ids:
            self.loop.abort(request_id)
        while self.loop.has_work:
            self.loop.step()
        self.loop.drain()


class Progress:
    """Counts tokens of a batch of requests."""

    def __init__(self, ids: set[int]) -> None:
        self._seen = dict.fromkeys(ids, 0)
        self._num_unsettled = len(ids)
        self.num_tokens = 0
        self.is_over = False

    def add(self, events: list[Any]) -> None:
        """Takes in what one step brought."""
        for event in events:
            before = self._seen[event.request_id]
            now = self._seen[event.request_id] = before + len(event.token_ids)
            self.num_tokens += now - before
            self._num_unsettled -= before < SETTLED_TOKENS <= now
            self.is_over = self.is_over or event.finish_reason is not None

    @property
    def is_steady(self) -> bool:
        """Every row decodes and none has ended."""
        return self._num_unsettled == 0 and not self.is_over


def settle(driver: Driver, progress: Progress) -> None:
    """Steps until every row decodes."""
    while not progress.is_steady:
        progress.add(driver.loop.step())
        assert not progress.is_over, "a row ended before all decoded: more output tokens are needed"


def measure_steady(driver: Driver, batch_size: int) -> Steady:
    """One batch from 1024 tokens of context to 1280, prompts different in every row and call."""
    ids = driver.submit_batch(batch_size, INPUT_LEN, OUTPUT_LEN)
    progress = Progress(ids)
    settle(driver, progress)
    marks: list[tuple[float, int]] = []
    while not progress.is_over:
        marks.append((time.perf_counter(), progress.num_tokens))
        progress.add(driver.loop.step())
    driver.run_out(ids)
    (start_s, start), (end_s, end) = marks[0], marks[-1]
    num_steps = (end - start) / batch_size
    assert num_steps >= MIN_STEPS, f"only {num_steps} steps in which all {batch_size} rows decode"
    # The step that follows token n of a row finds its prompt and n - 1 tokens in the cache; the
    # steps counted follow the tokens from `start` to just before `end`.
    context = batch_size * (INPUT_LEN - 1.5) + (start + end) / 2
    return Steady((end_s - start_s) / num_steps, context)


def measure_decode(
    driver: Driver,
    ceilings: Ceilings,
    num_repeats: int,
    floor_bytes: Callable[[float, int], float] = step_bytes,
    batch_sizes: Sequence[int] = BATCH_SIZES,
) -> Iterator[Measured]:
    """Step times, alone and over the least time the device needs to read what a step must.

    `floor_bytes` takes tokens of context, summed over the rows, and rows.
    """
    for batch_size in batch_sizes:
        measure_steady(driver, batch_size)
        runs = [measure_steady(driver, batch_size) for _ in range(num_repeats)]
        yield Measured(
            metric="decode_step_ms",
            unit="ms",
            batch=batch_size,
            values=[run.step_s * 1e3 for run in runs],
        )
        floors = [floor_bytes(run.context_tokens, batch_size) / ceilings.read for run in runs]
        yield Measured(
            metric="decode_step_over_floor",
            unit="ratio",
            batch=batch_size,
            values=[run.step_s / floor for run, floor in zip(runs, floors, strict=True)],
        )


def measure_host(driver: Driver, num_repeats: int) -> Iterator[Measured]:
    """What the host does in a steady decode step, and how often it makes the device wait for it."""
    for batch_size in HOST_BATCH_SIZES:
        runs = [_host_of_one(driver, batch_size) for _ in range(num_repeats)]
        yield Measured(
            metric="host_us_per_step",
            unit="us",
            batch=batch_size,
            values=[host_s * 1e6 for host_s, _ in runs],
        )
        yield Measured(
            metric="syncs_per_step",
            unit="count",
            batch=batch_size,
            values=[syncs for _, syncs in runs],
        )


def _host_of_one(driver: Driver, batch_size: int) -> tuple[float, float]:
    """Median host seconds of a step, and synchronising calls a step."""
    ids = driver.submit_batch(batch_size, 64, OUTPUT_LEN)
    progress = Progress(ids)
    settle(driver, progress)
    with counted_syncs() as syncs:
        for _ in range(MIN_STEPS):
            progress.add(driver.loop.step())
    taken, outbox = [], driver.loop.executor.outbox
    for _ in range(MIN_STEPS):
        start, waited_s = time.perf_counter(), outbox.waited_s
        events = driver.loop.step()
        # What is left of a step without the wait for the device is the host's part.
        taken.append(time.perf_counter() - start - (outbox.waited_s - waited_s))
        progress.add(events)
    assert not progress.is_over, "a row ended while steps were counted"
    driver.run_out(ids)
    return statistics.median(taken), len(syncs) / MIN_STEPS


@contextmanager
def counted_syncs() -> Iterator[list[str]]:
    """Collects a message for each call inside that made the host wait for the device."""
    import torch

    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            messages = [str(entry.message) for entry in caught]
            found.extend(text for text in messages if "synchronizing CUDA operation" in text)


@contextmanager
def limited_steps(loop: Any, *, is_limited: bool) -> Iterator[None]:
    """Turns `--max-step-ms` of an engine that was built with it off, or leaves it on."""
    times = loop.choice.step_times
    assert times is not None, "the engine was built without max_step_ms"
    loop.choice.step_times = times if is_limited else None
    try:
        yield
    finally:
        loop.choice.step_times = times


def measure_itl(driver: Driver, limit_ms: float, num_repeats: int) -> Iterator[Measured]:
    """A request decodes while a prompt of 64 k tokens is computed: its slowest tokens."""
    runs = []
    with limited_steps(driver.loop, is_limited=True):
        _intervals_during_prefill(driver)
        runs = [_intervals_during_prefill(driver) for _ in range(num_repeats)]
    p99s_ms = [float(np.percentile(intervals, 99)) * 1e3 for intervals in runs]
    yield Measured(
        metric="itl_p99_over_limit", unit="ratio", values=[value / limit_ms for value in p99s_ms]
    )
    yield Measured(metric="itl_prefill_s", unit="s", values=[float(np.sum(run)) for run in runs])


def _intervals_during_prefill(driver: Driver) -> list[float]:
    """Seconds between the tokens of the decoding request, from submit to the prompt's first."""
    loop = driver.loop
    decoding = driver.submit(driver.prompts.one(128), 4096)
    num_tokens = 0
    while num_tokens < 16:
        num_tokens += sum(len(event.token_ids) for event in loop.step())
    long = driver.submit(driver.prompts.one(LONG_PROMPT_LEN), 2)
    times = [time.perf_counter()]
    is_prefilling = True
    while is_prefilling:
        events = loop.step()
        now = time.perf_counter()
        for event in events:
            is_prefilling = is_prefilling and event.request_id != long
            if event.request_id == decoding:
                times.append(now)
                assert event.finish_reason is None, "the decoding request ended before the prompt"
    driver.run_out({decoding, long})
    return list(np.diff(times))
