"""What a parser makes of a model's text: reasoning, answer text, and the parts of tool calls."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Text the model wrote while it thought."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; calls of one answer are numbered 0, 1, 2."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments; the joined pieces of a call that ended are JSON."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is complete. A call without this was cut, or is no valid JSON."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined and empty text left out."""
    result: list[Event] = []
    run: list[str] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, (CallStart, CallEnd)):
            _close(result, run)
            result.append(event)
        elif not event.text:
            continue
        elif run and _same_kind(last, event):
            run.append(event.text)
        else:
            _close(result, run)
            result.append(event)
            run.append(event.text)
    _close(result, run)
    return result


def _same_kind(last: Event | None, event: Event) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(last, CallArguments) and last.index == event.index
    return type(last) is type(event)


def _close(result: list[Event], run: list[str]) -> None:
    if len(run) > 1:
        last = result[-1]
        assert isinstance(last, (Reasoning, Content, CallArguments))
        result[-1] = msgspec.structs.replace(last, text="".join(run))
    run.clear()
