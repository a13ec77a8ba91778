"""What each fusion pass is worth: a decode step with it and without it.

One engine with all passes and one without each of them, all of a few rows and short prompts, so
that a build takes little: a step's time, its kernels, and the seconds that the build took. Every
build compiles into a cache of its own: code from a cache tells neither its passes nor its price.
Engines are built in processes beside one another, and measured in turn when all are there.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from threading import Barrier, BrokenBarrierError
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
# Engines there are at once: their weights must fit the device together, and what compiles for each.
NUM_PROCESSES = 5
# Processes that compile for one engine, at most.
MAX_COMPILE_JOBS = 8
BUILD_TIMEOUT_S = 400.0


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
        built: where engines that are built wait for the others.
    """

    folder: str
    options: dict[str, Any]
    vocab_size: int
    num_repeats: int
    turn: AbstractContextManager[Any] = field(default_factory=nullcontext)
    built: Any = field(default_factory=lambda: Barrier(1))


def measure_passes(
    run: Callable[[Sequence[tuple[str, ...]]], Iterable[Found]],
) -> Iterator[Measured]:
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


def run_in_processes(job: Job, left_out: Sequence[tuple[str, ...]]) -> Iterator[Found]:
    """`run_job` for each, some at a time."""
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    for start in range(0, len(left_out), NUM_PROCESSES):
        group = left_out[start : start + NUM_PROCESSES]
        with (
            context.Manager() as manager,
            ProcessPoolExecutor(len(group), context, max_tasks_per_child=1) as pool,
        ):
            compile_jobs = min(MAX_COMPILE_JOBS, max(1, cores // len(group)))
            shared = replace(
                job,
                options={**job.options, "compile_jobs": compile_jobs},
                turn=manager.Lock(),
                built=manager.Barrier(len(group)),
            )
            jobs = [pool.submit(run_job, shared, names) for names in group]
            for found in jobs:
                if isinstance(found.exception(), BrokenBarrierError):
                    raise _first_cause(job.exception() for job in jobs)
                yield found.result()


def _first_cause(errors: Iterable[BaseException | None]) -> BaseException:
    """Why an engine could not be built; the others broke off then."""
    found = [error for error in errors if error is not None]
    return next((e for e in found if not isinstance(e, BrokenBarrierError)), found[0])


def run_job(job: Job, disabled: tuple[str, ...]) -> Found:
    """Builds and measures an engine without some passes."""
    from compiled_engine import LLM
    from compiled_engine.passes.names import PASS_NAMES

    start = time.perf_counter()
    options = {**ENGINE, **job.options, "disable_passes": disabled}
    with tempfile.TemporaryDirectory() as cache, ExitStack() as opened:
        try:
            llm = opened.enter_context(LLM(job.folder, cache_dir=cache, **options))
        except BaseException:
            job.built.abort()  # nobody waits for this one
            raise
        built_s = time.perf_counter() - start
        job.built.wait(BUILD_TIMEOUT_S)
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
