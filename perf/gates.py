"""Gates that hold on any machine: counts with margin 0, and ratios of times that take turns.

Structure is read from traces without generating code (`compiled_engine.explain`): graph breaks,
kernels, matches of passes, ops that no pass took, for a CPU and for a GPU that need not be here.
What a warm start compiles and imports, and what steps cost, is seen in a process of its own
(`warm_start`). `python -m perf check --suite ci` measures them and compares with
`perf/recorded.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock

from compiled_engine.config import default_cache_dir
from perf import tiny
from perf.rows import Measured, Outcome, Row

NAME = "ci"
COLD_START = "perf_cold_start.json"
# (name, capability of the GPU or None for a CPU, dtype, tokens of the step)
PLACES: tuple[tuple[str, int | None, Any, int], ...] = (
    ("cpu", None, "float32", 1),
    ("cpu", None, "float32", 32),
    ("sm_90", 90, "bfloat16", 1),
    ("sm_90", 90, "bfloat16", 8),
)
# Packages whose import costs a start: each is watched by name.
WATCHED = (
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "networkx",
    "setuptools",
    "transformers",
    "triton",
)

# Least margins of the ratios: machines of CI differ, and what a cold start finds does too.
LEAST_MARGIN = 0.35
# Some differ more between machines: the same code gives 0.127 to 0.212 of a cold prefix.
LEAST_MARGINS = MappingProxyType({"warm_over_cold_start": 0.75, "warm_prefix_over_cold": 0.6})

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        cache_dir: where compiled code lies; the engine's own if not given.
        only: "structure" or "steps"; both if not given.
    """

    cache_dir: Path | None = None
    only: str | None = None


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if the start fails."""
    if options.only not in (None, "structure", "steps"):
        raise SystemExit(f"--only {options.only}: there are structure, steps")
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "steps":
            measured += structure(Path(folder))
        if options.only != "structure":
            measured += steps(Path(folder), options.cache_dir or default_cache_dir(), note)
    return Outcome(measured=measured)


def count(metric: str, value: float, case: str = "") -> Measured:
    """A row of one count."""
    return Measured(metric=metric, unit="count", case=case, values=[value])


def structure(
    folder: Path, disabled: tuple[str, ...] = (), families: Iterable[str] = tiny.FAMILIES
) -> Iterator[Measured]:
    """What steps of the tiny models are made of, without some passes if told so."""
    from torch._dynamo.exc import Unsupported

    from compiled_engine.config import EngineConfig
    from compiled_engine.explain.build import Request, explain_model
    from compiled_engine.kernels.ceilings import Ceilings

    for family in families:
        model = str(tiny.write_family(folder, family))
        for place, arch, dtype, num_tokens in PLACES:
            device: Any = "auto" if arch else "cpu"
            config = EngineConfig(model=model, dtype=dtype, device=device, disable_passes=disabled)
            request = Request(
                config=config,
                num_tokens=num_tokens,
                context=64,
                arch=arch,
                ceilings=Ceilings(1e12, 1e14),
                is_measured=False,
            )
            case = f"{family} {place} {num_tokens}"
            try:
                report = explain_model(request)
            except Unsupported:  # pieces are whole graphs: the first break ends the trace
                yield count("graph_breaks", 1, case)
                continue
            yield count("graph_breaks", report.totals.num_graph_breaks, case)
            yield count("kernels_per_step", report.totals.num_kernels, case)
            yield count("generated_kernels_per_step", report.totals.num_generated, case)
            for name, matches in matches_of(report).items():
                yield count("matches", matches, f"{case} {name}")


def matches_of(report: Any) -> dict[str, int]:
    """Pass -> matches in one of each kind of piece; passes that match nothing are left out."""
    found: dict[str, int] = {}
    for piece in report.pieces:
        for row in piece.passes:
            found[row.name] = found.get(row.name, 0) + row.matches
    return {name: matches for name, matches in found.items() if matches}


def steps(folder: Path, cache_dir: Path, note: Note) -> Iterator[Measured]:
    """What a warm start does, what it takes over a cold one, and what its engine's steps cost."""
    model = tiny.write_family(folder, "qwen3")
    with building(cache_dir):
        found = start(model, cache_dir)
        counters = found["counters"]
        if counters["num_graphs"]:  # that start filled the cache, be it from Inductor's own
            if counters["num_inductor_compiles"] and not counters["num_cache_hits"]:
                note("nothing was in the cache: that was the cold start")
                note_cold_start(cache_dir, found["seconds"])
            found = start(model, cache_dir)
    yield from counted_start(found["counters"])
    imported = set(found["modules"])
    for name in WATCHED:
        yield count("warm_start_imports", int(name in imported), name)
    ratio = found["seconds"] / cold_seconds(model, cache_dir, note)
    yield Measured(metric="warm_over_cold_start", unit="ratio", values=[ratio])
    for row in found["rows"]:
        yield Measured(**row)


def counted_start(counters: Mapping[str, Any]) -> Iterator[Measured]:
    """The counts of `CompileCounters` after a warm start."""
    for name, value in counters.items():
        if type(value) is int:
            yield count(f"warm_start_{name.removeprefix('num_')}", value)


def start(model: Path, cache_dir: Path) -> dict[str, Any]:
    """One start in a process of its own.

    Raises:
        SystemExit: it failed; its own words are on standard error.
    """
    command = [sys.executable, "-m", "perf.warm_start", str(model), str(cache_dir)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"the start failed with exit code {result.returncode}")
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def cold_seconds(model: Path, cache_dir: Path, note: Note) -> float:
    """Processor time of the start that filled the cache, or of one over an empty cache."""
    noted = cache_dir / COLD_START
    if not noted.is_file():
        note("nobody noted how long a cold start takes: one over an empty cache")
        with tempfile.TemporaryDirectory() as empty:
            note_cold_start(cache_dir, start(model, Path(empty))["seconds"])
    return float(json.loads(noted.read_text())["seconds"])


def building(cache_dir: Path) -> FileLock:
    """Held while the tiny engine is built, so that two processes do not compile the same."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    return FileLock(cache_dir / "perf_building.lock")


def note_cold_start(cache_dir: Path, seconds: float) -> None:
    """Keeps the processor time of the start that compiled what lies in the cache."""
    (cache_dir / COLD_START).write_text(json.dumps({"seconds": seconds}))


def least_margin(key: str) -> float:
    """The least margin of a ratio's row."""
    return LEAST_MARGINS.get(key, LEAST_MARGIN)


def as_rows(measured: Iterable[Measured]) -> Iterator[Row]:
    """Rows to be judged at once, of no run."""
    for entry in measured:
        yield entry.row(
            scenario=NAME, run_id="now", commit="now", command="", environment={"device": ""}
        )
