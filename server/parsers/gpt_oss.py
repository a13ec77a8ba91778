"""The channels of gpt-oss: reasoning, answer and tool calls as messages with headers.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>{...}

An end marker ends a message only where the text ends or the next message starts, so that a message
may speak about markers. A message on an unknown channel is answer text.

Source: docs/format.md of openai/harmony. Its own parser works on token ids and fetches its
vocabulary from the network when it is first used, so this one reads the text.
"""

from __future__ import annotations

import re

from compiled_engine.server.parsers.events import Content, Event, Reasoning
from compiled_engine.server.parsers.machine import (
    CUT,
    Needle,
    Pattern,
    ToolParser,
    ToolSchemas,
    end_of,
    is_whole,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN)
_HEADER_STOPS = Needle(MESSAGE, START, *_ENDS)
_END_NEEDLE = Needle(*_ENDS)
_MESSAGE_ENDS = tuple(Pattern(end, CUT, START) for end in _ENDS)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
# A longer header is no header.
_MAX_HEADER_CHARS = 1024


class GptOssParser(ToolParser):
    """Both stages in one, since channels carry reasoning, text and calls alike.

    Args:
        tools: the request's tools; None drops calls.
        prefix: the beginning of the answer that the prompt holds.

    Attributes:
        is_reasoning: the text now belongs to reasoning.
    """

    call_closings = _ENDS

    def __init__(self, tools: ToolSchemas | None, *, prefix: str = "") -> None:
        super().__init__(tools or {})
        self.is_reasoning = False
        self._takes_calls = tools is not None
        self._header: list[str] = []
        self._kind: type[Content] | type[Reasoning] = Content
        if prefix.startswith(START):
            self.feed(prefix[len(START) :])

    def finish(self) -> list[Event]:
        """Returns what was held back, once the text has ended; nothing may be fed afterwards."""
        events = super().finish()
        self.is_reasoning = False
        header = "".join(self._header)
        if header.strip() and CHANNEL not in header and not _RECIPIENT.search(header):
            # A model that writes no channels at all has answered in plain text.
            events.append(Content(header))
        return events

    def start(self) -> bool:
        """Inside a header."""
        begin, end = _HEADER_STOPS.find(self.buffer, self.pos, at_end=self.at_end)
        self._header.append(self.take(begin))
        if begin == end:
            return False
        marker = self.take(end)
        if marker == MESSAGE:
            self._begin_message("".join(self._header)[:_MAX_HEADER_CHARS])
        self._header.clear()
        return True

    def _begin_message(self, header: str) -> None:
        role, *channels = header.replace(CONSTRAIN, " ").split(CHANNEL)
        last = channels[-1] if channels else ""
        found = _RECIPIENT.search(last) or _RECIPIENT.search(role)
        recipient = found[1] if found else ""
        if recipient.startswith(_FUNCTIONS):
            self.state = self.after_arguments
            if self._takes_calls:
                self.start_json_call(recipient.removeprefix(_FUNCTIONS))
        elif recipient:
            self.state = self.after_arguments
        else:
            self.is_reasoning = last.split()[:1] == ["analysis"]
            self._kind = Reasoning if self.is_reasoning else Content
            self.state = self._message

    def _message(self) -> bool:
        """Text or reasoning up to the message's end."""
        begin, end = _END_NEEDLE.find(self.buffer, self.pos, at_end=self.at_end)
        self.emit(self._kind(self.take(begin)))
        if begin == end:
            return False
        verdict = self._ends_here()
        if verdict is None:
            return False
        if verdict:
            return self._end_message()
        self.emit(self._kind(self.take(end)))
        return True

    def _ends_here(self) -> bool | None:
        """Whether the message ends at the marker here; None if that is not known yet."""
        for pattern in _MESSAGE_ENDS:
            match = pattern.match(self.buffer, self.pos)
            if match is None:
                continue
            if is_whole(match):
                self.pos = end_of(match)
                return True
            is_bare = self.buffer[self.pos :] in _ENDS
            if not self.at_end:
                return None
            if is_bare:
                self.pos = len(self.buffer)
                return True
        return False

    def _end_message(self) -> bool:
        self.is_reasoning = False
        self.state = self.start
        return True

    def after_arguments(self) -> bool:
        """Inside a message of which nothing more is wanted."""
        if not self.skip_until(_END_NEEDLE):
            return False
        return self._end_message()
