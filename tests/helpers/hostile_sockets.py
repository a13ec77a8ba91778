"""Attacks below HTTP: half requests, half-closed and idle sockets, slow readers, noise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

LINGER_S = 1.5
_LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
NOISE: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"\x00" * 4000,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"b" * 200_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost\r\n: b\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"FFFFFFFFFFFFFFFFF\r\n{",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: frob\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nExpect: frob\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET //a:b@[c/ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 200,
    b"\r\n" * 2000,
)


class Target:
    """The server, and what attackers counted of its answers.

    Attributes:
        statuses: answers by kind and status; 0 for none.
        faults: answers and events that must not be.
    """

    def __init__(self, port: int, key: str, rng: random.Random) -> None:
        self.port, self.key, self.rng = port, key, rng
        self.statuses: dict[str, dict[int, int]] = {}
        self.faults: list[str] = []

    def count(self, kind: str, status: int) -> None:
        """Notes an answer."""
        of_kind = self.statuses.setdefault(kind, {})
        of_kind[status] = of_kind.get(status, 0) + 1

    @contextlib.asynccontextmanager
    async def connection(
        self, receive_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection that is reset at the end, without a farewell."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 14)
        except BaseException:
            sock.close()
            raise
        try:
            yield reader, writer
        finally:
            with contextlib.suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await asyncio.sleep(0)

    def head(self, length: int, route: str = "/v1/completions") -> bytes:
        """Head of a POST with the key."""
        return (
            f"POST {route} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def request(self) -> bytes:
        """A whole request for a long stream."""
        body = json.dumps(_LONG).encode()
        return self.head(len(body)) + body

    async def note_answer(self, kind: str, reader: asyncio.StreamReader, sent: bytes) -> None:
        """Reads a status line if one comes soon; a 5xx is a fault."""
        line = b""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            line = await asyncio.wait_for(reader.readline(), LINGER_S)
        words = line.split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        self.count(kind, status)
        if status >= 500:
            rest = b""
            with contextlib.suppress(OSError, TimeoutError):
                rest = await asyncio.wait_for(reader.read(2000), LINGER_S)
            self.faults.append(f"{kind}: {sent[:300]!r} -> {line!r} {rest[-600:]!r}")


async def noise(target: Target) -> None:
    """Bytes that are no HTTP, or HTTP that contradicts itself."""
    data = target.rng.choice((*NOISE, target.rng.randbytes(300)))
    if target.rng.random() < 0.5:
        key = f"Host: a\r\nAuthorization: Bearer {target.key}\r\n"
        data = data.replace(b"Host: a\r\n", key.encode())
    async with target.connection() as (reader, writer):
        writer.write(data)
        await target.note_answer("noise", reader, data)


async def slow_request(target: Target) -> None:
    """Head or body trickle in, then nothing comes, then the client is gone."""
    data = target.request()
    if target.rng.random() < 0.5:
        data = target.head(5000) + b"{"
    data = data[: target.rng.randrange(1, len(data))]
    async with target.connection() as (reader, writer):
        for start in range(0, len(data), 16):
            writer.write(data[start : start + 16])
            await asyncio.sleep(0.05)
        await target.note_answer("slow request", reader, data)


async def half_closed(target: Target) -> None:
    """The client ends its side after a whole or half a request, and waits for the answer."""
    data = target.request()
    if target.rng.random() < 0.4:
        data = data[: target.rng.randrange(1, len(data))]
    async with target.connection() as (reader, writer):
        writer.write(data)
        writer.write_eof()
        await target.note_answer("half-closed", reader, data)
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(reader.read(), LINGER_S)


async def slow_reader(target: Target) -> None:
    """A stream nobody reads, through the smallest buffer."""
    data = target.request()
    async with target.connection(receive_bytes=1024) as (reader, writer):
        writer.write(data)
        await target.note_answer("slow reader", reader, data)
        await asyncio.sleep(target.rng.random() * 8)


async def reset(target: Target) -> None:
    """A whole request, or several at once, and away."""
    data = target.request() * target.rng.choice((1, 1, 5))
    async with target.connection() as (_, writer):
        writer.write(data)
        await asyncio.sleep(target.rng.choice((0, 0.001, 0.02, 0.2)))
        target.count("reset", 0)


async def crowd(target: Target, num_connections: int, ended: asyncio.Event) -> None:
    """Many connections that never say anything."""
    async with contextlib.AsyncExitStack() as stack:
        for index in range(num_connections):
            try:
                await stack.enter_async_context(target.connection())
            except OSError as error:
                target.faults.append(f"idle connection {index}: {error}")
                break
            target.count("idle connection", 0)
            if index % 50 == 49:
                await asyncio.sleep(0.05)
        await ended.wait()


SOCKET_ATTACKS: tuple[Callable[[Target], Awaitable[None]], ...] = (
    noise,
    slow_request,
    half_closed,
    slow_reader,
    reset,
)
