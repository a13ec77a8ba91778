"""What a step loop has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from compiled_engine.outbox import HostRecord
from compiled_engine.scheduler.advance import (
    COUNT_CACHED_PAGES,
    COUNT_ERRORS,
    COUNT_FREE_PAGES,
    COUNT_RETRACTIONS,
)
from compiled_engine.seats import SeatColumns

# Where nobody takes them, they must not pile up.
MAX_KEPT = 4096


@dataclass
class LoopStats:
    """Totals since start, and gauges of the newest record read.

    Jumped tokens are generated ones that a grammar forced and that took no step of their own.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_jumped_tokens: int = 0
    num_retractions: int = 0
    num_scheduler_errors: int = 0
    num_pages_active: int = 0
    num_pages_cached: int = 0
    num_pages_free: int = 0
    _retracted: dict[int, int] = field(default_factory=dict)  # by request id, times

    def take(self, record: HostRecord, num_pages: int, columns: SeatColumns) -> None:
        """Reads the gauges out of a record; `num_pages` has the null page in it."""
        counts = record.counts
        if counts[COUNT_RETRACTIONS] > self.num_retractions:
            self.note_retracted(columns.retracted(record.rows))
        free, cached = counts[COUNT_FREE_PAGES], counts[COUNT_CACHED_PAGES]
        self.num_retractions = counts[COUNT_RETRACTIONS]
        self.num_scheduler_errors = counts[COUNT_ERRORS]
        self.num_pages_cached = cached
        self.num_pages_free = free - cached
        self.num_pages_active = num_pages - 1 - free

    def note_retracted(self, request_ids: Iterable[int]) -> None:
        """Each of the requests was retracted once more."""
        if len(self._retracted) >= MAX_KEPT:
            self._retracted.clear()
        for request_id in request_ids:
            self._retracted[request_id] = self._retracted.get(request_id, 0) + 1

    def take_retracted(self) -> dict[int, int]:
        """Request id -> how often it was retracted since the last call, of those that were."""
        taken, self._retracted = self._retracted, {}
        return taken

    def take_forced(self, forced: dict[int, tuple[int, ...]]) -> None:
        """Counts the tokens that grammars forced on requests, by request id."""
        for tokens in forced.values():
            self.num_jumped_tokens += len(tokens)
            self.num_generated_tokens += len(tokens)
