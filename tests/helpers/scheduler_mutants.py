"""Wrong schedulers: the oracle with one known mistake each.

Owns the mistakes. The trap tests run them through the same checks as the right scheduler and assert
that the checks catch them; this shows that the checks would also catch the tensor scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.helpers.python_pool import PublishEntry
from tests.helpers.python_scheduler import PythonRow, PythonScheduler, Shape


class FirstTouch(PythonScheduler):
    """Frees a page at the place where it was touched first: parents can leave before children."""

    def touch_order(self, touched: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(touched))


class NoParentCompare(PythonScheduler):
    """Takes a page with the right tokens whatever came before it."""

    def matches_page(self, page: int, tokens: tuple[int, ...], parent_uid: int) -> bool:
        return self.pool.page_tokens[page] == tokens


class NoTokenCompare(PythonScheduler):
    """Trusts the key."""

    def matches_page(self, page: int, tokens: tuple[int, ...], parent_uid: int) -> bool:
        return True


class KeepDuplicates(PythonScheduler):
    """Keeps its own copy of a published page, yet publishes children under the published one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.stands_for: dict[int, int] = {}  # own copy -> uid of the published page
        self.pool.swap = self._keep  # type: ignore[method-assign]
        self.pool.parent_of = self._parent  # type: ignore[method-assign]

    def _keep(self, entry: PublishEntry) -> None:
        self.stands_for[entry.page] = self.pool.uid[entry.canonical]
        entry.canonical = entry.page

    def _parent(self, page: int) -> int:
        return self.pool.uid[page] or self.stands_for[page]


class NeverStuck(PythonScheduler):
    """Retracts only for a page-blocked row, not when nothing at all was granted."""

    def is_stuck(self) -> bool:
        return False


class AdmitByChunk(PythonScheduler):
    """Admits as soon as one page is free, with no reserve for the residents."""

    def charge(self, row: PythonRow, matched: Sequence[int], touched: set[int]) -> int:
        return 1

    def reserve_pages(self) -> int:
        return 0


class NoReserve(PythonScheduler):
    """Admits whole prompts but forgets what the residents still need."""

    def reserve_pages(self) -> int:
        return 0


class MatchedPagesFree(PythonScheduler):
    """Does not charge cached pages that a match takes out of the free ones."""

    def charge(self, row: PythonRow, matched: Sequence[int], touched: set[int]) -> int:
        return self.target_pages(row) - len(matched)


class UncappedTarget(PythonScheduler):
    """Reserves a page of growth that the longest request never uses."""

    def target_pages(self, row: PythonRow) -> int:
        return self._pages(row.num_tokens + self.shape.page_size)


class EarlyMatch(PythonScheduler):
    """Admits and matches every row of a burst before any has computed a page."""

    def is_deferred(self, row: PythonRow, earlier: Sequence[PythonRow]) -> bool:
        return False

    def has_tokens_left(self, budget: int, wanted: int) -> bool:
        return True


class DeferBehindMask(PythonScheduler):
    """Waits for a page that needs a token which a grammar mask holds back."""

    def can_fill(self, row: PythonRow, index: int) -> bool:
        return (index + 1) * self.shape.page_size <= row.num_tokens


class DeferBehindAnyone(PythonScheduler):
    """Waits for a page that a row of lower priority computes."""

    def ahead(self, other: PythonRow, row: PythonRow) -> bool:
        return True


class HastyVictim(PythonScheduler):
    """Retracts although released pages are on their way."""

    def waits_for_release(self) -> bool:
        return False


class WindowIsPressure(PythonScheduler):
    """Takes a short look-ahead window of the free order for the whole pool."""

    window = 2

    def _take_pages(self, order: Iterable[PythonRow], wanted: Mapping[int, int]) -> None:
        ring = self.pool.ring
        self.pool.ring, hidden = ring[: self.window], ring[self.window :]
        super()._take_pages(order, wanted)
        self.pool.ring += hidden
