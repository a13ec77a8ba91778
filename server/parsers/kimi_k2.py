"""Tool calls of Kimi K2: the name stands inside the call's id, `functions.NAME:NUMBER`.

Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

import re

from compiled_engine.server.parsers.machine import NAME, SPACE, Pattern
from compiled_engine.server.parsers.marked import MarkedParser

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
MARKERS = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class KimiK2Parser(MarkedParser):
    """Id, marker, arguments."""

    section_openings = (SECTION,)
    section_closings = (SECTION_END,)
    call_openings = (CALL,)
    headers = (Pattern(NAME, SPACE, ARGUMENTS),)
    call_closings = (CALL_END,)

    def name_of(self, header: str) -> str:
        """The name inside the id."""
        match = _ID.fullmatch(header)
        return match[1] if match else header
