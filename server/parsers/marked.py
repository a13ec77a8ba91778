"""Calls whose name stands between markers, followed by JSON arguments.

Owns the machine that Mistral, DeepSeek and Kimi share; their files say which markers they use.
"""

from __future__ import annotations

from compiled_engine.server.parsers.machine import (
    Found,
    Needle,
    Pattern,
    ToolParser,
    ToolSchemas,
)


class MarkedParser(ToolParser):
    """A section of calls; each has a header with the name, arguments, and maybe an end.

    Attributes:
        section_openings: begin the section; text stands before them.
        section_closings: end it.
        call_openings: begin a call inside the section; without any, the section is one call.
        headers: forms of what stands before the arguments, with the groups `name` and maybe `cut`.
        call_closings: end a call.
    """

    section_openings: tuple[str, ...]
    section_closings: tuple[str, ...] = ()
    call_openings: tuple[str, ...] = ()
    headers: tuple[Pattern, ...]

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._raw = ""
        self._openings = Needle(*self.section_openings)
        if self.call_openings:
            self._inside = Needle(*self.call_openings, *self.section_closings)
            self._tail = Needle(*self.call_closings, *self.call_openings, *self.section_closings)

    def name_of(self, header: str) -> str:
        """The function's name in the header's group `name`."""
        return header

    def start(self) -> bool:
        """Text up to a section."""
        self._raw = self.text_until(self._openings)
        if not self._raw:
            return False
        self.state = self._section if self.call_openings else self._header
        return True

    def _section(self) -> bool:
        marker = self.skip_until(self._inside)
        if not marker:
            return False
        self._raw = marker
        self.state = self._header if marker in self.call_openings else self.start
        return True

    def _header(self) -> bool:
        place = self.pos
        self.skip_space()
        found = self.match_any(*self.headers)
        if found is True or (self.is_empty and not self.at_end):
            self.pos = place
            return False
        if found is None and not self.at_end:
            return self._without_header(place)
        if not isinstance(found, Found):
            # Cut inside a header: there is no call yet.
            self.pos = len(self.buffer)
            return False
        self.pos = found.end
        self.start_json_call(self.name_of(found.name))
        return True

    def _without_header(self, place: int) -> bool:
        if self.call_openings:
            self.state = self._section
        else:
            self.text(self._raw + self.buffer[place : self.pos])
            self.state = self.start
        return True

    def after_arguments(self) -> bool:
        """Behind a call: its end, the next one, or the section's end."""
        if not self.call_openings:
            self.state = self.start
            return True
        marker = self.skip_until(self._tail)
        if not marker:
            return False
        if marker in self.call_closings:
            self.state = self._section
        else:
            self.state = self._header if marker in self.call_openings else self.start
        return True
