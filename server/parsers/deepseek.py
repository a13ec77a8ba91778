"""Tool calls of DeepSeek V3, R1 and V3.1.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from compiled_engine.server.parsers.machine import CUT, NAME, SPACE, Pattern
from compiled_engine.server.parsers.marked import MarkedParser

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MARKERS = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)


class DeepSeekV31Parser(MarkedParser):
    """Name, separator, arguments."""

    section_openings = (SECTION,)
    section_closings = (SECTION_END,)
    call_openings = (CALL,)
    headers: tuple[Pattern, ...] = (Pattern(NAME, SEPARATOR),)
    call_closings = (CALL_END,)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """The word "function", separator, name, and the arguments in a code fence."""

    headers = (
        Pattern("function", SEPARATOR, NAME, SPACE, "```json"),
        Pattern("function", SEPARATOR, NAME, SPACE, CUT, "{"),
    )
