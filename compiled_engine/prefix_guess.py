"""What the host expects the prefix cache to spare, so that it can pick a step of the right size.

The device decides what is cached and who waits for whom; the host only guesses, from the prompts
it has handed over: blocks it has seen before cost nothing, and a prompt whose last known block is
still being computed by another one waits for it. A wrong guess costs time, never tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 18


class _Waiting(NamedTuple):
    """A prompt whose first token has not come."""

    num_new: int
    leader: int | None  # row that computes the last block it shares


class PrefixGuess:
    """Prompts by row, from the step that hands them over until their first token.

    Args:
        is_caching: the device reuses prefixes; if not, every token is new.
    """

    def __init__(self, *, is_caching: bool) -> None:
        self._is_caching = is_caching
        self._owners: OrderedDict[bytes, int] = OrderedDict()  # block -> row that brought it
        self._waiting: dict[int, _Waiting] = {}

    def add(self, row: int, prompt: list[int], salt: int) -> None:
        """A prompt was handed to the device in `row`."""
        if not self._is_caching:
            self._waiting[row] = _Waiting(len(prompt), None)
            return
        leader, num_known, is_prefix = None, 0, True
        for key in _chain(prompt, salt):
            owner = self._owners.get(key)
            is_prefix = is_prefix and owner is not None
            if is_prefix:
                leader = owner
                num_known += BLOCK_TOKENS
                self._owners.move_to_end(key)
            else:
                self._owners[key] = row
        while len(self._owners) > MAX_BLOCKS:
            self._owners.popitem(last=False)
        # The last token is always computed.
        num_new = len(prompt) - min(num_known, len(prompt) - 1)
        self._waiting[row] = _Waiting(num_new, leader)

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


def _chain(prompt: list[int], salt: int) -> list[bytes]:
    """A key for each full block, of its tokens and all before it."""
    tokens = np.asarray(prompt, np.int32)
    digest = hashlib.blake2b(salt.to_bytes(8, "little"), digest_size=8)
    keys = []
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(tokens[start : start + BLOCK_TOKENS].tobytes())
        keys.append(digest.copy().digest())
    return keys
