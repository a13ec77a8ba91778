"""Calls as bare JSON objects: `{"name": ..., "parameters": ...}`, as Llama 3 writes them.

The answer is a call only if it begins with an object, or with a list of objects, that names one of
the request's tools, or if the model says so by a marker. Until that is known, the text waits;
other JSON is text.

Source: Meta's prompt format of Llama 3.1 and 3.2; the chat template of Llama-3.3-70B-Instruct.
"""

from __future__ import annotations

from compiled_engine.server.parsers.machine import (
    CUT,
    SPACE,
    Gap,
    Needle,
    Pattern,
    ToolParser,
    ToolSchemas,
)
from compiled_engine.server.parsers.objects import ObjectCall, Step

PYTHON_TAG = "<|python_tag|>"
_FENCE = Pattern("```", Gap("[a-z]", most=16), "\n")
_FENCE_END = Pattern("```")
_OBJECT = Pattern(CUT, "{")
_LIST = Pattern("[", SPACE, CUT, "{")
_SEPARATORS = ",;]"


class JsonParser(ToolParser):
    """Calls at the beginning of the answer, alone, in a list, or inside a code fence."""

    markers: tuple[str, ...] = ()

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._call = ObjectCall(self)
        # Marker, fence or bracket before what may be a call.
        self._raw = ""
        self._needle = Needle(*self.markers) if self.markers else None
        self._lead_ins = (*map(Pattern, self.markers), _FENCE)

    def start(self) -> bool:
        """Where a call may begin."""
        place = self.pos
        self.skip_space()
        found = self.match_any(_OBJECT, _LIST, *self._lead_ins)
        if found is True or (self.is_empty and not self.at_end):
            self.pos = place
            return False
        if found is None:
            self.pos = place
            self.state = self._text
            return True
        self.pos = found.end
        self._raw += self.buffer[place : self.pos]
        if found.pattern not in self._lead_ins:
            self._call = ObjectCall(self, self._raw, only_known=True)
            self._raw = ""
            self.state = self._object
        return True

    def _text(self) -> bool:
        self.text(self._raw)
        self._raw = ""
        if self._needle is None:
            self.text(self.take(len(self.buffer)))
            return False
        self._raw = self.text_until(self._needle)
        if not self._raw:
            return False
        self.state = self.start
        return True

    def _object(self) -> bool:
        step = self._call.step()
        is_cut = step is Step.WAITING and self.at_end
        if step is Step.NO_CALL or (is_cut and not self.num_calls):
            self._raw = self._call.raw
            self.state = self._text
            return True
        if step is Step.WAITING:
            return False
        self.state = self._between if step is Step.ENDED else self._rest_of_broken
        return True

    def _rest_of_broken(self) -> bool:
        self.pos = len(self.buffer)
        return False

    def _between(self) -> bool:
        """After a call: a separator and the next one, the end of a list, or text."""
        self.skip_space(_SEPARATORS)
        is_fence = None if self.is_empty else self.skip(_FENCE_END)
        if is_fence is None:
            return False
        if not is_fence:
            self.state = self.start
        return True


class Llama3JsonParser(JsonParser):
    """The same, and after the marker of a tool call anywhere."""

    markers = (PYTHON_TAG,)
