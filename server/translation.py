"""What the APIs that are translated to chat share: names of fields in errors, named stream events.

Owns no API: their shapes are in `messages_protocol` and `responses_protocol`, and the answers come
from the chat path.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, NoReturn

import msgspec
from aiohttp import web

from compiled_engine.errors import EngineError, InvalidRequestError
from compiled_engine.server.shortcut import Shortcut
from compiled_engine.server.sse import StreamForm, stream_response

_ENCODER = msgspec.json.Encoder()
_INDEX = re.compile(r"\[\d+\]")


def refuse(field: str, reason: str = "is not supported by this server; leave it out") -> NoReturn:
    """Raises the refusal of a field.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError(f"{field} {reason}", param=field)


def refuse_unless_neutral(request: msgspec.Struct, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Checks fields that cannot be honoured.

    Args:
        request: as parsed.
        fields: name -> values that mean the same as leaving it out, besides null, false, 0 and
            empty ones.

    Raises:
        InvalidRequestError: one has another value.
    """
    for name, further in fields.items():
        value = getattr(request, name)
        if value and value not in further:
            refuse(name)


@contextlib.contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals in the block name the client's fields, not the ones they were translated to.

    Args:
        names: beginning of the chat path's field, list indices written `[]` -> the client's.
    """
    try:
        yield
    except InvalidRequestError as error:
        old = error.param or ""
        new = _renamed(old, names)
        if new == old:
            raise
        message = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", lambda _: new, error.message)
        raise InvalidRequestError(message, param=new, code=error.code) from error


def _renamed(param: str, names: Mapping[str, str]) -> str:
    indices = iter(_INDEX.findall(param))
    plain = _INDEX.sub("[]", param)
    for old, new in names.items():
        rest = plain.removeprefix(old)
        if rest != plain and rest[:1] in ("", ".", "["):
            return re.sub(r"\[\]", lambda _: next(indices), new + rest)
    return param


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[msgspec.Struct, None],
    failure: Callable[[EngineError], msgspec.Struct],
    shortcut: Shortcut | None = None,
) -> web.StreamResponse:
    """Sends tagged records as events named by their tags; otherwise as `stream_response`.

    Args:
        request: the call.
        events: records with a tag.
        failure: the last event of a stream that failed.
        shortcut: made with `encode_named_event`.
    """
    form = StreamForm(encode_named_event, failure)
    return await stream_response(request, events, form, shortcut=shortcut)


def encode_named_event(event: msgspec.Struct) -> bytes:
    """A record as a server-sent event that is named by the record's tag."""
    name = str(event.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _ENCODER.encode(event) + b"\n\n"
