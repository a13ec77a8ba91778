"""Pieces of one answer as the items and stream events of `/v1/responses`.

Used alike for streams and for whole answers, so that they cannot differ.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from compiled_engine.errors import EngineError
from compiled_engine.server import responses_protocol as shapes
from compiled_engine.server.choice import Piece
from compiled_engine.server.logprobs import ContentLogprob, ListedToken
from compiled_engine.server.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from compiled_engine.server.protocol import Usage
from compiled_engine.server.responses_items import seal

_OUT = list[shapes.ResponsesEvent]
TokenLister = Callable[[Sequence[ListedToken]], list[ContentLogprob]]


def responses_usage(usage: Usage) -> shapes.ResponsesUsage:
    """Usage in the names of `/v1/responses`."""
    details = usage.completion_tokens_details
    num_reasoning = details.reasoning_tokens if isinstance(details, msgspec.Struct) else 0
    return shapes.ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=shapes.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=shapes.OutputTokensDetails(num_reasoning),
        total_tokens=usage.total_tokens,
    )


class ResponseWriter:
    """Takes the pieces of one answer; makes events, and the whole response.

    Args:
        response: the answer without its items.
        list_tokens: makes the log probabilities of tokens of the text; None where nobody asked.
        seals_reasoning: reasoning gets its `encrypted_content`.

    Attributes:
        response: the answer so far; whole after `finish`.
    """

    def __init__(
        self,
        response: shapes.ResponseObject,
        list_tokens: TokenLister | None = None,
        *,
        seals_reasoning: bool = False,
    ) -> None:
        self.response = response
        self._list_tokens = list_tokens
        self._seals_reasoning = seals_reasoning
        self._logprobs: list[ContentLogprob] = []  # of the open item
        self._num_events = 0
        self._parts: list[str] = []  # text of the open item
        self._is_open = False
        self._is_whole_call = False

    def queue(self) -> _OUT:
        """The events of an answer that begins later, in the background."""
        self.response.status = "queued"
        return [
            shapes.ResponseCreated(sequence_number=self._number(), response=self._snapshot()),
            shapes.ResponseQueued(sequence_number=self._number(), response=self._snapshot()),
        ]

    def start(self) -> _OUT:
        """The events at the beginning of a stream."""
        out: _OUT = []
        self.response.status = "in_progress"
        if not self._num_events:
            created = shapes.ResponseCreated
            out.append(created(sequence_number=self._number(), response=self._snapshot()))
        begun = shapes.ResponseInProgress
        return [*out, begun(sequence_number=self._number(), response=self._snapshot())]

    def take(self, piece: Piece) -> _OUT:
        """Adds a piece; returns its events."""
        out: _OUT = []
        logprobs: list[ContentLogprob] = []
        if self._list_tokens is not None:
            logprobs = self._list_tokens(piece.logprobs)
        last_text = max(
            (i for i, event in enumerate(piece.events) if isinstance(event, Content)), default=-1
        )
        for place, event in enumerate(piece.events):
            self._take(event, out, logprobs if place == last_text else [])
        if piece.finish_reason is not None:
            is_cut = piece.finish_reason == "length"
            self._close(out, is_cut=is_cut)
            self.response.status = "incomplete" if is_cut else "completed"
            if is_cut:
                self.response.incomplete_details = shapes.IncompleteDetails("max_output_tokens")
        return out

    def finish(self, usage: Usage) -> shapes.ResponsesEvent:
        """The last event of a stream."""
        self.response.usage = responses_usage(usage)
        self.response.completed_at = int(time.time())
        is_cut = self.response.status == "incomplete"
        kind = shapes.ResponseIncomplete if is_cut else shapes.ResponseCompleted
        return kind(sequence_number=self._number(), response=self.response)

    def failed(self, error: EngineError) -> shapes.ResponsesEvent:
        """The last event of a stream that failed."""
        self._settle(is_cut=True)
        self.response.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response.error = shapes.ResponsesFailure(code, error.message)
        return shapes.ResponseFailed(sequence_number=self._number(), response=self.response)

    def cancelled(self) -> shapes.ResponsesEvent:
        """The last event of an answer that was cancelled."""
        self._settle(is_cut=True)
        self.response.status = "cancelled"
        return shapes.ResponseIncomplete(sequence_number=self._number(), response=self.response)

    def _snapshot(self) -> shapes.ResponseObject:
        return msgspec.structs.replace(self.response, output=[])

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _place(self) -> dict[str, Any]:
        """What the next event about the open item says of its place."""
        output = self.response.output
        return {
            "sequence_number": self._number(),
            "output_index": len(output) - 1,
            "item_id": output[-1].id,
        }

    def _take(self, event: Event, out: _OUT, logprobs: list[ContentLogprob]) -> None:
        if isinstance(event, Content):
            self._ensure(shapes.OutputMessage, out)
            self._parts.append(event.text)
            self._logprobs += logprobs
            delta = shapes.OutputTextDelta(**self._place(), delta=event.text, logprobs=logprobs)
            out.append(delta)
        elif isinstance(event, Reasoning):
            self._ensure(shapes.ReasoningItem, out)
            self._parts.append(event.text)
            out.append(shapes.ReasoningTextDelta(**self._place(), delta=event.text))
        elif isinstance(event, CallStart):
            self._close(out)
            call = shapes.FunctionCall(
                id=_new_id("fc"),
                call_id=f"call_{uuid.uuid4().hex[:24]}",
                name=event.name,
                arguments="",
                status="in_progress",
            )
            self._open(call, out)
        elif isinstance(event, CallArguments):
            self._parts.append(event.text)
            out.append(shapes.ArgumentsDelta(**self._place(), delta=event.text))
        elif isinstance(event, CallEnd):
            self._is_whole_call = True
            self._close(out)

    def _ensure(
        self, kind: type[shapes.OutputMessage] | type[shapes.ReasoningItem], out: _OUT
    ) -> None:
        """Begins an item unless one of this kind is open."""
        if self._is_open and isinstance(self.response.output[-1], kind):
            return
        self._close(out)
        is_message = kind is shapes.OutputMessage
        prefix = "msg" if is_message else "rs"
        self._open(kind(id=_new_id(prefix), content=[], status="in_progress"), out)
        part = shapes.OutputText("") if is_message else shapes.ReasoningText("")
        out.append(shapes.ContentPartAdded(**self._place(), part=part))

    def _open(self, item: shapes.OutputItem, out: _OUT) -> None:
        output = self.response.output
        output.append(item)
        self._is_open = True
        shown = msgspec.structs.replace(item)
        if not isinstance(shown, shapes.FunctionCall):
            shown.content = []
        number = self._number()
        out.append(
            shapes.OutputItemAdded(sequence_number=number, output_index=len(output) - 1, item=shown)
        )

    def _close(self, out: _OUT, *, is_cut: bool = False) -> None:
        if not self._is_open:
            return
        text = self._settle(is_cut=is_cut)
        item = self.response.output[-1]
        if isinstance(item, shapes.FunctionCall):
            out.append(shapes.ArgumentsDone(**self._place(), name=item.name, arguments=text))
        elif isinstance(item, shapes.OutputMessage):
            logprobs = item.content[0].logprobs
            done = shapes.OutputTextDone(**self._place(), text=text, logprobs=logprobs)
            out.append(done)
            out.append(shapes.ContentPartDone(**self._place(), part=item.content[0]))
        else:
            out.append(shapes.ReasoningTextDone(**self._place(), text=text))
            out.append(shapes.ContentPartDone(**self._place(), part=item.content[0]))
        out.append(
            shapes.OutputItemDone(
                sequence_number=self._number(),
                output_index=len(self.response.output) - 1,
                item=item,
            )
        )

    def _settle(self, *, is_cut: bool) -> str:
        """Gives the open item, if there is one, its last state; returns its text."""
        if not self._is_open:
            return ""
        text = "".join(self._parts)
        item = self.response.output[-1]
        item.status = "incomplete" if is_cut else "completed"
        if isinstance(item, shapes.FunctionCall):
            item.arguments = text
            if not self._is_whole_call:
                item.status = "incomplete"
        elif isinstance(item, shapes.OutputMessage):
            item.content = [shapes.OutputText(text, logprobs=self._logprobs)]
            self._logprobs = []
        else:
            item.content = [shapes.ReasoningText(text)]
            if self._seals_reasoning:
                item.encrypted_content = seal(text)
        self._parts = []
        self._is_open = self._is_whole_call = False
        return text


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
