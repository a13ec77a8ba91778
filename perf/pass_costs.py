"""What each fusion pass is worth: a decode step with it and without it.

One engine with all passes and one without each of them, all of a few rows and short prompts, so
that a build takes little: a step's time, its kernels, and the seconds that the build took. Every
build compiles into a cache of its own: code from a cache tells neither its passes nor its price.
Engines are built in processes beside one another, and measured in turn.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from perf.decode import Driver, measure_steady
from perf.kernel_profile import NUM_STEPS, profiled_steps
from perf.qwen3_8b import Prompts
from perf.rows import Measured

BATCH_SIZE = 8
ENGINE = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": 2048,
    "max_num_seqs": BATCH_SIZE,
    "max_total_tokens": 2048 * BATCH_SIZE,
    "chunked_prefill_size": 64,
}
# Engines there are at once: their weights must fit the device together.
NUM_PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one engine gave.

    Attributes:
        values: unit and repeats, by metric.
        matched: passes that matched anything.
    """

    values: dict[str, tuple[str, list[float]]]
    matched: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is built.

    Attributes:
        folder: of the model.
        options: of `LLM`, besides those of this bench.
        vocab_size: of the model.
        num_repeats: of the steps.
        turn: held while an engine is measured.
    """

    folder: str
    options: dict[str, Any]
    vocab_size: int
    num_repeats: int
    turn: AbstractContextManager[Any] = field(default_factory=nullcontext)


def measure_passes(run: Callable[[Sequence[tuple[str, ...]]], list[Found]]) -> Iterator[Measured]:
    """Rows of every pass that matches anything: case "NAME on" is the engine with all passes.

    `run` measures an engine for each tuple of passes to leave out.
    """
    (with_all,) = run([()])
    if not with_all.matched:
        raise RuntimeError("no pass ran: the graphs came from a cache")
    others = run([(name,) for name in with_all.matched])
    for name, without in zip(with_all.matched, others, strict=True):
        for state, found in (("on", with_all), ("off", without)):
            for metric, (unit, values) in found.values.items():
                yield Measured(
                    metric=metric,
                    unit=unit,
                    batch=BATCH_SIZE,
                    case=f"{name} {state}",
                    values=values,
                )


def run_in_processes(job: Job, left_out: Sequence[tuple[str, ...]]) -> list[Found]:
    """`run_job` for each, a few at a time."""
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(NUM_PROCESSES, context, max_tasks_per_child=1) as pool,
    ):
        turn = manager.Lock()
        shared = Job(**{**vars(job), "turn": turn})
        return list(pool.map(run_job, [shared] * len(left_out), left_out))


def run_job(job: Job, disabled: tuple[str, ...]) -> Found:
    """Builds and measures an engine without some passes."""
    from compiled_engine import LLM
    from compiled_engine.passes.names import PASS_NAMES

    start = time.perf_counter()
    options = {**ENGINE, **job.options, "disable_passes": disabled}
    with tempfile.TemporaryDirectory() as cache, LLM(job.folder, cache_dir=cache, **options) as llm:
        built_s = time.perf_counter() - start
        driver = Driver(llm.engine, Prompts(vocab_size=job.vocab_size))
        with job.turn:
            measure_steady(driver, BATCH_SIZE)
            steps = [measure_steady(driver, BATCH_SIZE).step_s for _ in range(job.num_repeats)]
            kernels = len(profiled_steps(driver, BATCH_SIZE)) / NUM_STEPS
        matches = llm.engine.driver.refresh().num_matches
    return Found(
        values={
            "pass_step_ms": ("ms", [step * 1e3 for step in steps]),
            "pass_kernels_per_step": ("count", [kernels]),
            "pass_build_s": ("s", [built_s]),
        },
        matched=tuple(name for name, count in matches.items() if count and name in PASS_NAMES),
    )
