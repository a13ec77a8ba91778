"""A client that only notes when the chunks of many streams arrive: the cheapest that can be.

One that parses what it reads would measure itself. Times are `time.monotonic()`, which processes of
one machine share.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import cast

# First token of the prompt -> times at which the chunks that hold a token were complete, seconds.
Receipts = dict[int, list[float]]

FIRST_TOKEN_ID = 1000


class _Stream(asyncio.Protocol):
    """One request; keeps what came and when."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.parts: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        # uvloop's transports are no subclasses of asyncio's.
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Notes one arrival."""
        self.parts.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is complete, since the request asked to close."""
        if not self.closed.done():
            self.closed.set_result(None)

    def times(self) -> list[float]:
        """Times of chunks that are no `[DONE]`."""
        whole = b"".join(data for _, data in self.parts)
        if not whole.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {whole[:400]!r}")
        found: list[float] = []
        end, place = 0, 0
        for time_s, data in self.parts:
            end += len(data)
            while (at := whole.find(b"\n\n", place, end)) >= 0:
                found.append(time_s)
                place = at + 2
        if not whole.rstrip().endswith(b"0") or b"data: [DONE]\n\n" not in whole:
            raise SystemExit(f"a stream broke off: {whole[-200:]!r}")
        return found[:-1]


async def read_streams(port: int, num_streams: int, input_len: int, output_len: int) -> Receipts:
    """Asks for that many answers at once and reads them to their end.

    Args:
        port: of a server on this machine.
        num_streams: each prompt begins with another token.
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
    """
    loop = asyncio.get_running_loop()
    streams: dict[int, _Stream] = {}
    for number in range(num_streams):
        first = FIRST_TOKEN_ID + number
        prompt = [first] * input_len
        fields = {"prompt": prompt, "max_tokens": output_len, "stream": True, "ignore_eos": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        streams[first] = _Stream(head.encode() + body)
    for stream in streams.values():
        await loop.create_connection(lambda s=stream: s, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(stream.closed for stream in streams.values()))
    return {first: stream.times() for first, stream in streams.items()}
