"""Text that a grammar forces, as the tokens that a row can be given at once.

The helper of `grammar_rows`. A grammar rarely leaves a single token, as most texts can be cut in
several ways; but often a single text. That is encoded as the tokenizer would, so that the model
reads what it knows. The last token is left to the model: it may go on beyond the forced text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiled_engine.request import SamplingParams
from compiled_engine.thinking import ThinkingState

# A jump saves its row a step for each token, but makes the step that computes them a mixed one for
# all rows. In tool calls every twentieth token has two or more forced ones behind it, which make up
# a quarter of the text; single ones would be more than twice as many jumps for a third more. The
# number is fixed, so that an answer does not depend on its company.
MIN_FORCED = 2
# No more of a forced text is looked for, for each token that can be taken.
MAX_BYTES_PER_TOKEN = 8


class TextEncoder:
    """Forced text to tokens, for one vocabulary; usable from several threads.

    Args:
        encode: a text's token ids, without what the tokenizer puts around a text.
        token_bytes: text of every token id.
        special_ids: ids that only some grammars let through.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
    ) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self.special_ids = frozenset(special_ids)
        self._first_bytes = np.array([piece[0] if piece else -1 for piece in token_bytes], np.int16)
        self._first_bytes[[i for i in special_ids if i < len(token_bytes)]] = -1

    def only_byte(self, mask: np.ndarray) -> int | None:
        """The byte that every token let through begins with; None if they differ or are special.

        mask: int32 words of 32 token ids each, the lowest first.
        """
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self._first_bytes)]
        found = self._first_bytes[bits.view(bool)]
        if not found.size or found[0] < 0 or (found != found[0]).any():
            return None
        return int(found[0])

    @classmethod
    def from_backend(
        cls, backend: str, token_bytes: Sequence[bytes], special_ids: Collection[int]
    ) -> TextEncoder:
        """Of a tokenizer.json's text."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(backend)
        tokenizer.no_truncation()
        tokenizer.no_padding()

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return cls(encode, token_bytes, special_ids)

    def tokens(self, text: str) -> list[int]:
        """All tokens of `text` but the last, as far as they spell it to the byte."""
        target, ids = text.encode(), self._encode(text)
        found = self._spelling(ids, target)
        if len(found) == len(ids) - 1:
            return found
        # Some tokenizers put a blank in front of every text; a line break takes it.
        ids = self._behind_break(self._encode("\n" + text))
        other = self._spelling(ids, target)
        return other if len(other) == len(ids) - 1 else max(found, other, key=len)

    def _spelling(self, ids: list[int], target: bytes) -> list[int]:
        found: list[int] = []
        place = 0
        for token in ids[:-1]:
            piece = self._token_bytes[token] if token < len(self._token_bytes) else b""
            if not piece or not target.startswith(piece, place):
                break
            found.append(token)
            place += len(piece)
        return found

    def _behind_break(self, ids: list[int]) -> list[int]:
        for place, token in enumerate(ids):
            piece = self._token_bytes[token] if token < len(self._token_bytes) else b""
            if piece.strip(b" ") == b"\n":
                return ids[place + 1 :]
            if piece.strip(b" "):
                break
        return []


@dataclass(frozen=True)
class JumpRule:
    """What one request may be given at once.

    Attributes:
        max_tokens: tokens at once at most.
        max_len: its prompt and answer at most; the last token is always sampled.
        barred_ids: tokens that must be sampled, as they end the request or its grammar knows none.
    """

    max_tokens: int
    max_len: int
    barred_ids: frozenset[int]


def jumps(params: SamplingParams) -> bool:
    """Whether a request can be given tokens at once.

    One that wants log probabilities needs the logits of every token; a bias chooses between ways to
    cut a text into tokens.
    """
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return params.grammar is not None and not (has_logprobs or params.logit_bias)


def jump_rule(
    params: SamplingParams,
    stop_ids: Collection[int],
    encoder: TextEncoder,
    *,
    max_len: int,
    max_tokens: int,
) -> JumpRule:
    """The rule of a request that `jumps`."""
    assert params.grammar is not None
    barred = frozenset(stop_ids)
    if params.grammar.kind != "structural_tag":
        barred |= encoder.special_ids
    return JumpRule(max_tokens=max_tokens, max_len=max_len, barred_ids=barred)


@dataclass(frozen=True)
class Answer:
    """How far an answer is.

    Attributes:
        matcher: has accepted all its tokens.
        tensor: int32 [1, words], a mask that the matcher fills.
        thinking: has taken all its tokens; None where there is no budget.
        position: of its next token, the prompt counted.
    """

    matcher: Any
    tensor: Any
    thinking: ThinkingState | None
    position: int


def forced_text(answer: Answer, encoder: TextEncoder, rule: JumpRule) -> str | None:
    """The text that must come next: byte by byte, while all tokens let through begin with one.

    None: not even one byte is forced, and the tensor holds the mask of the next token.

    The library's own search has no bound, and some grammars force text without end.
    """
    mask, found = answer.tensor.numpy()[0], bytearray()
    ends = [(i // 32, i % 32) for i in rule.barred_ids - encoder.special_ids]
    while len(found) < MAX_BYTES_PER_TOKEN * rule.max_tokens:
        mask.fill(-1)
        answer.matcher.fill_next_token_bitmask(answer.tensor, 0)
        byte = encoder.only_byte(mask)
        can_end = any(mask[word] >> bit & 1 for word, bit in ends)
        if byte is None or can_end or not answer.matcher.accept_string(bytes([byte])):
            break
        found.append(byte)
    if not found:
        return None
    answer.matcher.rollback(len(found))
    return found.decode(errors="ignore")  # the last character may be there in part


def forced_tokens(answer: Answer, encoder: TextEncoder, rule: JumpRule) -> tuple[int, ...] | None:
    """The tokens that come next without being sampled, accepted; empty where it does not pay.

    None: nothing is forced, and the tensor holds the mask of the next token.
    """
    thinking = answer.thinking
    room = min(rule.max_tokens, rule.max_len - 1 - answer.position)
    if room < MIN_FORCED or (thinking is not None and thinking.forced is not None):
        return ()
    text = forced_text(answer, encoder, rule)
    if text is None:
        return None
    if len(text.encode()) <= MIN_FORCED:
        return ()
    ids = encoder.tokens(text)[:room]
    end = next((place for place, token in enumerate(ids) if token in rule.barred_ids), len(ids))
    if end < MIN_FORCED:
        return ()
    taken: list[int] = []
    for token in ids[:end]:
        is_free = thinking is None or thinking.forced is None
        if not (is_free and answer.matcher.accept_token(token)):
            break
        if thinking is not None:
            thinking.take(token)
        taken.append(token)
    return tuple(taken)
