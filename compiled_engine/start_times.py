"""Where the time of an engine's start goes: seconds by phase, each second counted once.

Owns the clock and the record of a phase; who measures what is with who does it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class StartPhase:
    """One row of the start table.

    Attributes:
        name: of the phase.
        seconds: that the start waited for it.
        num_hits: things that were in a cache.
        num_misses: things that had to be made.
        num_bytes: read from caches and written into them; 0 where nobody knows.
        reasons: of the misses, a line each.
    """

    name: str
    seconds: float
    num_hits: int = 0
    num_misses: int = 0
    num_bytes: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def cache(self) -> str:
        """Whether a cache had everything."""
        if self.num_misses:
            return "miss" if not self.num_hits else "part"
        return "hit" if self.num_hits else "-"


class StartTimes:
    """Seconds by phase of one start. A phase within another is taken out of the outer one.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phases = [OTHER]
        self._mark = clock()

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """What the block takes belongs to `phase`."""
        self._charge()
        self._phases.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._phases.pop()

    def add(self, phase: str, seconds: float) -> None:
        """Adds time that passed before this was made, or beside it."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def split(self, phase: str, parts: Mapping[str, float]) -> None:
        """Moves parts of a phase, measured by somebody else, into phases of their own."""
        for name, seconds in parts.items():
            seconds = min(seconds, self.seconds.get(phase, 0.0))
            if seconds > 0:
                self.add(name, seconds)
                self.add(phase, -seconds)

    def carve(self, phase: str, seconds: float) -> None:
        """Says that the last `seconds` of the phase that is running belong to `phase`."""
        self._charge()
        self.split(self._phases[-1], {phase: seconds})

    def finish(self) -> dict[str, float]:
        """Seconds by phase up to now."""
        self._charge()
        return dict(self.seconds)

    def _charge(self) -> None:
        now = self._clock()
        self.add(self._phases[-1], now - self._mark)
        self._mark = now


def process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say.

    Of a process that others waited in before it became this program, those seconds count too.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="utf-8") as file:
            uptime_s = float(file.read().split()[0])
        return max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
