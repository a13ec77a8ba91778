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
from aiohttp import web

from compiled_engine.errors import EngineError, OverloadedError
from compiled_engine.server.protocol import ErrorDetail, ErrorResponse

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


def _event(value: Any) -> bytes:
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
) -> web.StreamResponse:
    """Sends chunks as they come; without a `form` as OpenAI does, with `[DONE]` at the end.

    The answer starts with the first chunk, so an error before it still has its HTTP status. A later
    error becomes an event with the error object.

    Raises:
        EngineError: before the first chunk.
        ConnectionResetError: the client is gone, or takes nothing.
    """
    encode, failure, closing = form or StreamForm(_event, error_body, _DONE)
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    async with contextlib.aclosing(chunks):
        first = await anext(chunks, None)
        await response.prepare(request)
        try:
            if first is not None:
                await _write(response, encode(first))
            async for chunk in chunks:
                await _write(response, encode(chunk))
        except ConnectionResetError:
            raise
        except EngineError as error:
            await _write(response, encode(failure(error)))
        except Exception:
            logger.exception("an answer failed inside its stream")
            await _write(response, encode(failure(EngineError("internal error"))))
    if closing:
        await _write(response, closing)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from error
