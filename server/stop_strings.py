"""Finds stop strings in an answer that arrives in pieces.

Owns the search and what must be held back for it. Does not own what happens after a match (the
caller aborts the request). The result depends on the text alone, never on how it was cut: the stop
string that *completes* first wins, and among those that complete together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that is safe to send, and the stop string that ended the answer, if one did."""

    text: str
    matched: str | None


class StopMatcher:
    """Searches all stop strings of one answer at once, one character at a time.

    Holds back exactly the longest end of the text that is the beginning of a stop string.

    Args:
        stops: non-empty stop strings.
        include_stop: whether a matched stop string is part of the answer.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._include_stop = include_stop
        # For each stop string, how many of its characters the text ends with.
        self._states = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Takes the next piece; after a match nothing more may be pushed."""
        if not self._stops:
            return StopResult(text, None)
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = self._step(character)
            if matched is not None:
                self._held = ""
                cut = end if self._include_stop else end - len(matched)
                return StopResult(buffer[:cut], matched)
        cut = len(buffer) - max(self._states)
        self._held = buffer[cut:]
        return StopResult(buffer[:cut], None)

    def skip(self, text: str) -> str:
        """Takes a piece in which no stop string may begin or end; returns what is safe to send."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held + text

    def flush(self) -> str:
        """What is still held back, once the answer has ended without a match."""
        return self.skip("")

    def _step(self, character: str) -> str | None:
        longest: str | None = None
        for index, (stop, table) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = table[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                # The search ends here unless a longer one completes at the same character.
                if longest is None or len(stop) > len(longest):
                    longest = stop
                state = table[state - 1]
            self._states[index] = state
        return longest


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that also ends it.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977).
    """
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
