"""Calls of GLM-4.5 and later: a name, then keys and values between tags.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

White space between the tags is free; inside a value it counts.

Source: the chat templates of zai-org/GLM-4.5 and zai-org/GLM-4.7.
"""

from __future__ import annotations

from compiled_engine.server.parsers.arguments import ArgumentWriter
from compiled_engine.server.parsers.machine import (
    CUT,
    NAME,
    SPACE,
    Found,
    Gap,
    Needle,
    Pattern,
    ToolParser,
    ToolSchemas,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"

_OPENING, _TAGS = Needle(OPENING), Needle("<")
_HEADERS = (Pattern(NAME, SPACE, CUT, _KEY), Pattern(NAME, SPACE, CUT, CLOSING))
_CLOSING_HERE = Pattern(CLOSING)
_ARGUMENT = Pattern(_KEY, Gap("[^<>]", name="name", least=1, most=256), _KEY_END, SPACE, _VALUE)
_ENDS = (
    Pattern(_VALUE_END, CUT, SPACE, _KEY),
    Pattern(_VALUE_END, CUT, SPACE, CLOSING),
    # Where the closing tag of the value was forgotten.
    Pattern(CUT, CLOSING, SPACE, OPENING),
)
_LAST_CLOSING = Pattern(CLOSING, SPACE)


class Glm45Parser(ToolParser):
    """Keys and values between tags."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._writer = ArgumentWriter(self.arguments, {})

    def start(self) -> bool:
        """Text up to a call."""
        if not self.text_until(_OPENING):
            return False
        self.state = self._header
        return True

    def _header(self) -> bool:
        place = self.pos
        if self.buffer[place : place + 1] == "\n":
            self.pos += 1
        found = self.match_any(*_HEADERS)
        if found is True or (self.is_empty and not self.at_end):
            self.pos = place
            return False
        if not isinstance(found, Found):
            if self.at_end:
                # Cut inside a header: there is no call yet.
                self.pos = len(self.buffer)
                return False
            self.pos = place
            self.text(OPENING)
            self.state = self.start
            return True
        name = found.name
        self.pos = found.end
        self.start_call(name)
        self._writer = ArgumentWriter(self.arguments, self.tools.get(name) or {})
        self.state = self._call
        return True

    def _call(self) -> bool:
        """Between two arguments."""
        start, end = _TAGS.find(self.buffer, self.pos, at_end=self.at_end)
        self.pos = start
        if start == end:
            return False
        found = self.match_any(_ARGUMENT, _CLOSING_HERE)
        if found is True:
            return False
        if found is None:
            self.pos += 1
            return True
        self.pos = found.end
        if found.pattern is _ARGUMENT:
            self._writer.begin(found.name.strip())
            self.state = self._value
        else:
            self._writer.close()
            self.end_call()
            self.state = self.start
        return True

    def _value(self) -> bool:
        start, end = _TAGS.find(self.buffer, self.pos, at_end=self.at_end)
        self._writer.add(self.take(start))
        if start == end:
            return False
        found = self.match_any(*_ENDS)
        if found is True:
            return False
        if found is None and self._is_last_closing():
            if not self.at_end:
                return False
            self._writer.end()
            self.state = self._call
            return True
        if found is None:
            self._writer.add(self.take(end))
            return True
        self._writer.end()
        self.pos = found.end
        self.state = self._call
        return True

    def _is_last_closing(self) -> bool:
        """Whether nothing but the call's end follows, as far as the text goes."""
        match = _LAST_CLOSING.match(self.buffer, self.pos)
        return match is not None and match.end() == len(self.buffer)
