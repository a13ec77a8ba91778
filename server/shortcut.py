"""The short way of an answer's pieces to its client: in the turn in which their tokens come.

The long way is the route's generator of records, which a task reads and sends (`sse`). It takes
what comes first and last, errors, answers with several sequences, and readers that are slow. While
that task has sent all there was and waits for tokens, this one sends the same bytes without waking
it, which costs a third.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from compiled_engine.server.choice import Piece

# With more than this in a socket's buffer its reader is slow: tokens are gathered meanwhile.
MAX_BUFFERED_BYTES = 64 * 1024
_ENCODER = msgspec.json.Encoder()


class Shortcut:
    """Sends pieces of one streamed answer while it is open.

    Args:
        encode: the bytes that the long way would send for a piece, of all its records; may be none.
    """

    def __init__(self, encode: Callable[[Piece], bytes]) -> None:
        self._encode = encode
        self._transport: asyncio.WriteTransport | None = None
        self._is_chunked = False

    def open(self, transport: asyncio.WriteTransport | None, *, is_chunked: bool) -> None:
        """From now on pieces may be sent: the answer's head and first record have been.

        Args:
            transport: the connection; None if it is gone.
            is_chunked: HTTP frames each part of the body.
        """
        self._transport = transport
        self._is_chunked = is_chunked

    def close(self) -> None:
        """No piece is sent any more."""
        self._transport = None

    @property
    def is_open(self) -> bool:
        """Whether a piece may be sent now, to a reader that is there and keeps up."""
        transport = self._transport
        return (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() <= MAX_BUFFERED_BYTES
        )

    def send(self, piece: Piece) -> None:
        """Sends one piece; never waits. The shortcut must be open."""
        assert self._transport is not None
        data = self._encode(piece)
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


class TextTemplate:
    """An encoded record that stands for all that differ from it in one text.

    Args:
        record: as bytes, the text empty.
        field: name of the text; no other empty text in the record may have it.
    """

    def __init__(self, record: bytes, field: str) -> None:
        # Inside a JSON string the quotes would be escaped.
        mark = f'"{field}":""'.encode()
        head, found, tail = record.partition(mark)
        assert found, (record, field)
        assert mark not in tail, (record, field)
        self._head = head + mark[:-2]
        self._tail = tail

    def fill(self, text: str) -> bytes:
        """The record with this text."""
        return self._head + _ENCODER.encode(text) + self._tail
