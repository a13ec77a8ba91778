"""Log probabilities in the shapes of the APIs: which tokens are listed, and where they begin.

Completions list every generated token, the end token included; chats list the tokens of the
message's content alone, as OpenAI says: none of reasoning, of tool calls or of their markers. What
a stop string cuts off is listed nowhere. Values that JSON cannot carry are -9999.0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from compiled_engine.logprob_data import TokenLogprob
from compiled_engine.server.parsers.events import Content, Event, Reasoning
from compiled_engine.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens; `bytes` are its own, also where they are no whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of a message's content, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Tokens of a message's content."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Tokens of a completion's text; the first token of an echoed prompt has null values.

    `top_logprobs` always has the token itself, beside the likeliest ones. `text_offset` counts
    characters (code points) of the choice's text, where the token begins.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    """One token at a prompt's place; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ListedToken(NamedTuple):
    """A token of an answer's text, and the character of that text where it begins."""

    record: TokenLogprob
    offset: int


class _Pending(NamedTuple):
    record: TokenLogprob
    start: int  # of its characters in all text
    end: int


class _Starts:
    """Where tokens begin in text that a detokeniser gives for them, now or with a later one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._length = 0
        self._held = b""

    def is_held(self, token_id: int) -> bool:
        """Whether a token that came without text has its text still to come."""
        is_special = token_id in self._tokenizer.special_token_ids
        return not is_special and self._tokenizer.token_bytes(token_id) != b""

    def push(self, token_id: int, text: str) -> int:
        """The character where the token begins; `text` is what came with it."""
        if text:
            # What stood before belongs to tokens that were held back.
            end, own = self._length + len(text), len(token_text(self._tokenizer, token_id))
            start = max(self._length, end - own)
            self._length, self._held = end, b""
            return start
        start = self._length + len(self._held.decode("utf-8", "ignore"))
        if self.is_held(token_id):
            self._held += self._tokenizer.token_bytes(token_id)
        return start


class TokenTrace:
    """Follows an answer's tokens from detokeniser through parser and stop strings.

    Characters of all text the model wrote are told from those of the answer's content, which is
    what parsers leave of it.

    Args:
        tokenizer: of the model.
        lists_all: also list tokens without text, such as the end token.
    """

    def __init__(self, tokenizer: Tokenizer, *, lists_all: bool) -> None:
        self._starts = _Starts(tokenizer)
        self._lists_all = lists_all
        self._pending: deque[_Pending] = deque()
        self._ready: deque[ListedToken] = deque()
        self._text = ""  # that no event has claimed yet
        self._text_start = 0
        self._num_content = 0  # characters that parsers let through
        self._num_released = 0

    def push(self, record: TokenLogprob, text: str) -> None:
        """The next token, and the text that the detokeniser gave for it."""
        start = self._starts.push(record.token_id, text)
        self._text += text
        if text:
            self._pending.append(_Pending(record, start, self._text_start + len(self._text)))
        elif self._starts.is_held(record.token_id):
            # Its bytes are a part of the character that comes.
            self._pending.append(_Pending(record, start, start + 1))
        else:
            self.push_hidden(record)

    def push_hidden(self, record: TokenLogprob) -> None:
        """The next token, which is no part of the text."""
        if self._lists_all:
            begin = self._text_start + len(self._text)
            self._pending.append(_Pending(record, begin, begin))

    def add_text(self, text: str) -> None:
        """Text that came without a token, at the end."""
        self._text += text

    def claim(self, events: Iterable[Event]) -> None:
        """What the parser made of the text; each event's text is part of it, in order."""
        for event in events:
            if isinstance(event, (Content, Reasoning)) and event.text:
                place, length = self._find(event.text)
                if isinstance(event, Content):
                    self._claim_content(self._text_start + place, length)
                    self._num_content += len(event.text)
                self._text = self._text[place + length :]
                self._text_start += place + length

    def _find(self, text: str) -> tuple[int, int]:
        """Where an event's text stands: at once, or behind what the parser dropped."""
        if self._text.startswith(text):
            return 0, len(text)
        place = self._text.rfind(text)
        if place < 0:
            # White space from before and behind a call may have been joined.
            text = text.lstrip()
            place = self._text.rfind(text)
        return (place, len(text)) if place >= 0 else (0, len(self._text))

    def _claim_content(self, start: int, length: int) -> None:
        pending = self._pending
        while pending and pending[0].start < start + length:
            token = pending.popleft()
            if token.end > start or self._lists_all:
                offset = self._num_content + max(0, token.start - start)
                self._ready.append(ListedToken(token.record, offset))

    def release(self, num_chars: int, *, is_last: bool, is_cut: bool) -> list[ListedToken]:
        """The tokens that go out with the next `num_chars` characters of content.

        Args:
            num_chars: characters sent now.
            is_last: the answer ends here.
            is_cut: a stop string ended it: what stands behind it is dropped.
        """
        self._num_released += num_chars
        if is_last and not is_cut and self._lists_all:
            self._ready += [ListedToken(t.record, self._num_content) for t in self._pending]
        ready, released = self._ready, []
        while ready and (ready[0].offset < self._num_released or (is_last and not is_cut)):
            released.append(ready.popleft())
        return released


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ListedToken], num_top: int
) -> ChatLogprobs:
    """The tokens of a message, or of a part of it, with their `num_top` likeliest ones."""

    def entry(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        spelled = tokenizer.token_bytes(token_id)
        return spelled.decode("utf-8", "replace"), logprob, list(spelled)

    return ChatLogprobs(
        [
            ContentLogprob(
                *entry(record.token_id, record.logprob),
                [TopLogprob(*entry(*pair)) for pair in record.top[:num_top]],
            )
            for record, _ in tokens
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Iterable[tuple[int, TokenLogprob | None, int]],
    num_top: int,
) -> CompletionLogprobs:
    """The tokens of a completion, or of a part of it.

    Args:
        tokenizer: of the model.
        tokens: id, record and text offset of each; no record for the first of a prompt.
        num_top: likeliest tokens to list.
    """
    made = CompletionLogprobs([], [], [], [])
    for token_id, record, offset in tokens:
        text = token_text(tokenizer, token_id)
        made.tokens.append(text)
        made.text_offset.append(offset)
        if record is None:
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for other, logprob in record.top[:num_top]:
            # Tokens may look alike where their bytes are no whole characters: the likelier stays.
            top.setdefault(token_text(tokenizer, other), logprob)
        top[text] = record.logprob
        made.token_logprobs.append(record.logprob)
        made.top_logprobs.append(top)
    return made


def prompt_logprobs(
    tokenizer: Tokenizer, records: Sequence[TokenLogprob], num_top: int
) -> PromptLogprobs:
    """Every token of a prompt by vLLM's shape: null for the first, then id -> what it is worth."""
    made: PromptLogprobs = [None]
    for record in records:
        text = token_text(tokenizer, record.token_id)
        place = {str(record.token_id): PromptLogprob(record.logprob, record.rank, text)}
        for rank, (token_id, logprob) in enumerate(record.top[:num_top], start=1):
            text = token_text(tokenizer, token_id)
            place.setdefault(str(token_id), PromptLogprob(logprob, rank, text))
        made.append(place)
    return made


def token_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> list[int]:
    """The character of the decoded text where each token begins."""
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip_special_tokens)
    starts = _Starts(tokenizer)
    return [starts.push(token_id, detokenizer.push([token_id])) for token_id in token_ids]
