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

    def take(self, counts: list[int], num_pages: int) -> None:
        """Reads the gauges out of a record's counts; `num_pages` has the null page in it."""
        free, cached = counts[COUNT_FREE_PAGES], counts[COUNT_CACHED_PAGES]
        self.num_retractions = counts[COUNT_RETRACTIONS]
        self.num_scheduler_errors = counts[COUNT_ERRORS]
        self.num_pages_cached = cached
        self.num_pages_free = free - cached
        self.num_pages_active = num_pages - 1 - free

    def take_forced(self, forced: dict[int, tuple[int, ...]]) -> None:
        """Counts the tokens that grammars forced on requests, by request id."""
        for tokens in forced.values():
            self.num_jumped_tokens += len(tokens)
            self.num_generated_tokens += len(tokens)
