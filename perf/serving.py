"""The server under load: latency and throughput by the number of requests in flight.

A real server in a process of its own, and the package's aiohttp load generator. Each point of the
curve is a run of its own with prompts of its own; TTFT, TPOT and tokens a second are those of
`compiled_engine.bench.stats`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from compiled_engine.bench.load import run_load
from compiled_engine.bench.load_config import LoadConfig
from compiled_engine.bench.stats import LoadSummary, summarize_load
from compiled_engine.config import DEFAULT_MODEL
from perf.rows import Measured, Outcome
from perf.servers import ServerProcess

NAME = "serving"
IN_FLIGHT = (1, 2, 4, 8, 16)
INPUT_LEN, OUTPUT_LEN = 64, 32
REQUESTS_FOR_EACH = 2  # place in flight
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id.
        num_repeats: runs of each point that count.
    """

    model: str = DEFAULT_MODEL
    num_repeats: int = 3


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if the server does not start or a request fails."""
    command = [sys.executable, "-m", "compiled_engine.cli", "serve", options.model]
    command += ["--port", "{port}"]
    measured = []
    note("starting the server")
    with ServerProcess("ours", command, ready_path="/ready") as server:
        load(server.url, 2, seed=0)
        for in_flight in IN_FLIGHT:
            runs = [load(server.url, in_flight, seed=n + 1) for n in range(options.num_repeats)]
            measured += rows(in_flight, runs)
            note(f"{in_flight} in flight: {runs[-1].output_tokens_per_s:.1f} tokens/s")
    return Outcome(measured=measured)


def load(url: str, in_flight: int, seed: int) -> LoadSummary:
    """One run of one point.

    Raises:
        SystemExit: a request failed.
    """
    config = LoadConfig(
        url=url,
        num_requests=REQUESTS_FOR_EACH * in_flight + 1,
        concurrency=in_flight,
        input_len=INPUT_LEN,
        output_len=OUTPUT_LEN,
        seed=1000 * in_flight + seed,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = summarize_load(runner.run(run_load(config)))
    if summary.num_failed:
        raise SystemExit(f"{summary.num_failed} requests failed: {summary.errors}")
    return summary


def rows(in_flight: int, runs: Sequence[LoadSummary]) -> list[Measured]:
    """One point of the curve."""

    def row(metric: str, unit: str, values: Sequence[float], case: str = "") -> Measured:
        return Measured(metric=metric, unit=unit, batch=in_flight, case=case, values=values)

    measured = [row("serving_tok_s", "tokens/s", [run.output_tokens_per_s for run in runs])]
    for metric, name in (("ttft_ms", "ttft_ms"), ("tpot_ms", "tpot_ms"), ("itl_ms", "itl_ms")):
        for case in ("p50", "p99"):
            summaries = [getattr(run, name) for run in runs]
            measured.append(row(metric, "ms", [getattr(s, case) for s in summaries], case))
    return measured
