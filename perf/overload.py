"""Three times the requests that the server can answer: it must go on answering as many as before.

Capacity is measured first, with always as many unfinished requests as are admitted. Then requests
come at random times at three times that rate; what is over the limit gets 429 at once. Goodput are
whole answers a second, counted while requests came. The engine computes with one thread.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import uvloop

from compiled_engine.bench.load import run_load
from compiled_engine.bench.load_config import LoadConfig
from compiled_engine.bench.stats import RequestRecord, percentile
from compiled_engine.config import DEFAULT_MODEL
from perf.rows import Measured, Outcome
from perf.servers import ServerProcess

NAME = "overload"
FACTOR = 3.0
NUM_ROWS = 8
MAX_UNFINISHED = 24
INPUT_LEN = 32
OUTPUT_LEN = 24
CAPACITY_S = 40.0
OVERLOAD_S = 120.0
# Until rows and queue are full.
RAMP_S = 4.0
CLIENT_TIMEOUT_S = 60.0
NUM_WARM_REQUESTS = 32

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id.
    """

    model: str = DEFAULT_MODEL


@dataclass(frozen=True, kw_only=True)
class Overload:
    """What happened under too many requests.

    Attributes:
        capacity: whole answers a second with the queue always full.
        goodput: whole answers a second under the overload.
        reject_ms: how long each refusal took.
        failures: why requests failed that were not refused.
        num_done, num_sent: under the overload.
    """

    capacity: float
    goodput: float
    reject_ms: Sequence[float]
    failures: Sequence[str]
    num_done: int
    num_sent: int

    @property
    def ratio(self) -> float:
        """Goodput over capacity."""
        return self.goodput / self.capacity


def serve_command(model: str, *flags: str) -> list[str]:
    """A server whose queue is short enough that whoever is admitted is answered soon."""
    command = [sys.executable, "-m", "compiled_engine.cli", "serve", model, "--port", "{port}"]
    command += ["--device", "cpu", "--num-threads", "1", "--max-num-seqs", str(NUM_ROWS)]
    return [*command, "--max-queued-requests", str(MAX_UNFINISHED), *flags]


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if the server does not start."""
    note("starting the server")
    with ServerProcess("ours", serve_command(options.model), ready_path="/ready") as server:
        seen = overload(server.url, CAPACITY_S, OVERLOAD_S, note)

    def row(metric: str, unit: str, value: float) -> Measured:
        return Measured(metric=metric, unit=unit, values=[value], batch=NUM_ROWS)

    return Outcome(
        measured=[
            row("goodput_over_peak", "ratio", seen.ratio),
            row("peak_answers_per_s", "1/s", seen.capacity),
            row("rejects", "count", len(seen.reject_ms)),
            row("reject_p95_ms", "ms", percentile(seen.reject_ms, 95)),
            row("failed_after_admission", "count", len(seen.failures)),
        ]
    )


def overload(url: str, capacity_s: float, overload_s: float, note: Note) -> Overload:
    """Measures capacity for `capacity_s` seconds, then offers `FACTOR` times it."""
    full = LoadConfig(
        url=url,
        num_requests=NUM_WARM_REQUESTS,
        concurrency=MAX_UNFINISHED,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
        timeout_s=CLIENT_TIMEOUT_S,
    )
    _load(full)
    begin = time.perf_counter()
    _load(full)
    guess = NUM_WARM_REQUESTS / (time.perf_counter() - begin)
    num_requests = max(NUM_WARM_REQUESTS, int(guess * capacity_s))
    capacity = rate(_load(replace(full, num_requests=num_requests, seed=1)))
    note(f"capacity: {capacity:.2f} answers a second")
    records = _load(
        replace(
            full,
            num_requests=int(FACTOR * capacity * overload_s),
            concurrency=10_000,
            request_rate=FACTOR * capacity,
            seed=2,
        )
    )
    refused = [r for r in records if (r.error or "").startswith("HTTP 429")]
    seen = Overload(
        capacity=capacity,
        goodput=rate(records),
        reject_ms=[(r.end_s - r.sent_s) * 1e3 for r in refused],
        failures=[r.error for r in records if r.error is not None and r not in refused],
        num_done=sum(r.error is None for r in records),
        num_sent=len(records),
    )
    note(
        f"overload: {seen.goodput:.2f} answers a second, {seen.ratio:.3f} of the capacity; "
        f"{seen.num_done} of {seen.num_sent} answered, {len(refused)} refused, "
        f"{len(seen.failures)} failed {seen.failures[:3]}"
    )
    return seen


def _load(config: LoadConfig) -> list[RequestRecord]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_load(config))


def rate(records: Sequence[RequestRecord]) -> float:
    """Whole answers a second, from `RAMP_S` after the first request to the last request's start."""
    begin = min(r.sent_s for r in records) + RAMP_S
    end = max(r.sent_s for r in records)
    if end <= begin:
        raise SystemExit(f"all requests came within {RAMP_S:g} s: too few for a rate")
    done = sum(r.error is None and begin <= r.end_s <= end for r in records)
    return done / (end - begin)
