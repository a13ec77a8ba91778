"""A client that only notes when the chunks of many streams arrive: the cheapest that can be.

One that parses what it reads would measure itself. Times are `time.monotonic()`, which processes of
one machine share.
"""

from __future__ import annotations

import json
import select
import socket
import time

# First token of the prompt -> times at which the chunks that hold a token were complete, seconds.
Receipts = dict[int, list[float]]

FIRST_TOKEN_ID = 1000
READ_BYTES = 64 * 1024


class _Stream:
    """One request; keeps what came and when."""

    def __init__(self, port: int, request: bytes) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(request)

    def take(self, at: float) -> bool:
        """Reads what was there at that time; False at the end, since the request asked to close."""
        data = self.socket.recv(READ_BYTES)
        self.parts.append((at, data))
        return bool(data)

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


def read_streams(port: int, num_streams: int, input_len: int, output_len: int) -> Receipts:
    """Asks for that many answers at once and reads them to their end.

    Args:
        port: of a server on this machine.
        num_streams: each prompt begins with another token.
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
    """
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
        streams[first] = _Stream(port, head.encode() + body)
    _read_all(list(streams.values()))
    return {first: stream.times() for first, stream in streams.items()}


def _read_all(streams: list[_Stream]) -> None:
    reading = {stream.socket.fileno(): stream for stream in streams}
    with select.epoll() as poll:
        for number in reading:
            poll.register(number, select.EPOLLIN)
        while reading:
            ready, at = poll.poll(), time.monotonic()
            for number, _ in ready:
                if not reading[number].take(at):
                    poll.unregister(number)
                    reading.pop(number).socket.close()
