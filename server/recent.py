"""The sequences of the last while: those that run, and a bounded number of those that ended.

Owns which are kept; what one cost is in `request_stats`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from compiled_engine.server.console_protocol import RequestRow
from compiled_engine.server.engine_client import TokenStream
from compiled_engine.server.keys import OPERATOR
from compiled_engine.server.request_stats import SequenceStats

MAX_ENDED = 200
# Of each, running and ended, in one answer.
MAX_SHOWN = 50


class RecentRequests:
    """Running sequences by their engine request id, and rows of the newest ended ones."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[SequenceStats, TokenStream]] = {}
        self._ended: deque[RequestRow] = deque(maxlen=MAX_ENDED)

    def start(self, request_id: int, stats: SequenceStats, stream: TokenStream) -> None:
        """Notes a sequence that was submitted."""
        self._running[request_id] = (stats, stream)

    def end(self, request_id: int) -> None:
        """Notes that a sequence ended, after its stats did; further calls do nothing."""
        running = self._running.pop(request_id, None)
        if running is not None:
            stats, stream = running
            self._ended.append(stats.row(stream.queue_s))

    def num_running(self, key_name: str) -> int:
        """Running sequences that this key may see."""
        if key_name == OPERATOR:
            return len(self._running)
        return sum(1 for _ in self._visible(key_name))

    def rows(self, key_name: str) -> list[RequestRow]:
        """At most `MAX_SHOWN` running ones, then as many ended ones, each newest first.

        Args:
            key_name: the operator sees all, every other key its own.
        """
        running = islice(self._visible(key_name), MAX_SHOWN)
        rows = [stats.row(stream.queue_s) for stats, stream in running]
        ended = (row for row in reversed(self._ended) if key_name in (OPERATOR, row.key))
        return rows + list(islice(ended, MAX_SHOWN))

    def _visible(self, key_name: str) -> Iterator[tuple[SequenceStats, TokenStream]]:
        for entry in reversed(self._running.values()):
            if key_name in (OPERATOR, entry[0].key_name):
                yield entry
