"""One call written as a JSON object, on its way from a machine's buffer to events.

Owns when such a call starts: once its name is known and accepted. Until then its text is kept, so
that it can be handed back as ordinary text if it turns out to be no call.
"""

from __future__ import annotations

from enum import Enum, auto

from compiled_engine.server.parsers.json_stream import CallObject
from compiled_engine.server.parsers.machine import ToolParser


class Step(Enum):
    """How far an object is."""

    WAITING = auto()
    ENDED = auto()
    BROKEN = auto()
    NO_CALL = auto()


class ObjectCall:
    """Reads one object.

    Args:
        parser: whose buffer holds it, and which gets the events.
        raw: text before the object that belongs to it.
        only_known: take nothing for a call but an object that names one of the request's tools.
    """

    def __init__(self, parser: ToolParser, raw: str = "", *, only_known: bool = False) -> None:
        self._parser = parser
        self._object = CallObject()
        self._raw = [raw]
        self._only_known = only_known
        self._is_started = False

    @property
    def raw(self) -> str:
        """All text since the beginning, as long as no call has started."""
        return "".join(self._raw)

    @property
    def is_started(self) -> bool:
        """Whether the call has been announced."""
        return self._is_started

    def step(self) -> Step:
        """Consumes what the buffer holds of the object."""
        parser, call = self._parser, self._object
        if not self._is_started:
            self._raw.append(self._read())
            if call.is_broken or not self._can_be_call():
                return Step.NO_CALL
            if call.name is None:
                return Step.WAITING
            self._is_started = True
            self._raw.clear()
            parser.start_call(call.name)
        self._read()
        parser.arguments(call.take_arguments())
        if call.is_broken:
            return Step.BROKEN
        if not call.is_done:
            return Step.WAITING
        parser.end_call()
        return Step.ENDED

    def _read(self) -> str:
        parser = self._parser
        return parser.take(self._object.feed(parser.buffer, parser.pos))

    def _can_be_call(self) -> bool:
        call = self._object
        if not self._only_known:
            return True
        is_known = call.name is None or not self._parser.tools or call.name in self._parser.tools
        return is_known and call.can_be_call
