"""Who is calling, and which calls run: what the log, the limits and `/abort_request` go by.

Owns the names of calls; what a call does is in `generation`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aiohttp import web

from compiled_engine.server.tracing import CallTrace


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One HTTP call, as the middleware saw it come in.

    Attributes:
        request_id: the call's `X-Request-ID`, the client's own or a fresh one.
        key_name: name of the API key it came with; "" for the operator's, or where none is asked.
        route: method and path, cut to a length that fits a log line.
        started_s: `time.perf_counter()` when its head had been read.
        is_logged: it leaves lines in the access log.
        trace: its record; None where calls are not traced.
    """

    request_id: str
    key_name: str
    route: str
    started_s: float
    is_logged: bool = True
    trace: CallTrace | None = None


CALLER = web.RequestKey("caller", Caller)


class RunningCalls:
    """The sequences that the engine works on, by the id of the call they belong to."""

    def __init__(self) -> None:
        self._sequences: dict[str, set[int]] = {}

    @contextlib.contextmanager
    def listed(self, caller: Caller, sequences: Iterable[int]) -> Iterator[None]:
        """Lists engine request ids under the call's id while the block runs.

        Two calls may carry one id: clients choose it.
        """
        own = set(sequences)
        self._sequences.setdefault(caller.request_id, set()).update(own)
        try:
            yield
        finally:
            left = self._sequences[caller.request_id]
            left -= own
            if not left:
                del self._sequences[caller.request_id]

    def of(self, request_id: str) -> list[int]:
        """Engine request ids of the running calls with this id, ascending; none is fine."""
        return sorted(self._sequences.get(request_id, ()))

    def all(self) -> list[int]:
        """Engine request ids of every running call, ascending."""
        return sorted(number for own in self._sequences.values() for number in own)
