"""Pieces of one answer as Anthropic's content blocks and stream events.

Used alike for streams and for whole answers, so that they cannot differ.
"""

from __future__ import annotations

import uuid

import msgspec

from compiled_engine.server.choice import Piece
from compiled_engine.server.messages_protocol import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessagesEvent,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from compiled_engine.server.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from compiled_engine.server.protocol import Usage


def messages_usage(usage: Usage) -> MessagesUsage:
    """Usage as Anthropic counts: cached tokens are not part of `input_tokens`."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


class MessageWriter:
    """Takes the pieces of one answer; makes events, and the whole message.

    Attributes:
        message: the answer so far; whole after the last piece and `finish`.
    """

    def __init__(self, model: str) -> None:
        self.message = Message(
            id=f"msg_{uuid.uuid4().hex}", model=model, content=[], usage=MessagesUsage(0, 0, 0)
        )
        self._parts: list[str] = []  # text of the open block
        self._is_open = False
        self._is_whole_call = False

    def start(self, usage: Usage) -> list[MessagesEvent]:
        """The events at the beginning of a stream."""
        self.message.usage = messages_usage(usage)
        return [MessageStart(msgspec.structs.replace(self.message, content=[])), Ping()]

    def take(self, piece: Piece) -> list[MessagesEvent]:
        """Adds a piece; returns its events."""
        out: list[MessagesEvent] = []
        for event in piece.events:
            self._take(event, out)
        if piece.finish_reason is not None:
            self._close(out)
            self.message.stop_reason = _stop_reason(piece)
            if self.message.stop_reason == "stop_sequence":
                self.message.stop_sequence = str(piece.stop_reason)
        return out

    def finish(self, usage: Usage) -> list[MessagesEvent]:
        """The events at the end of a stream."""
        self.message.usage = messages_usage(usage)
        stop = StopDelta(self.message.stop_reason, self.message.stop_sequence)
        return [MessageDelta(stop, self.message.usage), MessageStop()]

    def _take(self, event: Event, out: list[MessagesEvent]) -> None:
        if isinstance(event, Content):
            self._ensure(TextBlock(""), out)
            self._add(event.text, TextDelta(event.text), out)
        elif isinstance(event, Reasoning):
            self._ensure(ThinkingBlock(""), out)
            self._add(event.text, ThinkingDelta(event.text), out)
        elif isinstance(event, CallStart):
            self._close(out)
            self._open(ToolUseBlock(f"toolu_{uuid.uuid4().hex[:24]}", event.name, {}), out)
        elif isinstance(event, CallArguments):
            self._add(event.text, InputJsonDelta(event.text), out)
        elif isinstance(event, CallEnd):
            self._is_whole_call = True
            self._close(out)

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _ensure(self, block: Block, out: list[MessagesEvent]) -> None:
        """Begins a block unless one of this kind is open."""
        if not self._is_open or type(self.message.content[-1]) is not type(block):
            self._close(out)
            self._open(block, out)

    def _open(self, block: Block, out: list[MessagesEvent]) -> None:
        self.message.content.append(block)
        self._is_open = True
        out.append(BlockStart(self._index, msgspec.structs.replace(block)))

    def _add(
        self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta, out: list[MessagesEvent]
    ) -> None:
        self._parts.append(text)
        out.append(BlockDelta(self._index, delta))

    def _close(self, out: list[MessagesEvent]) -> None:
        if not self._is_open:
            return
        text = "".join(self._parts)
        block = self.message.content[-1]
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        elif self._is_whole_call:
            block.input = msgspec.json.decode(text or "{}")
        out.append(BlockStop(self._index))
        self._parts = []
        self._is_open = self._is_whole_call = False


def _stop_reason(piece: Piece) -> StopReason:
    if piece.finish_reason == "length":
        return "max_tokens"
    if piece.finish_reason == "tool_calls":
        return "tool_use"
    return "stop_sequence" if isinstance(piece.stop_reason, str) else "end_turn"
