"""Answers of `/v1/responses` that can be fetched and continued, in memory and bounded.

Owns which are kept. They are gone after a restart; a caller sees only those of its own API key.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from aiohttp import web

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """One answer.

    Attributes:
        body: JSON of the response.
        history: JSON of all chat messages up to and with the answer, without instructions.
        items: JSON of the request's own input, see `responses_items`.
        is_background: it was made in the background.
        events: of its stream, where they can be sent again.
    """

    body: bytes
    history: bytes
    items: bytes = b""
    is_background: bool = False
    events: tuple[bytes, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes it counts for."""
        parts = (self.body, self.history, self.items, *(self.events or ()))
        return sum(map(len, parts))


class ResponseStore:
    """The newest answers; the one unused for longest goes first.

    Args:
        max_responses: kept at most.
        max_bytes: of JSON kept at most; a larger answer is not kept.

    Attributes:
        num_bytes: of JSON kept now.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps an answer and drops others where there is no room.

        Args:
            owner: name of the API key.
            response_id: a new one.
            stored: the answer.
        """
        if stored.num_bytes > self._max_bytes:
            return
        self._entries[owner, response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """An answer of this owner, now the last to be dropped; None if it is not kept."""
        stored = self._entries.get((owner, response_id))
        if stored is not None:
            self._entries.move_to_end((owner, response_id))
        return stored

    def delete(self, owner: str, response_id: str) -> bool:
        """Drops an answer; returns whether it was kept."""
        stored = self._entries.pop((owner, response_id), None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        return True


RESPONSES = web.AppKey("responses", ResponseStore)
