"""`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen2.5, Qwen3.

Source: the chat template of Qwen/Qwen3-0.6B; NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

from compiled_engine.server.parsers.machine import Needle, Pattern, ToolParser, ToolSchemas
from compiled_engine.server.parsers.objects import ObjectCall, Step

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_OPENING, _CLOSING = Needle(OPENING), Needle(CLOSING)
_CLOSING_HERE = Pattern(CLOSING)


class HermesParser(ToolParser):
    """JSON objects between tags; a tag that no object follows is text."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._call = ObjectCall(self)

    def start(self) -> bool:
        """Text up to a tag."""
        if not self.text_until(_OPENING):
            return False
        self._call = ObjectCall(self, OPENING)
        self.state = self._object
        return True

    def _object(self) -> bool:
        step = self._call.step()
        if step is Step.WAITING:
            return False
        if step is Step.NO_CALL:
            self.text(self._call.raw)
            self.state = self.start
        else:
            self.state = self._after_object if step is Step.ENDED else self._rest_of_broken
        return True

    def _rest_of_broken(self) -> bool:
        if not self.skip_until(_CLOSING):
            return False
        self.state = self.start
        return True

    def _after_object(self) -> bool:
        self.skip_space()
        if self.is_empty:
            return False
        if self.buffer[self.pos] == "{":
            self._call = ObjectCall(self)
            self.state = self._object
            return True
        if self.skip(_CLOSING_HERE) is None:
            return False
        self.state = self.start
        return True
