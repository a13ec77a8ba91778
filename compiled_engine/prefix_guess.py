"""What the host expects the prefix cache to spare, so that it can pick a step of the right size.

The device decides what is cached and who waits for whom; the host only guesses, from the prompts
it has handed over: pages it has seen before cost nothing, and a prompt whose last known page is
still being computed by another one waits for it. A wrong guess costs time, never tokens.

Prompts are looked up by blocks of many pages; how far the prompt reaches that brought the last
known block is then compared token by token.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 18


class _Waiting(NamedTuple):
    """A prompt whose first token has not come."""

    num_new: int
    leader: int | None  # row that computes the last page it shares


class _Owner(NamedTuple):
    """Who brought a block first: its row then, and its whole prompt."""

    row: int
    prompt: np.ndarray


class PrefixGuess:
    """Prompts by row, from the step that hands them over until their first token.

    Args:
        is_caching: the device reuses prefixes; if not, every token is new.
        page_size: tokens that the device caches as one.
    """

    def __init__(self, *, is_caching: bool, page_size: int) -> None:
        self._is_caching = is_caching
        self._page_size = page_size
        self._owners: OrderedDict[int, _Owner] = OrderedDict()  # by a hash of block and prefix
        self._waiting: dict[int, _Waiting] = {}

    def add(self, row: int, prompt: list[int], salt: int, most_known: int = sys.maxsize) -> None:
        """A prompt was handed to the device in `row`; it reuses at most `most_known` tokens."""
        if not self._is_caching:
            self._waiting[row] = _Waiting(len(prompt), None)
            return
        tokens = np.asarray(prompt, np.int32)
        leader, num_known = self._find(tokens, salt, row)
        if most_known < num_known:
            leader, num_known = None, most_known
        num_pages = min(num_known, len(prompt) - 1) // self._page_size  # the last token is computed
        num_new = len(prompt) - num_pages * self._page_size
        self._waiting[row] = _Waiting(num_new, leader.row if leader else None)

    def _find(self, tokens: np.ndarray, salt: int, row: int) -> tuple[_Owner | None, int]:
        """The owner of the longest known prefix, and its length; unknown blocks become `row`'s."""
        owner, mine, key = None, _Owner(row, tokens), hash(salt)
        data, width = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize
        for start in range(0, len(data) - width + 1, width):
            key = hash((key, data[start : start + width]))
            found = self._owners.setdefault(key, mine)
            if found is not mine:
                owner = found
                self._owners.move_to_end(key)
        while len(self._owners) > MAX_BLOCKS:
            self._owners.popitem(last=False)
        if owner is None:
            return None, 0
        length = min(len(tokens), len(owner.prompt))
        differs = np.flatnonzero(tokens[:length] != owner.prompt[:length])
        return owner, int(differs[0]) if len(differs) else length

    def leave(self, row: int) -> None:
        """The row got its first token, or ended without one; rows that are not there are fine."""
        self._waiting.pop(row, None)

    def num_needed(self) -> int:
        """Tokens that the waiting prompts could compute now."""
        return sum(
            entry.num_new
            for row, entry in self._waiting.items()
            if entry.leader is None or entry.leader == row or entry.leader not in self._waiting
        )

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._owners.clear()
