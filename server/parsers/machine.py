"""The incremental core of all parsers: a state machine over text that arrives in pieces.

Owns the buffer, the search for markers that may be cut anywhere, and the numbering of calls. A
state is a method that consumes what it can and returns whether it made progress. What it leaves in
the buffer is at most the beginning of a marker, so the cost of a piece does not grow with the
answer, and the result does not depend on where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from compiled_engine.server.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    merged,
)
from compiled_engine.server.parsers.json_stream import JsonValue

# More white space than this between the parts of a marker makes it ordinary text.
MAX_GAP_CHARS = 64
# Longer names are no names.
MAX_NAME_CHARS = 256

ToolSchemas = Mapping[str, Mapping[str, Any]]


class Needle:
    """Finds the first of several literal markers, none of which is the beginning of another."""

    def __init__(self, *literals: str) -> None:
        self._literals = literals
        self._regex = re.compile("|".join(re.escape(literal) for literal in literals))
        self._longest = max(len(literal) for literal in literals)

    def find(self, text: str, start: int, *, at_end: bool) -> tuple[int, int]:
        """Where the marker lies; an empty range where there is none.

        No marker can begin before the start of the range.
        """
        match = self._regex.search(text, start)
        if match is not None:
            return match.span()
        if not at_end:
            for index in range(max(start, len(text) - self._longest + 1), len(text)):
                tail = text[index:]
                if any(literal.startswith(tail) for literal in self._literals):
                    return index, index
        return len(text), len(text)


class Gap:
    """A run of characters of one class inside a `Pattern`.

    Args:
        characters: a regular expression's character class.
        name: a group to read the run by.
        least: characters it has at least.
        most: characters it has at most.
    """

    def __init__(
        self, characters: str, *, name: str = "", least: int = 0, most: int = MAX_GAP_CHARS
    ) -> None:
        run = f"{characters}{{{least},{most}}}"
        self.regex = f"(?P<{name}>{run})" if name else run


SPACE = Gap(r"\s")
NAME = Gap(r"[\w.:/-]", name="name", least=1, most=MAX_NAME_CHARS)
# What follows is looked at but not consumed.
CUT = Gap("", name="cut", most=0)


class Pattern:
    """A sequence of literals and gaps, matched at one place of a text that may end too early."""

    def __init__(self, *parts: str | Gap) -> None:
        regex = "(?P<whole>)"
        for part in reversed(parts):
            if part is CUT:
                regex = f"(?P<cut>){regex}"
            elif isinstance(part, Gap):
                regex = rf"{part.regex}(?:{regex}|\Z)"
            else:
                for character in reversed(part):
                    regex = rf"{re.escape(character)}(?:{regex}|\Z)"
        self._regex = re.compile(regex)

    def match(self, text: str, start: int) -> re.Match[str] | None:
        """A match, which is a partial one (see `is_whole`) where the text ends inside it."""
        return self._regex.match(text, start)


def is_whole(match: re.Match[str]) -> bool:
    """Whether all of a pattern is there."""
    return match["whole"] is not None


def end_of(match: re.Match[str]) -> int:
    """Where the consumed part of a whole match ends."""
    groups = match.re.groupindex
    return match.start("cut") if "cut" in groups else match.end()


class Found(NamedTuple):
    """A pattern that is there, where its consumed part ends, and the text of its group `name`."""

    pattern: Pattern
    end: int
    name: str


class Machine:
    """Runs states over a growing buffer.

    Attributes:
        buffer: text not consumed yet, from `pos` on.
        pos: where the next state starts.
        at_end: no more text will come.
        state: the current state.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.pos = 0
        self.at_end = False
        self._events: list[Event] = []
        self.state: Callable[[], bool] = self.start

    def start(self) -> bool:
        """The first state."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the model's text; returns what is now certain."""
        self.buffer = self.buffer[self.pos :] + text
        self.pos = 0
        return self._run()

    def finish(self) -> list[Event]:
        """Returns what was held back, once the text has ended; nothing may be fed afterwards."""
        self.at_end = True
        return self._run()

    def _run(self) -> list[Event]:
        while self.state():
            pass
        events, self._events = self._events, []
        return merged(events)

    def emit(self, event: Event) -> None:
        """Adds an event to those of this call."""
        self._events.append(event)

    def take(self, end: int) -> str:
        """Consumes the buffer up to `end`."""
        text = self.buffer[self.pos : end]
        self.pos = end
        return text

    @property
    def is_empty(self) -> bool:
        """Whether all text is consumed."""
        return self.pos >= len(self.buffer)

    def skip_space(self, also: str = "") -> None:
        """Consumes white space, and the characters of `also`."""
        buffer, pos = self.buffer, self.pos
        while pos < len(buffer) and (buffer[pos].isspace() or buffer[pos] in also):
            pos += 1
        self.pos = pos

    def skip(self, *patterns: Pattern) -> bool | None:
        """Consumes a pattern, and says whether one was there; None where one may yet be."""
        found = self.match_any(*patterns)
        if isinstance(found, Found):
            self.pos = found.end
            return True
        return None if found else False

    def match_any(self, *patterns: Pattern) -> Found | Literal[True] | None:
        """The first pattern that is there; True where one may yet be; else None."""
        may_come = False
        for pattern in patterns:
            match = pattern.match(self.buffer, self.pos)
            if match is None:
                continue
            if is_whole(match):
                name = match["name"] if "name" in match.re.groupindex else ""
                return Found(pattern, end_of(match), name)
            may_come = True
        return True if may_come and not self.at_end else None


class ToolParser(Machine):
    """A machine that finds tool calls in the answer's text.

    White space around calls belongs to the format, not to the answer, and is left out.

    Args:
        tools: the request's tools, name -> JSON schema of the arguments.

    Attributes:
        call_closings: end a call whose arguments are a JSON value; see `start_json_call`.
    """

    call_closings: tuple[str, ...] = ()

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self.tools = tools
        self._json_value = JsonValue()
        self.num_calls = 0
        self._space: list[str] = []
        self._is_after_call = False
        self._has_text = False

    def finish(self) -> list[Event]:
        """Returns what was held back, once the text has ended; nothing may be fed afterwards."""
        events = super().finish()
        if self._space and not self._is_after_call:
            events.append(Content("".join(self._space)))
        return merged(events)

    @property
    def is_at_line_start(self) -> bool:
        """Whether no other text stands before this place in its line of the answer."""
        return not self._has_text or any("\n" in space for space in self._space)

    def text(self, text: str) -> None:
        """Adds text outside of calls; white space at its end waits for what follows."""
        bare = text.rstrip()
        if bare:
            self.emit(Content("".join(self._space) + bare))
            self._space.clear()
            self._is_after_call = False
            self._has_text = True
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def text_until(self, needle: Needle) -> str:
        """Passes text on up to a marker; consumes and returns the marker, or "" so far."""
        start, end = needle.find(self.buffer, self.pos, at_end=self.at_end)
        self.text(self.take(start))
        return self.take(end)

    def skip_until(self, needle: Needle) -> str:
        """Drops text up to a marker; consumes and returns the marker, or "" so far."""
        start, end = needle.find(self.buffer, self.pos, at_end=self.at_end)
        self.pos = start
        return self.take(end)

    def start_call(self, name: str) -> None:
        """The next call begins."""
        # The space before the call counts only if more text follows the call.
        self._is_after_call = True
        self._has_text = True
        self.num_calls += 1
        self.emit(CallStart(self.num_calls - 1, name))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that runs."""
        self.emit(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """The call that runs is complete."""
        self.emit(CallEnd(self.num_calls - 1))

    def start_json_call(self, name: str) -> None:
        """The next call begins; its arguments follow as one JSON object."""
        self.start_call(name)
        self._json_value = JsonValue()
        self.state = self._read_json

    def after_arguments(self) -> bool:
        """The state behind the arguments of `start_json_call`."""
        raise NotImplementedError

    def _read_json(self) -> bool:
        value = self._json_value
        if not value.kind:
            self.skip_space()
            if self.is_empty:
                return False
            if self.buffer[self.pos] != "{":
                return self._without_json()
        self.pos = value.feed(self.buffer, self.pos)
        self.arguments(value.take())
        if value.is_done:
            self.end_call()
        elif not value.is_broken:
            return False
        self.state = self.after_arguments
        return True

    def _without_json(self) -> bool:
        """A call that ends at once has no arguments; anything else is broken."""
        found = self.match_any(*map(Pattern, self.call_closings))
        if found is True:
            return False
        if found is not None:
            self.arguments("{}")
            self.end_call()
        self.state = self.after_arguments
        return True
