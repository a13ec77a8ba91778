"""The Qwen3-8B shape on one GPU: every row of a report in one run.

Ceilings are always measured, first: shares and floors are taken of them, and a device that gives
too little makes the run void. One engine serves all parts but the device loop, which has its own. A
part that fails is named at the end; the rows of the others are kept.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perf.ceilings import Ceilings, measure_ceilings
from perf.decode import LONG_PROMPT_LEN, Driver, limited_steps, measure_decode, measure_host
from perf.decode import measure_itl as measure_itl_of
from perf.device_loop import measure_device_loop
from perf.job_profile import profile_jobs
from perf.kernel_profile import measure_profile
from perf.loading import measure_load
from perf.offline import measure_agentic, measure_e2e, measure_prefill
from perf.op_bench import attention_share
from perf.qwen3_8b import DTYPE, MODEL, Prompts, write_folder
from perf.rows import Measured, Outcome, key_of
from perf.scheduler import NUM_ROWS, measure_plan_advance
from perf.stopping import Stopped, left_out, stop_on_sigterm

NAME = "gpu_step"
Note = Callable[[str], None]

MAX_STEP_MS = 15.0
ENGINE = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": LONG_PROMPT_LEN + 4096,
    "max_num_seqs": NUM_ROWS,
    "max_total_tokens": 262_144,
    "max_step_ms": MAX_STEP_MS,
}
LOOP_ENGINE = {
    "load_format": "dummy",
    "device": "cuda",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_total_tokens": 16_384,
    "device_loop": True,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        num_repeats: repeats of every measurement that count.
        only: names of parts, with commas between them; all if not given.
    """

    num_repeats: int = 3
    only: str | None = None


class Bench:
    """What the parts share; engines are built when a part first needs one."""

    def __init__(
        self, folder: Path, ceilings: Ceilings, num_repeats: int, stack: ExitStack, note: Note
    ) -> None:
        self.folder = folder
        self.ceilings = ceilings
        self.num_repeats = num_repeats
        self.prompts = Prompts()
        self.documents: dict[str, str] = {}
        self._stack = stack
        self._note = note

    @cached_property
    def llm(self) -> Any:
        """The engine of nearly all parts."""
        return self._build("engine", ENGINE)

    @cached_property
    def driver(self) -> Driver:
        """Its loop."""
        return Driver(self.llm.engine, self.prompts)

    @cached_property
    def loop_driver(self) -> Driver:
        """The loop of an engine that repeats its steps on the device."""
        return Driver(self._build("engine with a device loop", LOOP_ENGINE).engine, self.prompts)

    def unlimited(self) -> Any:
        """Context in which the engine does as if it had been built without `max_step_ms`."""
        return limited_steps(self.driver.loop, is_limited=False)

    def _build(self, label: str, options: dict[str, Any]) -> Any:
        from compiled_engine import LLM

        start = time.perf_counter()
        progress = Throttled(self._note)
        llm = self._stack.enter_context(
            LLM(str(write_folder(self.folder)), progress=progress, **options)
        )
        self._note(f"{label} built in {time.perf_counter() - start:.1f} s")
        return llm


class Throttled:
    """Shows a build's progress, at most once in `SECONDS`."""

    SECONDS = 3.0

    def __init__(self, note: Note) -> None:
        self._note = note
        self._start = self._shown_at = time.perf_counter()

    def __call__(self, phase: str, label: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._shown_at >= self.SECONDS:
            self._shown_at = now
            self._note(f"{now - self._start:.0f} s: {phase} {done}/{total} {label}")


def _decode(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        yield from measure_decode(bench.driver, bench.ceilings, bench.num_repeats)
        yield from measure_host(bench.driver, bench.num_repeats)


def _prefill(bench: Bench) -> Iterator[Measured]:
    yield attention_share(bench.ceilings, bench.num_repeats)
    with bench.unlimited():
        yield from measure_prefill(bench.driver, bench.ceilings, bench.num_repeats)


def _e2e(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        yield from measure_e2e(bench.llm, bench.prompts, bench.num_repeats)


def _agentic(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        yield from measure_agentic(bench.llm, bench.prompts, bench.num_repeats)


def _itl(bench: Bench) -> Iterator[Measured]:
    yield from measure_itl_of(bench.driver, MAX_STEP_MS, bench.num_repeats)


def _scheduler(bench: Bench) -> Iterator[Measured]:
    yield from measure_plan_advance(bench.llm.engine, bench.num_repeats)


def _profile(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        measured, document = measure_profile(bench.driver, bench.ceilings.read, bench.num_repeats)
    bench.documents["decode_profile.md"] = document
    yield from measured


def _job_profile(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        document = profile_jobs(bench.llm, bench.driver, bench.ceilings)
    bench.documents["job_profile.md"] = document
    yield from ()


def _device_loop(bench: Bench) -> Iterator[Measured]:
    with bench.unlimited():
        yield from measure_device_loop(bench.driver, bench.loop_driver, bench.num_repeats)


def _load(bench: Bench) -> Iterator[Measured]:
    yield from measure_load(bench.num_repeats)


# In the order they run: what needs the device's memory for itself comes before the engine.
PARTS: dict[str, Callable[[Bench], Iterator[Measured]]] = {
    "load": _load,
    "decode": _decode,
    "prefill": _prefill,
    "e2e": _e2e,
    "agentic": _agentic,
    "scheduler": _scheduler,
    "itl": _itl,
    "profile": _profile,
    "job_profile": _job_profile,
    "device_loop": _device_loop,
}
CEILINGS = "ceilings"


def chosen_parts(only: str | None) -> list[str]:
    """The parts to run, in their order.

    Raises:
        SystemExit: an unknown name.
    """
    if only is None:
        return list(PARTS)
    names = only.split(",")
    unknown = [name for name in names if name not in PARTS and name != CEILINGS]
    if unknown:
        known = ", ".join((CEILINGS, *PARTS))
        raise SystemExit(f"--only {only}: no part {', '.join(unknown)}; there are {known}")
    return [name for name in PARTS if name in names]


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit without a GPU."""
    import torch

    parts = chosen_parts(options.only)
    if not torch.cuda.is_available():
        raise SystemExit(f"{NAME} needs an NVIDIA GPU; torch sees none")
    ceilings = measure_ceilings(options.num_repeats)
    measured = ceilings.measured()
    for entry in measured:
        note(_described(entry))
    failures = []
    stop_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(folder, ceilings, options.num_repeats, stack, note)
        for name in parts:
            start = time.perf_counter()
            try:
                for entry in PARTS[name](bench):
                    measured.append(entry)
                    note(_described(entry))
            except Stopped:  # what was measured so far is kept
                failures.append(left_out(name))
                break
            except Exception as error:  # one part must not cost the rows of the others
                traceback.print_exc()
                failures.append(f"{name}: {type(error).__name__}: {error}")
            note(f"-- {name}: {time.perf_counter() - start:.1f} s")
    return Outcome(
        measured=[replace(entry, model=MODEL, dtype=DTYPE) for entry in measured],
        environment=ceilings.environment,
        void=ceilings.is_void(torch.cuda.get_device_name()),
        failures=failures,
        documents=bench.documents,
    )


def _described(entry: Measured) -> str:
    key = key_of(entry.metric, entry.batch, entry.case)
    low, high = min(entry.values), max(entry.values)
    return f"{key}: {statistics.median(entry.values):.4g} {entry.unit} ({low:.4g} to {high:.4g})"
