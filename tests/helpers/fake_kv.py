"""A KV cache that remembers, for each slot, the whole text that produced it.

Owns one number a slot: the hash of (salt, tokens 0..position). A step writes its tokens through
the slot mapping, then the full context of every scheduled row is read through its block table and
must be exactly the row's own prefix. Wrong hits, lost or overwritten pages, stale tables and
off-by-one errors all end in a mismatch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduledRow:
    """What a step computes for one row: tokens[start : start + give] through these pages."""

    row: int
    salt: int
    tokens: Sequence[int]
    start: int
    give: int
    pages: Sequence[int]


class FakeKv:
    """Slots of `num_pages` pages; page 0 must never be written or read."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = [0] * (num_pages * page_size)
        self.num_written = 0

    def slot(self, pages: Sequence[int], position: int) -> int:
        """Returns the slot of a position by the block table."""
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def step(self, scheduled: Sequence[ScheduledRow], slot_mapping: Sequence[int]) -> None:
        """Writes one step, then checks the context of every scheduled row.

        Args:
            scheduled: rows in the order of the step's flattened tokens.
            slot_mapping: slot of every token of the step, in the same order, padding cut off.

        Raises:
            AssertionError: a slot is wrong, written twice, or holds another prefix.
        """
        assert len(slot_mapping) == sum(item.give for item in scheduled), "tokens and slots differ"
        assert len(set(slot_mapping)) == len(slot_mapping), f"slot written twice: {slot_mapping}"
        prefixes = [prefix_hashes(item) for item in scheduled]
        place = 0
        for item, hashes in zip(scheduled, prefixes, strict=True):
            for position in range(item.start, item.start + item.give):
                slot = slot_mapping[place]
                assert slot == self.slot(item.pages, position), f"row {item.row} at {position}"
                assert slot >= self.page_size, f"row {item.row} writes the null page"
                self.slots[slot] = hashes[position]
                place += 1
        self.num_written += place
        for item, hashes in zip(scheduled, prefixes, strict=True):
            for position in range(item.start + item.give):
                found = self.slots[self.slot(item.pages, position)]
                assert found == hashes[position], (
                    f"row {item.row} reads foreign KV at position {position} "
                    f"(page {item.pages[position // self.page_size]})"
                )


def prefix_hashes(item: ScheduledRow) -> list[int]:
    """Returns the hash of the prefix that ends at each position the step needs."""
    hashes: list[int] = []
    value = hash((item.salt, -7))
    for token in item.tokens[: item.start + item.give]:
        value = hash((value, token))
        hashes.append(value)
    return hashes
