"""The default model in this process: steps by size, prompts, offline throughput, and ratios.

Step times stand over the time in which the CPU, at the read rate of the same run, reads what the
step must read. Ratios are taken of pairs that take turns.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compiled_engine.config import DEFAULT_MODEL
from perf.decode import Driver
from perf.qwen3_8b import Prompts
from perf.rows import Measured, Outcome
from perf.step_gates import first_token_s, step_s

NAME = "cpu_step"
BATCH_SIZES = (1, 8, 32)
PREFILL_LEN = 512
JOBS, JOB_INPUT, JOB_OUTPUT = 16, 128, 64
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file or id.
        num_repeats: turns that count.
        only: names of parts, with commas between them; all if not given.
    """

    model: str = DEFAULT_MODEL
    num_repeats: int = 3
    only: str | None = None


class Bench:
    """What the parts share; an engine is built when a part first needs it."""

    def __init__(self, options: Options, stack: ExitStack, note: Note) -> None:
        self.num_repeats = options.num_repeats
        self._model = options.model
        self._stack = stack
        self._note = note

    @cached_property
    def llm(self) -> Any:
        """Compiled."""
        return self._build("compiled", enforce_eager=False)

    @cached_property
    def driver(self) -> Driver:
        """The loop of the compiled one."""
        return self._driver(self.llm)

    @cached_property
    def eager(self) -> Driver:
        """The loop of its plain twin."""
        return self._driver(self._build("eager", enforce_eager=True))

    def _driver(self, llm: Any) -> Driver:
        return Driver(llm.engine, Prompts(vocab_size=llm.engine.settings.vocab_size))

    def _build(self, name: str, **options: Any) -> Any:
        from compiled_engine import LLM

        begin = time.perf_counter()
        llm = self._stack.enter_context(LLM(self._model, device="cpu", **options))
        self._note(f"{name} engine built in {time.perf_counter() - begin:.1f} s")
        return llm


def _decode(bench: Bench) -> Iterator[Measured]:
    import torch

    from compiled_engine.kernels.ceilings import measure
    from compiled_engine.settings import weight_bytes

    engine = bench.llm.engine
    read = measure(torch.device("cpu"), torch.float32).read
    yield Measured(metric="read_gb_s", unit="GB/s", values=[read / 1e9])
    floor_s = weight_bytes(engine.loop.executor.model) / read
    for batch_size in BATCH_SIZES:
        step_s(bench.driver, batch_size)
        taken = [step_s(bench.driver, batch_size) for _ in range(bench.num_repeats)]
        for metric, unit, values in (
            ("decode_step_ms", "ms", [s * 1e3 for s in taken]),
            ("decode_step_over_weight_read", "ratio", [s / floor_s for s in taken]),
            ("decode_tok_s", "tokens/s", [batch_size / s for s in taken]),
        ):
            yield Measured(metric=metric, unit=unit, batch=batch_size, values=values)


def _prefill(bench: Bench) -> Iterator[Measured]:
    driver, rates, ratios = bench.driver, [], []
    for _ in range(bench.num_repeats + 1):
        prompt = driver.prompts.one(PREFILL_LEN)
        cold_s, warm_s = (first_token_s(driver, prompt) for _ in range(2))
        rates.append(PREFILL_LEN / cold_s)
        ratios.append(warm_s / cold_s)
    case = str(PREFILL_LEN)
    yield Measured(metric="prefill_tok_s", unit="tokens/s", case=case, values=rates[1:])
    yield Measured(metric="warm_prefix_over_cold", unit="ratio", case=case, values=ratios[1:])


def _throughput(bench: Bench) -> Iterator[Measured]:
    from perf.offline import generate_s

    prompts, taken = bench.driver.prompts, []
    for _ in range(bench.num_repeats + 1):
        bench.llm.reset_prefix_cache()
        taken.append(generate_s(bench.llm, prompts.many(JOBS, JOB_INPUT), JOB_OUTPUT))
    num_tokens = JOBS * (JOB_INPUT + JOB_OUTPUT)
    yield Measured(
        metric="offline_tok_s",
        unit="tokens/s",
        batch=JOBS,
        case=f"{JOBS}x{JOB_INPUT}+{JOB_OUTPUT}",
        values=[num_tokens / s for s in taken[1:]],
    )


def _ratios(bench: Bench) -> Iterator[Measured]:
    eager, batched = [], []
    for turn in range(bench.num_repeats + 1):
        one, eight = step_s(bench.driver, 1), step_s(bench.driver, 8)
        plain = step_s(bench.eager, 8)
        if turn:
            eager.append(eight / plain)
            batched.append(eight / one)
    yield Measured(metric="compiled_step_over_eager", unit="ratio", batch=8, values=eager)
    yield Measured(metric="step_of_8_rows_over_one", unit="ratio", values=batched)


PARTS: dict[str, Callable[[Bench], Iterator[Measured]]] = {
    "decode": _decode,
    "prefill": _prefill,
    "throughput": _throughput,
    "ratios": _ratios,
}


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit for an unknown part."""
    names = list(PARTS) if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"--only: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    measured, failures = [], []
    with ExitStack() as stack:
        bench = Bench(options, stack, note)
        for name in names:
            try:
                for entry in PARTS[name](bench):
                    measured.append(entry)
                    note(
                        f"{entry.metric} {entry.batch or ''}: {statistics.median(entry.values):.4g}"
                    )
            except Exception as error:  # one part must not cost the rows of the others
                traceback.print_exc()
                failures.append(f"{name}: {type(error).__name__}: {error}")
    return Outcome(measured=measured, failures=failures)
