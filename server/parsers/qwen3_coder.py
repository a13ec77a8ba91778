"""Calls as XML-like elements: Qwen3-Coder, Qwen3.5 and later.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

Values are plain text that may hold these very tags; a tag ends a value only where what follows
shows that it does.

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen/Qwen3.5-9B.
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
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY = Gap(r"[^<>\n]", name="name", least=1, most=256)

_FUNCTION_HERE = Pattern(_FUNCTION, NAME, ">")
_PARAMETER_HERE = Pattern(_PARAMETER, _KEY, ">")
_FUNCTION_END_HERE = Pattern(_FUNCTION_END)
_CLOSING_HERE = Pattern(CLOSING)
# A call's beginning inside reasoning ends the reasoning.
CALL_BEGINS = (Pattern("\n", OPENING, "\n", CUT, _FUNCTION),)
CALL_BEGIN = f"\n{OPENING}\n{_FUNCTION}"
_VALUE_ENDS = tuple(
    Pattern(line_break, _PARAMETER_END, CUT, SPACE, follower)
    for line_break in ("\n", "")
    for follower in (_PARAMETER, _FUNCTION_END, CLOSING)
)
# Where the closing tag of the value was forgotten.
_NEXT_PARAMETER = Pattern("\n", CUT, _PARAMETER, _KEY, ">")
_NEXT_END = Pattern("\n", CUT, _FUNCTION_END, SPACE, CLOSING)
_OPENINGS = Needle(OPENING, _FUNCTION)
_CANDIDATES = Needle("\n", "<")
_TAGS = Needle("<")


class Qwen3CoderParser(ToolParser):
    """Elements between tags; the outer tag may be missing at the beginning of a line."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._writer = ArgumentWriter(self.arguments, {})
        self._raw = ""

    def start(self) -> bool:
        """Text up to a call."""
        self._raw = self.text_until(_OPENINGS)
        if not self._raw:
            return False
        if self._raw == _FUNCTION:
            self.pos -= len(_FUNCTION)
            self._raw = ""
        self.state = self._header
        return True

    def _header(self) -> bool:
        place = self.pos
        self.skip_space()
        found = self.match_any(_FUNCTION_HERE)
        if found is True or (self.is_empty and not self.at_end):
            self.pos = place
            return False
        is_call = isinstance(found, Found) and (
            bool(self._raw) or (self.is_at_line_start and self._is_known(found.name))
        )
        if not isinstance(found, Found) or not is_call:
            self.pos = place
            if self.at_end and self._raw:
                # Cut inside a header: there is no call yet.
                self.pos = len(self.buffer)
            else:
                self.text(self._raw or self.take(min(place + 1, len(self.buffer))))
            self.state = self.start
            return True
        name = found.name
        self.pos = found.end
        self.start_call(name)
        self._writer = ArgumentWriter(self.arguments, self.tools.get(name) or {})
        self.state = self._function
        return True

    def _is_known(self, name: str) -> bool:
        return not self.tools or name in self.tools

    def _function(self) -> bool:
        """Between two parameters."""
        start, end = _TAGS.find(self.buffer, self.pos, at_end=self.at_end)
        self.pos = start
        if start == end:
            return False
        found = self.match_any(_PARAMETER_HERE, _FUNCTION_END_HERE, _CLOSING_HERE)
        if found is True:
            return False
        if found is None:
            self.pos += 1
            return True
        if found.pattern is _PARAMETER_HERE:
            self.pos = found.end
            self._writer.begin(found.name.strip())
            self.state = self._value_start
            return True
        self._writer.close()
        self.end_call()
        if found.pattern is _FUNCTION_END_HERE:
            self.pos = found.end
        self.state = self._after_function
        return True

    def _value_start(self) -> bool:
        if self.is_empty:
            return False
        if self.buffer[self.pos] == "\n":
            found = self.match_any(*_VALUE_ENDS)
            if found is True:
                return False
            self.pos += found is None
        self.state = self._value
        return True

    def _value(self) -> bool:
        start, end = _CANDIDATES.find(self.buffer, self.pos, at_end=self.at_end)
        self._writer.add(self.take(start))
        if start == end:
            return False
        found = self.match_any(*_VALUE_ENDS, _NEXT_PARAMETER, _NEXT_END)
        if found is True:
            return False
        if found is None or (
            found.pattern is _NEXT_PARAMETER and not self._writer.can_begin(found.name)
        ):
            self._writer.add(self.take(end))
            return True
        self._writer.end()
        self.pos = found.end
        self.state = self._function
        return True

    def _after_function(self) -> bool:
        self.skip_space()
        if self.is_empty:
            return False
        found = self.match_any(_CLOSING_HERE, _FUNCTION_HERE)
        if found is True:
            return False
        if isinstance(found, Found) and found.pattern is _CLOSING_HERE:
            self.pos = found.end
        elif isinstance(found, Found):
            self._raw = OPENING
            self.state = self._header
            return True
        self.state = self.start
        return True
