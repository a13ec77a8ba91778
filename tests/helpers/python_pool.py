"""Page pool and prefix index of the oracle, in plain Python.

Owns who refers to a page, the order in which free pages are reused, and the index of published
pages. Does not own rows: the scheduler passes pages in and writes its block tables itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Matcher = Callable[[int, tuple[int, ...], int], bool]


@dataclass
class PublishEntry:
    """One page completed in a step; the fields after `parent_page` are filled by `publish`."""

    place: int
    row: int
    index: int
    page: int
    key: int
    tokens: tuple[int, ...]
    root_uid: int
    parent_page: int | None
    parent_uid: int = 0
    uid: int = 0
    canonical: int = 0
    leader: int = -1
    way: int = -1
    is_existing: bool = False
    local_ok: bool = False
    chain_ok: bool = False


class PythonPool:
    """Pages 1..num_pages-1 with their references, free order and index entries."""

    def __init__(
        self, num_pages: int, num_buckets: int, num_ways: int, key_bits: int, uids_per_step: int
    ) -> None:
        self.num_buckets = num_buckets
        self.num_ways = num_ways
        self.key_bits = key_bits
        self.uids_per_step = uids_per_step
        self.ref = [1] + [0] * (num_pages - 1)
        self.uid = [0] * num_pages
        self.parent_uid = [0] * num_pages
        self.index_slot = [-1] * num_pages
        self.page_tokens: list[tuple[int, ...]] = [()] * num_pages
        self.ring = list(range(1, num_pages))
        self.index: dict[int, tuple[int, int]] = {}  # place in the index -> (key, page)
        self.uid_next = 1
        self.evicted: list[int] = []  # uids of published pages in the order they were reused

    @property
    def num_free(self) -> int:
        """Pages nobody refers to."""
        return len(self.ring)

    def find(self, key: int) -> int:
        """Returns the page published under the key, 0 if there is none."""
        first = (key & (self.num_buckets - 1)) * self.num_ways
        for slot in range(first, first + self.num_ways):
            if slot in self.index and self.index[slot][0] == key:
                return self.index[slot][1]
        return 0

    def hold(self, page: int) -> None:
        """Adds a reference; a cached free page leaves the free order."""
        if self.ref[page] == 0:
            self.ring.remove(page)
        self.ref[page] += 1

    def take(self) -> int:
        """Takes the next free page; what it cached is forgotten."""
        page = self.ring.pop(0)
        self.ref[page] = 1
        if self.index_slot[page] >= 0:
            del self.index[self.index_slot[page]]
            self.evicted.append(self.uid[page])
        self.uid[page], self.parent_uid[page], self.index_slot[page] = 0, 0, -1
        return page

    def release(self, order: Sequence[int], touched: Sequence[int]) -> None:
        """Drops one reference for each entry of `touched`; freed pages enter in `order`."""
        for page in touched:
            self.ref[page] -= 1
        for page in order:
            if self.ref[page] == 0:
                if self.uid[page] > 0:
                    self.ring.append(page)
                else:
                    self.ring.insert(0, page)

    def publish(self, entries: Sequence[PublishEntry], matches: Matcher) -> None:
        """Publishes the pages completed in a step, or swaps them for an equal published one.

        Fills `canonical` and `chain_ok` of each entry; `matches` compares tokens and parent.
        """
        self._find_leaders(entries)
        self._set_uids(entries)
        self._check_locally(entries, matches)
        all_ok = all(entry.local_ok for entry in entries)
        ok = True
        for before, entry in zip([None, *entries], entries, strict=False):
            if before is None or before.row != entry.row:
                ok = True
            is_follower = not entry.is_existing and entry.leader != entry.place
            # One bad entry may have taken down any leader, so all followers stay private: rare.
            ok = ok and entry.local_ok and (all_ok or not is_follower)
            entry.chain_ok = ok
        for entry in entries:
            if entry.chain_ok and entry.leader == entry.place:
                self._insert(entry)
        for entry in entries:
            if entry.chain_ok and entry.canonical != entry.page:
                self.swap(entry)
        self.uid_next += self.uids_per_step

    def swap(self, entry: PublishEntry) -> None:
        """Moves the row's reference to the canonical page; its own copy is reused first."""
        self.hold(entry.canonical)
        self.ref[entry.page] = 0
        self.ring.insert(0, entry.page)

    def parent_of(self, page: int) -> int:
        """Returns the publication number that children of the page name as their parent."""
        return self.uid[page]

    def _find_leaders(self, entries: Sequence[PublishEntry]) -> None:
        first_of_key: dict[int, PublishEntry] = {}
        for entry in entries:
            entry.canonical = self.find(entry.key)
            entry.is_existing = entry.canonical != 0
            if not entry.is_existing:
                leader = first_of_key.setdefault(entry.key, entry)
                entry.leader = leader.place
                entry.canonical = leader.page

    def _set_uids(self, entries: Sequence[PublishEntry]) -> None:
        for place, entry in enumerate(entries):
            if entry.is_existing:
                entry.uid = self.uid[entry.canonical]
            else:
                entry.uid = self.uid_next + entry.leader
            if place > 0 and entries[place - 1].row == entry.row:
                entry.parent_uid = entries[place - 1].uid
            elif entry.parent_page is None:
                entry.parent_uid = entry.root_uid
            else:
                entry.parent_uid = self.parent_of(entry.parent_page)

    def _check_locally(self, entries: Sequence[PublishEntry], matches: Matcher) -> None:
        leaders_in_bucket: dict[int, int] = {}
        for entry in entries:
            if entry.is_existing:
                entry.local_ok = matches(entry.canonical, entry.tokens, entry.parent_uid)
            elif entry.leader == entry.place:
                bucket = entry.key & (self.num_buckets - 1)
                rank = leaders_in_bucket.get(bucket, 0)
                leaders_in_bucket[bucket] = rank + 1
                first = bucket * self.num_ways
                ways = [w for w in range(self.num_ways) if first + w not in self.index]
                entry.local_ok = rank < len(ways)
                if entry.local_ok:
                    entry.way = ways[rank]
            else:
                leader = entries[entry.leader]
                entry.local_ok = (
                    entry.tokens == leader.tokens and entry.parent_uid == leader.parent_uid
                )

    def _insert(self, entry: PublishEntry) -> None:
        slot = (entry.key & (self.num_buckets - 1)) * self.num_ways + entry.way
        self.index[slot] = (entry.key, entry.page)
        self.index_slot[entry.page] = slot
        self.uid[entry.page] = self.uid_next + entry.place
        self.parent_uid[entry.page] = entry.parent_uid
        self.page_tokens[entry.page] = entry.tokens
