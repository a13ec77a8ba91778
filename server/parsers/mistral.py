"""Tool calls of Mistral models, old and new: a JSON list, or `[TOOL_CALLS]name[ARGS]{...}`.

Source: mistral-common's tokenizers v3, v11 and v13.
"""

from __future__ import annotations

from compiled_engine.server.parsers.machine import (
    CUT,
    NAME,
    SPACE,
    Found,
    Gap,
    Pattern,
    ToolSchemas,
)
from compiled_engine.server.parsers.marked import MarkedParser
from compiled_engine.server.parsers.objects import ObjectCall, Step

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (CALLS, ARGUMENTS, CALL_ID)
_LIST = Pattern("[", SPACE, CUT, "{")


class MistralParser(MarkedParser):
    """The marker tells a call; what stands behind it tells the form."""

    section_openings = (CALLS,)
    headers = (
        Pattern(NAME, ARGUMENTS),
        Pattern(NAME, CALL_ID, Gap(r"[A-Za-z0-9_-]"), ARGUMENTS),
        Pattern(NAME, SPACE, CUT, "{"),
    )

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._call = ObjectCall(self)

    def _header(self) -> bool:
        place = self.pos
        self.skip_space()
        found = self.match_any(_LIST)
        if not isinstance(found, Found):
            self.pos = place
            return False if found else super()._header()
        self.pos = found.end
        self._call = ObjectCall(self, self._raw + self.buffer[place : self.pos])
        self.state = self._item
        return True

    def _item(self) -> bool:
        step = self._call.step()
        if step is Step.WAITING:
            return False
        if step is Step.NO_CALL:
            self.text(self._call.raw)
        self.state = self._between if step is Step.ENDED else self.start
        return True

    def _between(self) -> bool:
        self.skip_space()
        if self.is_empty:
            return False
        symbol = self.buffer[self.pos]
        self.pos += symbol in ",]"
        if symbol == ",":
            self._call = ObjectCall(self)
            self.state = self._item
        else:
            self.state = self.start
        return True
