"""What a step loop has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.scheduler.advance import (
    COUNT_CACHED_PAGES,
    COUNT_ERRORS,
    COUNT_FREE_PAGES,
    COUNT_RETRACTIONS,
)


@dataclass
class LoopStats:
    """Totals since start, and gauges of the newest record read."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_scheduler_errors: int = 0
    num_pages_active: int = 0
    num_pages_cached: int = 0
    num_pages_free: int = 0

    def take(self, counts: list[int], num_pages: int) -> None:
        """Reads the gauges out of a record's counts; `num_pages` has the null page in it."""
        free, cached = counts[COUNT_FREE_PAGES], counts[COUNT_CACHED_PAGES]
        self.num_retractions = counts[COUNT_RETRACTIONS]
        self.num_scheduler_errors = counts[COUNT_ERRORS]
        self.num_pages_cached = cached
        self.num_pages_free = free - cached
        self.num_pages_active = num_pages - 1 - free
