"""Answers: JSON in one piece, a stream of server-sent events, and errors in OpenAI's shape.

Owns encoding and writing. A reader that is slow holds at most the socket's buffer here, and one
that takes nothing for `WRITE_TIMEOUT_S` is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from compiled_engine.errors import EngineError, OverloadedError
from compiled_engine.server.protocol import ErrorDetail, ErrorResponse
from compiled_engine.server.shortcut import Shortcut

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 120.0
_ENCODER = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies of the nginx family would otherwise collect the stream.
    "X-Accel-Buffering": "no",
}


def json_response(
    value: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """An answer with `value` as its JSON body."""
    return web.Response(
        body=_ENCODER.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_body(error: EngineError) -> ErrorResponse:
    """OpenAI's error object."""
    return ErrorResponse(ErrorDetail(error.message, error.error_type, error.param, error.code))


def error_response(error: EngineError) -> web.Response:
    """The HTTP answer an error becomes; 429 and 503 say when to come back."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_s)
    elif error.status == 503:
        headers["Retry-After"] = "1"
    elif error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status=error.status, headers=headers)


def encode_event(value: Any) -> bytes:
    """A record as a server-sent event without a name."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


class StreamForm(NamedTuple):
    """How a stream is spelled.

    Attributes:
        encode: one record as bytes.
        failure: the record that tells of an error inside the stream.
        closing: bytes behind the last record.
    """

    encode: Callable[[Any], bytes]
    failure: Callable[[EngineError], Any]
    closing: bytes = b""


async def stream_response(
    request: web.Request,
    chunks: AsyncGenerator[Any, None],
    form: StreamForm | None = None,
    *,
    shortcut: Shortcut | None = None,
) -> web.StreamResponse:
    """Sends chunks as they come; without a `form` as OpenAI does, with `[DONE]` at the end.

    A `shortcut` is open from the first chunk to the last one.

    The answer starts with the first chunk, so an error before it still has its HTTP status. A later
    error becomes an event with the error object.

    Raises:
        EngineError: before the first chunk.
        ConnectionResetError: the client is gone, or takes nothing.
    """
    encode, failure, closing = form or StreamForm(encode_event, error_body, _DONE)
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    if request.version >= HttpVersion11:
        response.enable_chunked_encoding()
    async with contextlib.aclosing(chunks):
        first = await anext(chunks, None)
        await response.prepare(request)
        try:
            if first is not None:
                await _write(response, encode(first), request.transport)
            if shortcut is not None:
                shortcut.open(request.transport, is_chunked=response.chunked)
            async for chunk in chunks:
                await _write(response, encode(chunk), request.transport)
        except ConnectionResetError:
            raise
        except EngineError as error:
            await _write(response, encode(failure(error)))
        except Exception:
            logger.exception("an answer failed inside its stream")
            await _write(response, encode(failure(EngineError("internal error"))))
        finally:
            if shortcut is not None:
                shortcut.close()
    if closing:
        await _write(response, closing)
    await response.write_eof()
    return response


async def _write(
    response: web.StreamResponse, data: bytes, transport: asyncio.WriteTransport | None = None
) -> None:
    if transport is not None:
        num_buffered = transport.get_write_buffer_size() + len(data)
        if num_buffered <= transport.get_write_buffer_limits()[0]:
            # There is room, so this does not wait and needs no clock.
            await response.write(data)
            return
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from error
