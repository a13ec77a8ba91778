"""What a start cost and what its caches had: the rows of the start table.

Gathers what others have counted: the clock of the driver, torch's own times of its compiles, what
our sources' builds and the kernel measurements took, and the store of compiled pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from compiled_engine.build_cache import build_totals
from compiled_engine.cache_folders import CUBINS, KERNELS, LIBRARIES, PRODUCTS
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.custom_ops.tuning import KernelTuner
from compiled_engine.start_times import OTHER, StartPhase

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
    "own sources",
    "tune",
    "first steps",
    "capture",
    OTHER,
)


class StartMeter:
    """Made when a start begins: what was built before is not the start's."""

    def __init__(self) -> None:
        totals = build_totals()
        self._builds = replace(totals, paths=set(totals.paths))

    def phases(self, driver: CompileDriver) -> list[StartPhase]:
        """The rows, at the end of the start; phases of no time and no count are left out."""
        self._split(driver)
        seconds = driver.times.finish()
        rows = {name: StartPhase(name=name, seconds=s) for name, s in seconds.items()}
        for row in self._counted(driver):
            rows[row.name] = replace(row, seconds=seconds.get(row.name, 0.0))
        order = {name: place for place, name in enumerate(PHASES)}
        shown = (row for row in rows.values() if row.seconds >= 0.001 or row.cache != "-")
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
        building = build_totals().seconds - self._builds.seconds
        driver.times.split("first steps", {"own sources": building})

    def _counted(self, driver: CompileDriver) -> Iterable[StartPhase]:
        counters, builds, tuner = driver.refresh(), build_totals(), driver.registry.tuner
        if driver.store is not None:
            kept = driver.store.counters
            yield StartPhase(
                name="pieces",
                seconds=0.0,
                num_hits=kept.num_hits,
                num_misses=len(kept.misses),
                num_bytes=kept.bytes_read + kept.bytes_written,
            )
        yield StartPhase(
            name="inductor",
            seconds=0.0,
            num_hits=counters.num_cache_hits,
            num_misses=counters.num_inductor_compiles,
        )
        yield StartPhase(
            name="own sources",
            seconds=0.0,
            num_hits=builds.num_hits - self._builds.num_hits,
            num_misses=builds.num_misses - self._builds.num_misses,
            num_bytes=builds.num_bytes - self._builds.num_bytes,
        )
        if isinstance(tuner, KernelTuner):
            yield StartPhase(
                name="tune",
                seconds=0.0,
                num_hits=tuner.num_known,
                num_misses=tuner.num_measured,
            )


def kept_files(cache_dir: Path) -> list[str]:
    """Files of the cache folder that starts put there beside compiled pieces, whoever used them."""
    base = Path(cache_dir).absolute()
    folders = (base / name for name in (CUBINS, LIBRARIES, KERNELS, PRODUCTS))
    paths = (path for folder in folders for path in folder.glob("*") if path.is_file())
    return sorted(path.relative_to(base).as_posix() for path in paths)


def used_files(driver: CompileDriver, cache_dir: Path) -> list[str]:
    """Files of the cache folder, beside compiled pieces, that this process used; relative to it.

    Triton's own are not among them: it does not say which it used.
    """
    paths = set(build_totals().paths)
    tuner = driver.registry.tuner
    if isinstance(tuner, KernelTuner) and tuner.num_known + tuner.num_measured:
        paths.add(tuner.path)
    base = Path(cache_dir).absolute()
    return sorted(
        path.absolute().relative_to(base).as_posix()
        for path in paths
        if path.absolute().is_relative_to(base)
    )
