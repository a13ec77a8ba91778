"""The step in a device loop over the replayed step: on an idle host, and on a busy one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perf.decode import Driver, measure_steady
from perf.rows import Measured

BATCH_SIZE = 1
NUM_CORES = 2


def measure_device_loop(replayed: Driver, looped: Driver, num_repeats: int) -> Iterator[Measured]:
    """Ratios of step times of two engines that take turns."""
    for case in ("idle_host", "busy_host"):
        for driver in (replayed, looped):
            measure_steady(driver, BATCH_SIZE)
        ratios = []
        for _ in range(num_repeats):
            if case == "busy_host":
                with busy_cores():
                    ratios.append(_ratio(replayed, looped))
            else:
                ratios.append(_ratio(replayed, looped))
        yield Measured(
            metric="device_loop_over_replay",
            unit="ratio",
            batch=BATCH_SIZE,
            case=case,
            values=ratios,
        )


def _ratio(replayed: Driver, looped: Driver) -> float:
    before = measure_steady(replayed, BATCH_SIZE).step_s
    return measure_steady(looped, BATCH_SIZE).step_s / before


@contextmanager
def busy_cores() -> Iterator[None]:
    """This process shares two cores with one process each that never rests."""
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    before = {}
    burners = []
    try:
        for thread in threads:
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, cores)
        for core in cores:
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            burners.append(burner)
            os.sched_setaffinity(burner.pid, {core})
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
        for thread, affinity in before.items():
            if Path(f"/proc/self/task/{thread}").exists():
                os.sched_setaffinity(thread, affinity)
