"""JSON that arrives in pieces: one value, or the object that describes a call.

Owns scanning and small repairs: what comes out is valid JSON wherever the scan succeeds. Strings
keep the escapes the model wrote; line breaks and other control characters inside strings are
escaped, `\\x` that JSON does not know becomes `\\\\x`, Python's names for constants become JSON's,
and a comma before a closing bracket is left out. Anything else that is no JSON breaks the scan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum, auto

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r'[^\s,:"\[\]{}]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]*")
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "null",
    "Infinity": "null",
    "-Infinity": "null",
}
_MAX_SCALAR_CHARS = 1024
ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", "index", *ARGUMENT_KEYS})


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """Scans one value and hands its text on as it comes.

    Attributes:
        is_done: the value is complete.
        is_broken: the text is no JSON.
        kind: first character of the value, "" before it.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self.kind = ""
        self._out: list[str] = []
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        # A comma, and the space behind it, that stays out if a bracket closes next.
        self._comma = ""
        self._scalar = ""
        self._hex = ""
        self._mode: Callable[[str, int], int] = self._structure

    def feed(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns where it stopped, the end unless done or broken."""
        while start < len(text) and not self.is_done and not self.is_broken:
            start = self._mode(text, start)
        return start

    def take(self) -> str:
        """The value's text that came since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def _structure(self, text: str, start: int) -> int:
        match = _SPACE.match(text, start)
        assert match is not None
        if match.end() > start:
            if self._comma:
                self._comma += match[0]
            elif self.kind:
                self._out.append(match[0])
            return match.end()
        character = text[start]
        self.kind = self.kind or character
        if character in "}]":
            return self._close(character, start)
        if character == "," and self._expect is _Expect.COMMA_OR_END:
            self._comma = ","
            self._expect = _Expect.KEY_OR_END if self._stack[-1] == "{" else _Expect.VALUE_OR_END
            return start + 1
        if character == ":" and self._expect is _Expect.COLON:
            self._out.append(":")
            self._expect = _Expect.VALUE
            return start + 1
        wants_value = self._expect in (_Expect.VALUE, _Expect.VALUE_OR_END)
        if character == '"' and (wants_value or self._expect is _Expect.KEY_OR_END):
            self._begin('"')
            self._mode = self._string
            return start + 1
        if not wants_value or character in ",:":
            self.is_broken = True
            return start
        if character in "{[":
            self._begin(character)
            self._stack.append(character)
            self._expect = _Expect.KEY_OR_END if character == "{" else _Expect.VALUE_OR_END
            return start + 1
        self._begin("")
        self._mode = self._collect_scalar
        return start

    def _begin(self, text: str) -> None:
        self._out.append(self._comma + text)
        self._comma = ""

    def _close(self, character: str, start: int) -> int:
        opening = "{" if character == "}" else "["
        can_end = self._expect not in (_Expect.VALUE, _Expect.COLON)
        if not can_end or not self._stack or self._stack[-1] != opening:
            self.is_broken = True
            return start
        self._out.append(self._comma[1:] + character)
        self._comma = ""
        self._stack.pop()
        self._end_value()
        return start + 1

    def _end_value(self) -> None:
        self._mode = self._structure
        if self._stack:
            self._expect = _Expect.COMMA_OR_END
        else:
            self.is_done = True

    def _string(self, text: str, start: int) -> int:
        match = _STRING_RUN.match(text, start)
        if match is not None:
            self._out.append(match[0])
            return match.end()
        character = text[start]
        if character == '"':
            self._out.append('"')
            if self._expect is _Expect.KEY_OR_END:
                self._mode = self._structure
                self._expect = _Expect.COLON
            else:
                self._end_value()
        elif character == "\\":
            self._mode = self._escape
        else:
            self._out.append(json.dumps(character)[1:-1])
        return start + 1

    def _escape(self, text: str, start: int) -> int:
        character = text[start]
        self._mode = self._string
        if character in '"\\/bfnrt':
            self._out.append("\\" + character)
        elif character == "u":
            self._hex = ""
            self._mode = self._unicode
        elif character == "'":
            self._out.append("'")
        else:
            self._out.append("\\\\")
            return start
        return start + 1

    def _unicode(self, text: str, start: int) -> int:
        match = _HEX.match(text, start, start + 4 - len(self._hex))
        assert match is not None
        self._hex += match[0]
        if len(self._hex) == 4:
            self._out.append("\\u" + self._hex)
            self._mode = self._string
        elif match.end() < len(text):
            self._out.append("\\\\u" + self._hex)
            self._mode = self._string
        return match.end()

    def _collect_scalar(self, text: str, start: int) -> int:
        match = _SCALAR_RUN.match(text, start)
        end = match.end() if match is not None else start
        self._scalar += text[start:end]
        if len(self._scalar) > _MAX_SCALAR_CHARS:
            self.is_broken = True
        elif end < len(text):
            scalar, self._scalar = self._scalar, ""
            known = scalar if _NUMBER.fullmatch(scalar) else _CONSTANTS.get(scalar)
            if known is None:
                self.is_broken = True
            else:
                self._out.append(known)
                self._end_value()
        return end


class CallObject:
    """Scans `{"name": ..., "arguments": {...}}`; the keys may come in any order.

    Attributes:
        name: of the function, once it is known.
        first_key: of the object, once it is known.
        is_done: the object is complete.
        is_broken: it is no JSON, or no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.first_key: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._key = ""
        self._value = JsonValue()
        self._mode: Callable[[str, int], int] = self._open

    @property
    def can_be_call(self) -> bool:
        """Whether the keys so far are those of a call."""
        return self.first_key is None or self.first_key in _CALL_KEYS

    def feed(self, text: str, start: int) -> int:
        """Scans `text` from `start`; returns where it stopped.

        That is the end of the text, of the object, or of its name: what comes behind the name must
        not decide whether a call starts.
        """
        name = self.name
        while start < len(text) and not self.is_done and not self.is_broken:
            start = self._mode(text, start)
            if self.name is not name:
                break
        return start

    def take_arguments(self) -> str:
        """The arguments' text that came since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _symbol(self, text: str, start: int) -> tuple[str, int]:
        """The first character that is no space, or "", and the place behind it."""
        match = _SPACE.match(text, start)
        assert match is not None
        end = match.end()
        return (text[end], end + 1) if end < len(text) else ("", end)

    def _open(self, text: str, start: int) -> int:
        symbol, start = self._symbol(text, start)
        if symbol == "{":
            self._mode = self._before_key
        elif symbol:
            self.is_broken = True
        return start

    def _before_key(self, text: str, start: int) -> int:
        symbol, start = self._symbol(text, start)
        if symbol == '"':
            self._value = JsonValue()
            self._mode = self._read_key
            return start - 1
        if symbol == "}":
            self._end()
        elif symbol:
            self.is_broken = True
        return start

    def _read_key(self, text: str, start: int) -> int:
        start = self._value.feed(text, start)
        if self._value.is_done:
            self._key = json.loads(self._value.take())
            self.first_key = self.first_key or self._key
            self._mode = self._before_value
        return start

    def _before_value(self, text: str, start: int) -> int:
        symbol, start = self._symbol(text, start)
        if symbol == ":":
            self._value = JsonValue()
            self._mode = self._read_value
        elif symbol:
            self.is_broken = True
        return start

    def _read_value(self, text: str, start: int) -> int:
        value = self._value
        start = value.feed(text, start)
        self.is_broken = value.is_broken
        is_argument = self._key in ARGUMENT_KEYS and not self._has_arguments
        if is_argument and value.kind == "{":
            self._arguments.append(value.take())
        if value.is_done:
            if is_argument:
                self._has_arguments = True
                if value.kind != "{":
                    self._arguments.append(object_text(value.take()))
            elif self._key == "name":
                # Nothing but a string is read: a list of any depth may stand here too.
                self._set_name(json.loads(value.take()) if value.kind == '"' else "")
            self._mode = self._after_value
        return start

    def _set_name(self, name: str) -> None:
        if name:
            self.name = self.name or name
        else:
            self.is_broken = True

    def _after_value(self, text: str, start: int) -> int:
        symbol, start = self._symbol(text, start)
        if symbol == ",":
            self._mode = self._before_key
        elif symbol == "}":
            self._end()
        elif symbol:
            self.is_broken = True
        return start

    def _end(self) -> None:
        if self.name is None:
            self.is_broken = True
            return
        self.is_done = True
        if not self._has_arguments:
            self._arguments.append("{}")


def object_text(text: str) -> str:
    """Arguments that are no object: an object written as a string is taken out of it."""
    try:
        value = json.loads(text)
        if value is None or value == "":
            return "{}"
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    return text
