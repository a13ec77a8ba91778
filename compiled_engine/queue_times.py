"""How long requests wait for a row, by the host's clock; the device is not asked.

Compiling a grammar comes before and does not count. A request that has its row may still wait for
pages: that belongs to its prefill.
"""

from __future__ import annotations

import time

# Where nobody takes them, they must not pile up.
MAX_KEPT = 4096


class QueueTimes:
    """Times of requests between submit and row."""

    def __init__(self) -> None:
        self._arrived: dict[int, float] = {}
        self._seated: dict[int, float] = {}

    def arrive(self, request_id: int) -> None:
        """The request was submitted, or its grammar is there now."""
        self._arrived[request_id] = time.perf_counter()

    def seat(self, request_id: int) -> None:
        """It has a row."""
        if len(self._seated) >= MAX_KEPT:
            self._seated.clear()
        self._seated[request_id] = time.perf_counter() - self._arrived.pop(request_id)

    def forget(self, request_id: int) -> None:
        """It is aborted; unknown and seated ones are fine."""
        self._arrived.pop(request_id, None)

    def take(self) -> dict[int, float]:
        """Request id -> seconds, of those that got a row since the last call."""
        taken, self._seated = self._seated, {}
        return taken
