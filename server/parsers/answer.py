"""The parser of one answer: reasoning first, then text and tool calls.

Owns joining the two stages; each is a machine of its own. Used alike for streams and for whole
answers, so that they cannot differ.
"""

from __future__ import annotations

from typing import Protocol

from compiled_engine.server.parsers.events import Content, Event, merged
from compiled_engine.server.parsers.machine import ToolParser
from compiled_engine.server.parsers.think import ThinkParser, answer_parts


class Parser(Protocol):
    """Makes events of one answer's text, which comes in pieces of any size."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the model is thinking at the end of the text so far."""
        ...

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece; returns what is now certain."""
        ...

    def finish(self) -> list[Event]:
        """Returns what was held back, once the text has ended."""
        ...


class AnswerParser:
    """Reasoning and tool calls of a model that marks them apart.

    Args:
        think: None for an answer without reasoning.
        tools: None for an answer without tool calls.
    """

    def __init__(self, think: ThinkParser | None, tools: ToolParser | None) -> None:
        self._think = think
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the model is thinking at the end of the text so far."""
        return self._think is not None and self._think.is_reasoning

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece; returns what is now certain."""
        if self._think is None:
            return self._answer(text)
        reasoning, answer = answer_parts(self._think.feed(text))
        if not answer:
            return reasoning
        return merged([*reasoning, *self._answer(answer)])

    def finish(self) -> list[Event]:
        """Returns what was held back, once the text has ended."""
        reasoning: list[Event] = []
        answer = ""
        if self._think is not None:
            reasoning, answer = answer_parts(self._think.finish())
        events = [*reasoning, *self._answer(answer)]
        if self._tools is not None:
            events += self._tools.finish()
        return merged(events)

    def _answer(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []
