"""What a start cost and what its caches had: the rows of the start table.

Gathers what others have counted: the clock of the driver, torch's own times of its compiles, what
our sources' builds and the kernel measurements took, and the store of compiled pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from compiled_engine.beside import Beside
from compiled_engine.build_cache import BuildTotals, build_totals, triton_totals
from compiled_engine.cache_folders import CUBINS, KERNELS, LIBRARIES, PRODUCTS
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.store import Miss
from compiled_engine.custom_ops.tuning import KernelTuner
from compiled_engine.memory import is_needs
from compiled_engine.start_times import OTHER, StartPhase, StartTimes

AHEAD = "processes that compile"
# Rows of a process that compiles, which the start's table has too, behind a dash.
MAKING = ("trace", "passes", "inductor", "compilers", "triton", "own sources")
# In the order of the table; phases that others measure by another name come behind them.
PHASES = (
    "imports",
    "load",
    "memory probe",
    "pieces",
    "trace",
    "passes",
    "inductor",
    "compilers",
    "triton",
    "own sources",
    "tune",
    "first steps",
    "capture",
    OTHER,
)


class StartMeter:
    """Made when a start begins: what was built before is not the start's.

    Args:
        times: of the start; what is built is taken out of the phase in which it happens.
    """

    def __init__(self, times: StartTimes) -> None:
        self._totals = {"triton": triton_totals(), "own sources": build_totals()}
        self._before = {name: replace(totals) for name, totals in self._totals.items()}
        self._ahead: tuple[str, ...] = ()
        self._made: list[StartPhase] = []
        for name, totals in self._totals.items():
            totals.on_built = partial(times.carve, name)

    def note_missing(self, problems: Iterable[tuple[str, str]]) -> None:
        """What processes compile ahead, and why it is not in the cache."""
        self._ahead = tuple(f"{name} was compiled ahead: {why}" for name, why in problems)

    def note_made(self, phases: Iterable[StartPhase]) -> None:
        """What those processes did, all together."""
        self._made += [replace(phase, name=f"- {phase.name}") for phase in phases]

    def note_beside(self, parts: Iterable[Beside]) -> None:
        """What threads did beside the start."""
        self._made += [part.phase for part in parts]

    def phases(self, driver: CompileDriver) -> list[StartPhase]:
        """The rows, at the end of the start; phases of no time and no count are left out."""
        for totals in self._totals.values():
            totals.on_built = None
        self._split(driver)
        seconds = driver.times.finish()
        rows = {name: StartPhase(name=name, seconds=s) for name, s in seconds.items()}
        for row in self._counted(driver):
            rows[row.name] = replace(row, seconds=seconds.get(row.name, 0.0))
        order = {name: place for place, name in enumerate(PHASES)}
        if AHEAD in rows:
            rows[AHEAD] = replace(rows[AHEAD], reasons=self._ahead)
        shown = (
            row
            for row in (*rows.values(), *self._made)
            if row.seconds >= 0.001 or row.cache != "-" or row.reasons
        )
        return sorted(shown, key=lambda row: order.get(row.name, len(order)))

    def _split(self, driver: CompileDriver) -> None:
        """Takes what was measured elsewhere out of the first steps, in which it happened."""
        tuner, compiled = driver.registry.tuner, driver.compile_seconds()
        passes = sum(driver.counters.pass_seconds.values())
        tuning = tuner.seconds if isinstance(tuner, KernelTuner) else 0.0
        if compiled:
            driver.times.split("first steps", compiled)
            driver.times.split("inductor", {"passes": passes})
            driver.times.split("passes", {"tune": tuning})

    def _counted(self, driver: CompileDriver) -> Iterable[StartPhase]:
        counters, tuner = driver.refresh(), driver.registry.tuner
        if driver.store is not None:
            kept = driver.store.counters
            yield StartPhase(
                name="pieces",
                seconds=0.0,
                num_hits=kept.num_hits,
                num_misses=len(kept.misses),
                num_bytes=kept.bytes_read + kept.bytes_written,
                reasons=tuple(_reason(miss) for miss in kept.misses),
            )
        yield StartPhase(
            name="inductor",
            seconds=0.0,
            num_hits=counters.num_cache_hits,
            num_misses=counters.num_inductor_compiles,
        )
        for name, totals in self._totals.items():
            yield _since(name, totals, self._before[name])
        if isinstance(tuner, KernelTuner):
            yield StartPhase(
                name="tune",
                seconds=0.0,
                num_hits=tuner.num_known,
                num_misses=tuner.num_measured,
            )


def _reason(miss: Miss) -> str:
    verb = "measured" if is_needs(miss.name) else "compiled"
    return f"{miss.name} was {verb}: {miss.reason}"


def _since(name: str, totals: BuildTotals, before: BuildTotals) -> StartPhase:
    return StartPhase(
        name=name,
        seconds=0.0,
        num_hits=totals.num_hits - before.num_hits,
        num_misses=totals.num_misses - before.num_misses,
        num_bytes=totals.num_bytes - before.num_bytes,
    )


def kept_files(cache_dir: Path) -> list[str]:
    """Files of the cache folder that starts put there beside compiled pieces, whoever used them."""
    base = Path(cache_dir).absolute()
    folders = (base / name for name in (CUBINS, LIBRARIES, KERNELS, PRODUCTS))
    paths = (path for folder in folders for path in folder.glob("*") if path.is_file())
    return sorted(path.relative_to(base).as_posix() for path in paths)


def used_files(driver: CompileDriver, cache_dir: Path) -> list[str]:
    """Files of the cache folder, beside compiled pieces, that this process used; relative to it.

    Of each Triton kernel it is the note of its files.
    """
    paths = build_totals().paths | triton_totals().paths
    tuner = driver.registry.tuner
    if isinstance(tuner, KernelTuner) and tuner.num_known + tuner.num_measured:
        paths.add(tuner.path)
    base = Path(cache_dir).absolute()
    return sorted(
        path.absolute().relative_to(base).as_posix()
        for path in paths
        if path.absolute().is_relative_to(base)
    )
