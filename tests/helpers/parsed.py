"""Runs a parser over pieces of text and says what came out, as one record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.server.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    merged,
)
from compiled_engine.server.parsers.registry import AUTO, choose_format
from tests.helpers.stream_splits import stream_splits


@dataclass
class Call:
    """One tool call: its arguments' text, and whether it ended."""

    name: str
    arguments: str = ""
    is_ended: bool = False


@dataclass
class Parsed:
    """All of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def ended(self) -> list[tuple[str, Any]]:
        """Names and values of the calls that are complete."""
        return [(call.name, strict_json(call.arguments)) for call in self.calls if call.is_ended]


def strict_json(text: str) -> Any:
    """The value of JSON without Python's extensions."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def gathered(events: Iterable[Event]) -> Parsed:
    """The answer that events make; checks the order of each call's events."""
    parsed = Parsed()
    for event in events:
        if isinstance(event, Content):
            parsed.content += event.text
        elif isinstance(event, Reasoning):
            parsed.reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(parsed.calls)
            parsed.calls.append(Call(event.name))
        else:
            assert event.index == len(parsed.calls) - 1
            call = parsed.calls[-1]
            assert not call.is_ended
            if isinstance(event, CallArguments):
                call.arguments += event.text
            else:
                assert isinstance(event, CallEnd)
                call.is_ended = True
    return parsed


def parse(
    pieces: Sequence[str],
    tools: str = "none",
    reasoning: str = "none",
    *,
    prompt: str = "",
    continued: str | None = None,
    schemas: dict[str, Any] | None = None,
) -> list[Event]:
    """Events of one answer by the parsers of these names."""
    chat_format = choose_format(
        "", has_tools_branch=True, tool_parser=tools, reasoning_parser=reasoning
    )
    parser = chat_format.new_parser(
        None if tools == "none" else schemas or {}, prompt=prompt, continued=continued
    )
    assert parser is not None
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def parse_every_split(
    text: str, tools: str = AUTO, reasoning: str = "none", **options: Any
) -> Parsed:
    """The answer, which must be the same however the text is cut."""
    whole = parse([text], tools, reasoning, **options)
    for pieces in stream_splits(text):
        assert parse(pieces, tools, reasoning, **options) == whole, pieces[:10]
    return gathered(whole)
