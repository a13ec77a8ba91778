"""Calls as a Python list: `[get_weather(city='Paris'), now()]`, as Llama 4 writes them.

The answer is a call only if it begins with a list whose first item calls one of the request's
tools. Each value waits for its end, since Python's literals have no JSON form before it.

Source: Meta's prompt format of Llama 3.2 (zero-shot function calling) and Llama 4.
"""

from __future__ import annotations

import ast
import json
import math

from compiled_engine.server.parsers.machine import (
    MAX_NAME_CHARS,
    Found,
    Gap,
    Needle,
    Pattern,
    ToolParser,
    ToolSchemas,
)

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_MARKER = Pattern(PYTHON_START)
_MARKERS = Needle(PYTHON_START)
_NAME = Gap(r"[\w.]", name="name", least=1, most=MAX_NAME_CHARS)
_FIRST = Pattern("[", Gap(r"\s"), _NAME, Gap(r"\s"), "(")
_CALL = Pattern(_NAME, Gap(r"\s"), "(")
_KEY = Pattern(Gap(r"\w", name="name", least=1, most=MAX_NAME_CHARS), Gap(r"\s"), "=")
_CALLS_END = Pattern(PYTHON_END)
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(ToolParser):
    """A list of calls at the beginning of the answer, or behind the model's marker."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._raw = ""
        self._num_written = 0
        self._value = _ValueScanner()

    def start(self) -> bool:
        """Where a list may begin."""
        place = self.pos
        self.skip_space()
        found = self.match_any(_FIRST, _MARKER)
        if found is True or (self.is_empty and not self.at_end):
            self.pos = place
            return False
        is_call = isinstance(found, Found) and (
            found.pattern is _MARKER or not self.tools or found.name in self.tools
        )
        if not isinstance(found, Found) or not is_call:
            self.pos = place
            self.state = self._text
            return True
        self.pos = found.end
        if found.pattern is _MARKER:
            self._raw = self.buffer[place : self.pos]
        else:
            self._begin_call(found.name)
        return True

    def _text(self) -> bool:
        self.text(self._raw)
        self._raw = self.text_until(_MARKERS)
        if not self._raw:
            return False
        self.state = self.start
        return True

    def _begin_call(self, name: str) -> None:
        self._raw = ""
        self.start_call(name)
        self._num_written = 0
        self.state = self._argument

    def _argument(self) -> bool:
        """Before a key, or the end of the call."""
        self.skip_space(",")
        if self.is_empty:
            return False
        if self.buffer[self.pos] == ")":
            self.pos += 1
            self.arguments("}" if self._num_written else "{}")
            self.end_call()
            self.state = self._between
            return True
        found = self.match_any(_KEY)
        if found is True:
            return False
        if not isinstance(found, Found):
            self.state = self._broken
            return True
        self.pos = found.end
        separator = ", " if self._num_written else "{"
        self._num_written += 1
        self.arguments(f"{separator}{json.dumps(found.name, ensure_ascii=False)}: ")
        self._value = _ValueScanner()
        self.state = self._read_value
        return True

    def _read_value(self) -> bool:
        self.pos = self._value.feed(self.buffer, self.pos)
        if not self._value.is_done:
            return False
        text = self._value.as_json()
        if text is None:
            self.state = self._broken
        else:
            self.arguments(text)
            self.state = self._argument
        return True

    def _between(self) -> bool:
        """After a call: the next one, or the end of the list."""
        self.skip_space(",")
        if self.is_empty:
            return False
        if self.buffer[self.pos] == "]":
            self.pos += 1
            self.state = self._after_list
            return True
        found = self.match_any(_CALL)
        if found is True:
            return False
        if isinstance(found, Found):
            self.pos = found.end
            self._begin_call(found.name)
        else:
            self.state = self._broken
        return True

    def _after_list(self) -> bool:
        self.skip_space()
        is_marker = None if self.is_empty else self.skip(_CALLS_END)
        if is_marker is None:
            return False
        if not is_marker:
            self.state = self._text
        return True

    def _broken(self) -> bool:
        self.pos = len(self.buffer)
        return False


class _ValueScanner:
    """Finds the end of one Python literal: a comma or bracket outside of strings and brackets."""

    def __init__(self) -> None:
        self.is_done = False
        self._text: list[str] = []
        self._closers: list[str] = []
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns where it stopped, the end unless done."""
        for index in range(start, len(text)):
            if self._step(text[index]):
                self.is_done = True
                self._text.append(text[start:index])
                return index
        self._text.append(text[start:])
        return len(text)

    def _step(self, character: str) -> bool:
        """Takes one character; returns whether the value ended before it."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        elif character in _PAIRS:
            self._closers.append(_PAIRS[character])
        elif self._closers:
            if character == self._closers[-1]:
                self._closers.pop()
        else:
            return character in ",)]"
        return False

    def as_json(self) -> str | None:
        """The value as JSON, which it may be already; None where it is no literal that has one."""
        text = "".join(self._text).strip()
        try:
            json.loads(text, parse_constant=_no_constant, parse_float=_finite)
            return text
        except (ValueError, RecursionError):
            pass
        try:
            value = ast.literal_eval(_one_line(text))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for JSON")
    return value


def _one_line(text: str) -> str:
    """The literal with the line breaks inside its strings escaped, which Python would refuse."""
    return text.replace("\r", "\\r").replace("\n", "\\n") if text[:1] in "'\"" else text
