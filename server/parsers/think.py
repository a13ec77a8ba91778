"""Reasoning between tags: `<think>...</think>` and its relatives.

Owns where reasoning starts and ends. It starts inside reasoning, behind it, or before a possible
opening tag, and which of them is read off the rendered prompt. A tag anywhere later in the answer
is text. White space around reasoning belongs to the format and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compiled_engine.server.parsers.events import Content, Event, Reasoning
from compiled_engine.server.parsers.machine import Found, Machine, Needle, Pattern

# Of the answer's start: before a possible opening tag, inside reasoning, or after it.
Place = Literal["before", "inside", "after"]


@dataclass(frozen=True)
class ThinkTags:
    """The tags of one model family.

    Attributes:
        opening: begins reasoning.
        closing: ends it.
        enders: begin a tool call that also ends reasoning, where the model forgets the closing tag;
            they stay part of the answer.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    enders: tuple[str, ...] = ()

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Where an answer to `prompt` starts.

        Args:
            prompt: the rendered prompt; only a tag at its very end counts, any other is a user's.
            continued: the message at its end that the answer continues, if it does.
        """
        if continued is not None:
            opened, closed = continued.rfind(self.opening), continued.rfind(self.closing)
            return "inside" if opened > closed else "after" if closed > opened else "before"
        bare = prompt.rstrip()
        if bare.endswith(self.opening):
            return "inside"
        return "after" if bare.endswith(self.closing) else "before"


class ThinkParser(Machine):
    """Splits a model's text into reasoning and the answer.

    Args:
        tags: of the model.
        place: where the text starts.
        call_patterns: beginnings of tool calls that end reasoning.

    Attributes:
        is_reasoning: the text now belongs to reasoning.
        is_done: all further text is answer.
    """

    def __init__(
        self, tags: ThinkTags, *, place: Place = "before", call_patterns: Sequence[Pattern] = ()
    ) -> None:
        super().__init__()
        self._opening = Pattern(tags.opening)
        self._closing = tags.closing
        self._call_patterns = tuple(call_patterns)
        self._needle = Needle(tags.closing, *tags.enders)
        self._space = ""
        self.is_reasoning = place == "inside"
        self.is_done = place == "after"
        if self.is_reasoning:
            self.state = self._before_reasoning
        elif self.is_done:
            self.state = self._answer

    def start(self) -> bool:
        """Before a possible opening tag."""
        start = self.pos
        self.skip_space()
        match = self.match_any(self._opening)
        if isinstance(match, Found):
            self.pos = match.end
            self.is_reasoning = True
            self.state = self._leading_space
            return True
        is_open = match is True or (self.is_empty and not self.at_end)
        self.pos = start
        if is_open:
            return False
        self.is_done = True
        self.state = self._answer
        return True

    def _before_reasoning(self) -> bool:
        """Behind the prompt's tag, which some models repeat."""
        self.skip_space()
        match = self.match_any(self._opening)
        if match is True or (self.is_empty and not self.at_end):
            return False
        if isinstance(match, Found):
            self.pos = match.end
        self.state = self._leading_space
        return True

    def _leading_space(self) -> bool:
        self.skip_space()
        if self.is_empty and not self.at_end:
            return False
        self.state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        start, end = self._needle.find(self.buffer, self.pos, at_end=self.at_end)
        call = self._find_call(start)
        if call is not None:
            start, is_sure = call
            end = start
            if is_sure:
                self._reason(self.take(start))
                return self._end_reasoning()
        self._reason(self.take(start))
        if start == end:
            if self.at_end and self._space:
                self.emit(Reasoning(self._space))
                self._space = ""
            return False
        if self.buffer[start:end] == self._closing:
            self.pos = end
        return self._end_reasoning()

    def _find_call(self, limit: int) -> tuple[int, bool] | None:
        """The first place before `limit` where a call's beginning stands, or may come to stand."""
        if not self._call_patterns:
            return None
        place = self.pos
        while (place := self.buffer.find("\n", place, limit)) >= 0:
            for pattern in self._call_patterns:
                match = pattern.match(self.buffer, place)
                if match is not None:
                    is_sure = match["whole"] is not None
                    if is_sure or not self.at_end:
                        return place, is_sure
            place += 1
        return None

    def _reason(self, text: str) -> None:
        bare = text.rstrip()
        if bare:
            self.emit(Reasoning(self._space + bare))
            self._space = text[len(bare) :]
        else:
            self._space += text

    def _end_reasoning(self) -> bool:
        self._space = ""
        self.is_reasoning = False
        self.state = self._before_answer
        return True

    def _before_answer(self) -> bool:
        self.skip_space()
        if self.is_empty:
            return False
        self.is_done = True
        self.state = self._answer
        return True

    def _answer(self) -> bool:
        if not self.is_empty:
            self.emit(Content(self.take(len(self.buffer))))
        return False


def answer_parts(events: Sequence[Event]) -> tuple[list[Event], str]:
    """What a `ThinkParser` made: reasoning, and the text of the answer."""
    reasoning = [event for event in events if isinstance(event, Reasoning)]
    answer = "".join(event.text for event in events if isinstance(event, Content))
    return list(reasoning), answer
