"""Every op family at the shapes of a step: candidates side by side, and over the device's ceiling.

Calls are captured in one CUDA graph, so that only the device's time counts. Ops bound by bytes are
held to the read bandwidth of the run, ops bound by operations to its matmul rate. The scheduler's
kernels change a state, so they are timed as whole steps (`perf.scheduler`).
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perf.ceilings import Ceilings, measure_ceilings
from perf.qwen3_8b import DTYPE, MODEL, attention_flops
from perf.rows import Measured, Outcome
from perf.scheduler import measure_alone
from perf.timing import graph_ms

if TYPE_CHECKING:
    from perf.op_families import OpCase

NAME = "op_bench"
Note = Callable[[str], None]
SCHEDULER = "scheduler"
NUM_REPLAYS = 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        num_repeats: repeats of every timing.
        only: names of families, with commas between them; all if not given.
    """

    num_repeats: int = 3
    only: str | None = None


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit without a GPU or for an unknown family."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"{NAME} needs an NVIDIA GPU; torch sees none")
    from perf.op_families import FAMILIES

    known = [*FAMILIES, SCHEDULER]
    names = known if options.only is None else options.only.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only: no family {', '.join(unknown)}; there are {', '.join(known)}")
    ceilings = measure_ceilings(options.num_repeats)
    measured, failures = ceilings.measured(), []
    for name in names:
        try:
            if name == SCHEDULER:
                found = measure_alone(options.num_repeats)
            else:
                found = _family(FAMILIES[name](), ceilings, options.num_repeats, note)
            measured.extend(found)
        except Exception as error:  # one family must not cost the rows of the others
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return Outcome(
        measured=[replace(entry, model=MODEL, dtype=DTYPE) for entry in measured],
        environment=ceilings.environment,
        void=ceilings.is_void(torch.cuda.get_device_name()),
        failures=failures,
    )


def _family(
    cases: Iterator[OpCase], ceilings: Ceilings, num_repeats: int, note: Note
) -> Iterator[Measured]:
    for case in cases:
        for candidate, calls in case.candidates.items():
            taken = graph_ms(calls, num_replays=NUM_REPLAYS, num_repeats=num_repeats)
            entries = rates(case, candidate, [ms * 1e-3 for ms in taken], ceilings)
            shown = ", ".join(f"{statistics.median(e.values):.4g} {e.unit}" for e in entries)
            note(f"{case.name}: {candidate}: {shown}")
            yield from entries


def rates(case: OpCase, candidate: str, seconds: list[float], ceilings: Ceilings) -> list[Measured]:
    """Time, rate and share of the ceiling of one candidate."""
    label = f"{case.name}: {candidate}"
    is_bytes = case.num_bytes > 0
    amount = case.num_bytes if is_bytes else case.num_flops
    ceiling = ceilings.read if is_bytes else ceilings.matmul
    metric, unit = ("op_tb_s", "TB/s") if is_bytes else ("op_tflops", "TFLOP/s")
    found = {
        ("op_us", "us"): [s * 1e6 for s in seconds],
        (metric, unit): [amount / s / 1e12 for s in seconds],
        ("op_share_of_ceiling", "ratio"): [amount / s / ceiling for s in seconds],
    }
    return [
        Measured(metric=name, unit=unit, case=label, values=values)
        for (name, unit), values in found.items()
    ]


def attention_share(ceilings: Ceilings, num_repeats: int) -> Measured:
    """The attention kernel of prompts alone, one of 8192 tokens, over the matmul rate."""
    from compiled_engine.custom_ops.family_inputs import Sequences
    from perf.op_families import paged_calls

    length = 8192
    calls = paged_calls(Sequences([length], [length]), copies=4, is_decode=False)
    taken = graph_ms(calls, num_replays=NUM_REPLAYS, num_repeats=num_repeats)
    return Measured(
        metric="attention_share_of_matmul",
        unit="ratio",
        batch=1,
        case=str(length),
        values=[attention_flops(length) / (ms * 1e-3) / ceilings.matmul for ms in taken],
    )
