"""Op families on this CPU at the default model's shapes, by `compiled-engine kernels bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from perf.rows import Measured, Outcome

NAME = "cpu_ops"
Note = Callable[[str], None]
# What a step of the default model spends its time in.
FAMILIES = ("attention.paged", "linear.any", "norm.add_rms_norm", "activation.silu_and_mul")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        num_repeats: repeats of every timing.
        only: families or modes with commas between them; `FAMILIES` if not given.
    """

    num_repeats: int = 5
    only: str | None = None


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit with the bench's own words if it fails."""
    measured: list[Measured] = []
    ceilings: dict[tuple[str, str], list[float]] = {}
    for name in options.only.split(",") if options.only else FAMILIES:
        note(name)
        document = bench(name, options.num_repeats)
        for timing in document["timings"]:
            if timing["us"] is not None:
                measured += rows(timing)
        for metric, unit, value in (
            ("read_gb_s", "GB/s", document["read_tb_s"]),
            ("matmul_gflop_s", "GFLOP/s", document["matmul_tflop_s"]),
        ):
            ceilings.setdefault((metric, unit), []).append(value * 1e3)
    # Each family's bench measures them anew.
    measured += [
        Measured(metric=m, unit=unit, values=values) for (m, unit), values in ceilings.items()
    ]
    return Outcome(measured=measured)


def bench(family: str, num_repeats: int) -> dict[str, Any]:
    """The document of one family.

    Raises:
        SystemExit: the bench refused; its own words are on standard error.
    """
    command = [sys.executable, "-m", "compiled_engine.cli", "kernels", "bench", "--json"]
    command += ["--device", "cpu", "--only", family, "--num-repeats", str(num_repeats)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{family}: the bench failed with exit code {result.returncode}")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def rows(timing: dict[str, Any]) -> Iterator[Measured]:
    """One candidate's time, share of its ceiling, and rates, for each repeat."""
    case = f"{timing['place']} {timing['case']}: {timing['name']}"
    repeats = timing["repeats_us"]
    yield Measured(metric="op_us", unit="us", case=case, values=repeats)
    for metric, unit, value in (
        ("op_share_of_ceiling", "ratio", timing["share"]),
        ("op_gb_s", "GB/s", timing["tb_s"] * 1e3),
        ("op_gflop_s", "GFLOP/s", timing["tflop_s"] * 1e3),
    ):  # of the time in "us"
        values = [value * timing["us"] / us for us in repeats]
        yield Measured(metric=metric, unit=unit, case=case, values=values)
