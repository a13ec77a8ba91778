"""One sampled sequence on the server's side: token events in, parsed pieces of the answer out.

Owns detokenising, the order of parser and stop strings, the end token and the finish reason. Stop
strings are searched in the answer's text only, not in reasoning and not in tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from compiled_engine.errors import EngineError, EngineUnavailableError, InvalidRequestError
from compiled_engine.logprob_data import TokenLogprob, read_records
from compiled_engine.request import Request, TokenEvent
from compiled_engine.server.logprobs import ListedToken, TokenTrace
from compiled_engine.server.parsers.answer import Parser
from compiled_engine.server.parsers.events import CallEnd, CallStart, Content, Event, merged
from compiled_engine.server.protocol import ChoiceFinishReason
from compiled_engine.server.stop_strings import StopMatcher
from compiled_engine.server.validation import Sampling
from compiled_engine.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True):
    """What one event added to one choice; the one with a finish reason is the choice's last."""

    index: int
    events: list[Event]
    finish_reason: ChoiceFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()  # generated tokens that this event added
    logprobs: Sequence[ListedToken] = ()  # of tokens of the text

    @property
    def text(self) -> str:
        """Text of the answer."""
        if len(self.events) == 1 and isinstance(self.events[0], Content):
            return self.events[0].text
        return "".join(event.text for event in self.events if isinstance(event, Content))


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        last.index,
        merged(event for piece in pieces for event in piece.events),
        last.finish_reason,
        last.stop_reason,
        [token_id for piece in pieces for token_id in piece.token_ids],
        [token for piece in pieces for token in piece.logprobs],
    )


def _no_parser() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How the text of an answer is to be read.

    Attributes:
        new_parser: makes a parser for one choice; without one all text is the answer's.
        markers: special tokens that the parser must see.
        max_calls: tool calls after which the answer ends.
        lists_all_tokens: log probabilities list tokens without text too.
    """

    new_parser: Callable[[], Parser | None] = _no_parser
    markers: frozenset[str] = frozenset()
    max_calls: int | None = None
    lists_all_tokens: bool = True


class ChoiceRun:
    """One sampled sequence: engine events in, text that is safe to send out.

    Attributes:
        request: what the engine is given.
        num_tokens: generated tokens, up to and including the one that ended the answer.
        num_reasoning_tokens: those of them that belong to reasoning.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_truncated_tokens: prompt tokens cut off at its beginning; None where that was not asked
            for.
        cache_key: the client's `prompt_cache_key`.
        token_ids: the generated tokens that `num_tokens` counts.
        records: log probabilities of `token_ids`, if they were asked for.
        is_finished: whether the last piece was made.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        sampling: Sampling,
        answer: AnswerFormat | None = None,
    ) -> None:
        params = request.params
        answer = answer or AnswerFormat()
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.num_truncated_tokens: int | None = None
        self.cache_key = sampling.cache_key
        self.token_ids: list[int] = []
        self.records: list[TokenLogprob] = []
        self._prompt_data = b""
        self.is_finished = False
        self._is_prompt_only = sampling.is_prompt_only
        self._trace = None
        if params.logprobs is not None:
            self._trace = TokenTrace(tokenizer, lists_all=answer.lists_all_tokens)
        self._include_stop = sampling.include_stop
        self._grammar_field = sampling.grammar_field
        self._end_token_ids = {*params.stop_token_ids, *tokenizer.eos_token_ids}
        self._detokenizer = tokenizer.new_detokenizer(
            skip_special_tokens=sampling.skip_special_tokens, kept_tokens=answer.markers
        )
        self._matcher = StopMatcher(params.stop, include_stop=sampling.include_stop)
        self._parser = answer.new_parser()
        self._max_calls = answer.max_calls
        self._num_calls = 0
        # The stop string that ended the answer.
        self._matched: str | None = None
        # Text is sent as it is decoded; nothing looks at it and nothing else goes with it.
        has_more = params.stop or self._parser is not None or self._trace is not None
        self._is_plain = not (has_more or self._is_prompt_only)

    def _feed_plain(self, event: TokenEvent) -> Piece:
        """What `feed` comes to in the middle of a plain answer, at a third of its cost."""
        token_ids = event.token_ids
        if event.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        self._prompt_data += event.prompt_logprobs
        text = self._detokenizer.push(token_ids)
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        return Piece(self.index, [Content(text)] if text else [], None, None, token_ids, [])

    def feed(self, event: TokenEvent) -> Piece:
        """Takes one event.

        Raises:
            EngineUnavailableError: the engine gave the request up.
            InvalidRequestError: the engine refused the request.
            EngineError: the engine failed on this request.
        """
        if self._is_plain and event.finish_reason is None:
            return self._feed_plain(event)
        if event.is_refusal:
            reason = event.error or "the engine refused the request"
            raise InvalidRequestError(reason, param=self._grammar_field or None)
        if event.finish_reason == "error":
            raise EngineError(event.error or "the engine failed on this request")
        if event.finish_reason == "abort":
            raise EngineUnavailableError(event.error or "the engine gave the request up")
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self._prompt_data += event.prompt_logprobs
        if self._is_prompt_only:
            self.is_finished = event.finish_reason is not None
            return Piece(self.index, [], "length" if self.is_finished else None)
        out: list[Event] = []
        records = self._records(event)
        is_ended = self._push_tokens(event, out, records)
        token_ids = event.token_ids[: self.num_tokens - len(self.token_ids)]
        self.token_ids += token_ids
        self.records += records[: len(token_ids)]
        if not is_ended and event.finish_reason is not None:
            is_ended = self._push_rest(out)
            if not is_ended:
                self._flush(out)
        self.is_finished = is_ended or event.finish_reason is not None
        stop_reason = self._matched if is_ended else self._stop_token(event)
        finish = self._finish_reason(event, is_ended=is_ended) if self.is_finished else None
        # Most events come to one piece of text, with nothing to merge.
        is_text = len(out) == 1 and isinstance(out[0], Content) and bool(out[0].text)
        events = out if is_text else merged(out)
        listed = self._listed(events)
        return Piece(self.index, events, finish, stop_reason, token_ids, listed)

    def prompt_records(self) -> list[TokenLogprob]:
        """Log probabilities of the prompt behind the position they were asked from.

        There once the first piece is; reading those of a long prompt takes a while.
        """
        params = self.request.params
        scored = self.request.prompt_token_ids[params.logprob_start + 1 :]
        return read_records(self._prompt_data, scored, params.prompt_logprobs or 0)

    def _records(self, event: TokenEvent) -> list[TokenLogprob]:
        num_top = self.request.params.logprobs
        if num_top is None:
            return []
        return read_records(event.logprobs, event.token_ids, num_top)

    def _listed(self, events: list[Event]) -> list[ListedToken]:
        if self._trace is None:
            return []
        num_chars = sum(len(event.text) for event in events if isinstance(event, Content))
        is_cut = self._matched is not None
        return self._trace.release(num_chars, is_last=self.is_finished, is_cut=is_cut)

    def _finish_reason(self, event: TokenEvent, *, is_ended: bool) -> ChoiceFinishReason:
        if event.finish_reason == "length" and not is_ended:
            return "length"
        return "tool_calls" if self._num_calls else "stop"

    def _push_tokens(
        self, event: TokenEvent, out: list[Event], records: Sequence[TokenLogprob]
    ) -> bool:
        """Adds the event's text to `out`; returns whether the answer ended inside it."""
        token_ids = event.token_ids
        num_shown = len(token_ids)
        if self._ended_by_token(event) and not self._include_stop:
            num_shown -= 1
        if not self.request.params.stop and self._parser is None and self._trace is None:
            out.append(Content(self._detokenizer.push(token_ids[:num_shown])))
            self.num_tokens += len(token_ids)
            return False
        for place, token_id in enumerate(token_ids[:num_shown]):
            # One by one, since usage counts tokens up to the end, and those of reasoning.
            self.num_tokens += 1
            was_reasoning = self._is_reasoning
            text = self._detokenizer.push([token_id])
            if self._trace is not None:
                self._trace.push(records[place], text)
            is_ended = self._push_text(text, out)
            self.num_reasoning_tokens += was_reasoning or self._is_reasoning
            if is_ended:
                return True
        if self._trace is not None:
            for record in records[num_shown:]:
                self._trace.push_hidden(record)
        self.num_tokens += len(token_ids) - num_shown
        return False

    def _push_rest(self, out: list[Event]) -> bool:
        """What the detokeniser and the parser hold back, at the end of the tokens."""
        text = self._detokenizer.finish()
        if self._trace is not None:
            self._trace.add_text(text)
        return self._push_text(text, out, is_last=True)

    @property
    def is_ended_by_engine(self) -> bool:
        """Whether no text can end the answer before the engine does."""
        return not self.request.params.stop and self._max_calls is None

    @property
    def has_parser(self) -> bool:
        """Whether the text is searched for reasoning or tool calls."""
        return self._parser is not None

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    def _push_text(self, text: str, out: list[Event], *, is_last: bool = False) -> bool:
        events: list[Event] = [Content(text)]
        if self._parser is not None:
            events = self._parser.feed(text)
            if is_last:
                events += self._parser.finish()
        if self._trace is not None:
            self._trace.claim(events)
        for event in events:
            if isinstance(event, Content):
                if self._push_content(event.text, out):
                    return True
                continue
            self._flush(out)
            if isinstance(event, CallStart) and event.index == self._max_calls:
                return True
            self._num_calls += isinstance(event, CallEnd)
            out.append(event)
        return False

    def _push_content(self, text: str, out: list[Event]) -> bool:
        if self.num_tokens <= self.request.params.min_tokens:
            out.append(Content(self._matcher.skip(text)))
            return False
        result = self._matcher.push(text)
        out.append(Content(result.text))
        self._matched = result.matched
        return result.matched is not None

    def _flush(self, out: list[Event]) -> None:
        """Releases what the search for stop strings holds back."""
        out.append(Content(self._matcher.flush()))

    def _ended_by_token(self, event: TokenEvent) -> bool:
        token_ids = event.token_ids
        return (
            event.finish_reason == "stop"
            and bool(token_ids)
            and token_ids[-1] in self._end_token_ids
        )

    def _stop_token(self, event: TokenEvent) -> int | None:
        """The client's own stop token that ended the answer; the model's end token is not told."""
        if not self._ended_by_token(event):
            return None
        token_id = event.token_ids[-1]
        return token_id if token_id in self.request.params.stop_token_ids else None
