"""`compiled-engine serve` from nothing to its first token: an empty cache, a full one, a moved one.

Every start is a process of its own with an aiohttp client before it. The cache folder is fresh, the
model's own files are converted before, as they would have been downloaded. Phases are those that
`serve` itself prints, and so are the misses of its caches: what a warm start compiles.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from compiled_engine.config import DEFAULT_MODEL, default_cache_dir
from perf.rows import Measured, Outcome
from perf.servers import ServerProcess

NAME = "start"
PROMPT = (11, 12, 13, 14, 15, 16, 17, 18)
NUM_COLD = 1
Note = Callable[[str], None]
CLI = (sys.executable, "-m", "compiled_engine.cli")
# A row of the start table: phase, seconds, what the cache had, hits, misses.
_MISSES = re.compile(
    r"^\s*(?:- )?(pieces|inductor|triton|own sources|tune)\s+[\d.]+\s+[\w-]+\s+\d+\s+(\d+)",
    re.MULTILINE,
)
_PHASE = re.compile(r"^(\w[\w ,+-]*): done in ([\d.]+) s", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file, id, or the name of a shape of `model_shapes`, without weights.
        num_repeats: warm starts.
    """

    model: str = DEFAULT_MODEL
    num_repeats: int = 3


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        ready_s: from the process's start until `/ready` answers 200.
        output_s: until the first token is there.
        phases: seconds of what the start says it did, in its order.
        num_misses: pieces, kernels and measurements that its table says were made.
    """

    ready_s: float
    output_s: float
    phases: dict[str, float]
    num_misses: int


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if a server does not start."""
    with tempfile.TemporaryDirectory(prefix="compiled-engine-perf-") as place:
        model, flags = prepared(options.model, Path(place))
        cache, moved = Path(place) / "cache", Path(place) / "elsewhere" / "cache"
        starts: dict[str, list[Start]] = {}
        for case in ["cold"] * NUM_COLD + ["warm"] * options.num_repeats + ["moved"]:
            if case == "moved":
                moved.parent.mkdir()
                cache = cache.rename(moved)
            command = [*CLI, "serve", model, "--port", "{port}", *flags]
            start = start_once([*command, "--cache-dir", str(cache)])
            starts.setdefault(case, []).append(start)
            note(f"{case}: ready {start.ready_s:.1f} s, first token {start.output_s:.1f} s")
    rows = [entry for case, found in starts.items() for entry in _rows(case, found)]
    cold_s = starts["cold"][0].output_s
    ratios = [start.output_s / cold_s for start in starts["warm"]]
    rows.append(Measured(metric="warm_over_cold_start", unit="ratio", values=ratios))
    for name, case in (("warm", ""), ("moved", "moved")):
        values = [start.num_misses for start in starts[name]]
        rows.append(
            Measured(metric="compiles_on_warm_start", unit="count", case=case, values=values)
        )
    return Outcome(measured=[replace(row, model=options.model) for row in rows], seed=None)


def prepared(model: str, place: Path) -> tuple[str, list[str]]:
    """The model's folder and the flags it needs; converts what must be converted first."""
    from compiled_engine.models.source import resolve_model
    from perf.model_shapes import SHAPES, write_folder

    if model not in SHAPES:
        return str(resolve_model(model, default_cache_dir())), []
    shape = SHAPES[model]
    flags = [*shape.flags, "--max-model-len", "8192"]
    return str(write_folder(place / "model", shape.config)), flags


def start_once(command: Sequence[str]) -> Start:
    """Starts a server, asks for one token, and ends it."""
    begin = time.perf_counter()
    with ServerProcess("ours", command, ready_path="/ready") as server:
        ready_s = time.perf_counter() - begin
        asyncio.run(_first_token(server.url))
        output_s = time.perf_counter() - begin
        text = server.output()
    return Start(ready_s, output_s, phases(text), misses(text))


async def _first_token(url: str) -> None:
    body = {"prompt": list(PROMPT), "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {await response.text()}")
        await response.json()


def phases(text: str) -> dict[str, float]:
    """Seconds of each phase that a server says it has done."""
    return {name: float(seconds) for name, seconds in _PHASE.findall(text)}


def misses(text: str) -> int:
    """What was not in a cache, by the table that a start ends with.

    Raises:
        SystemExit: there is no such table.
    """
    found = _MISSES.findall(text)
    if "pieces" not in dict(found):
        raise SystemExit("the server printed no table of its start")
    return sum(int(count) for _, count in found)


def _rows(case: str, starts: Sequence[Start]) -> list[Measured]:
    rows = [
        Measured(metric=metric, unit="s", case=case, values=values)
        for metric, values in (
            ("start_to_ready_s", [start.ready_s for start in starts]),
            ("start_to_first_output_s", [start.output_s for start in starts]),
        )
    ]
    for name in starts[0].phases:
        values = [start.phases[name] for start in starts if name in start.phases]
        rows.append(
            Measured(metric="start_phase_s", unit="s", case=f"{case}: {name}", values=values)
        )
    return rows
