"""What each fusion pass is worth: a decode step with it and without it.

One engine with all passes and one without each of them, all of a few rows and short prompts, so
that a build takes little: a step's time, its kernels, and the seconds that the build took. Every
build compiles into a cache of its own: code from a cache tells neither its passes nor its price.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
    "chunked_prefill_size": 256,
}
# Builds an engine with these options of `LLM`.
Build = Callable[[dict[str, Any]], AbstractContextManager[Any]]


def measure_passes(build: Build, vocab_size: int, num_repeats: int) -> Iterator[Measured]:
    """Rows of every pass that matches anything: case "NAME on" is the engine with all passes."""
    with_all, names = _measure(build, (), vocab_size, num_repeats)
    if not names:
        raise RuntimeError("no pass ran: the graphs came from a cache, empty it first")
    for name in names:
        without, _ = _measure(build, (name,), vocab_size, num_repeats)
        for state, found in (("on", with_all), ("off", without)):
            for metric, (unit, values) in found.items():
                yield Measured(
                    metric=metric,
                    unit=unit,
                    batch=BATCH_SIZE,
                    case=f"{name} {state}",
                    values=values,
                )


def _measure(
    build: Build, disabled: tuple[str, ...], vocab_size: int, num_repeats: int
) -> tuple[dict[str, tuple[str, list[float]]], list[str]]:
    """Values by metric, and the passes that matched."""
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as cache,
        build({**ENGINE, "disable_passes": disabled, "cache_dir": cache}) as llm,
    ):
        built_s = time.perf_counter() - start
        driver = Driver(llm.engine, Prompts(vocab_size=vocab_size))
        measure_steady(driver, BATCH_SIZE)
        steps = [measure_steady(driver, BATCH_SIZE).step_s * 1e3 for _ in range(num_repeats)]
        kernels = len(profiled_steps(driver, BATCH_SIZE)) / NUM_STEPS
        matches = llm.engine.driver.refresh().num_matches
    found = {
        "pass_step_ms": ("ms", steps),
        "pass_kernels_per_step": ("count", [kernels]),
        "pass_build_s": ("s", [built_s]),
    }
    return found, [name for name, count in matches.items() if count and name in _pass_names()]


def _pass_names() -> tuple[str, ...]:
    from compiled_engine.passes.pipeline import PASS_NAMES

    return PASS_NAMES
