"""Turns token ids into text piece by piece, equal to decoding them all at once.

Owns the two incremental detokenisers and the choice between them. Does not own the tokenizer
(`tokenizer.py`), nor the search for stop strings (the server).

Two ways cover the decoders of language models, each exact and of constant cost per token:

* byte-level (GPT-2 and its children): tokens spell bytes, so an incremental UTF-8 decoder suffices.
* piece by piece (SentencePiece): only a leading space and runs of byte tokens depend on their
  neighbours. Runs are held back until they end: one invalid byte changes how the run decodes.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer as BackendTokenizer

from compiled_engine.errors import ConfigError

# Decoders whose output for a token depends on nothing but its place (first or not) and its run of
# byte tokens.
_PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Detokenizer(Protocol):
    """Text of one answer, released as early as it is certain. Not shared between requests."""

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next token ids and returns the text that is now certain, often ""."""
        ...

    def finish(self) -> str:
        """Returns the text still held back; nothing may be pushed afterwards."""
        ...


class DetokenizerFactory:
    """Makes detokenisers for one tokenizer; holds what they share.

    Raises:
        ConfigError: the tokenizer's decoder cannot be run piece by piece.
    """

    def __init__(self, backend: BackendTokenizer, special_token_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_token_ids = special_token_ids
        steps = _decoder_steps(backend)
        names = [str(step["type"]) for step in steps]
        self._is_byte_level = names == ["ByteLevel"]
        # What tokens spell, as they come up: at most the vocabulary, once for all answers.
        self._spelled: dict[int, bytes] = {}
        if self._is_byte_level:
            return
        _check_piecewise(steps)
        self._byte_token_ids = _byte_token_ids(backend) if "ByteFallback" in names else frozenset()
        self._anchor_id = _find_anchor(backend, special_token_ids | self._byte_token_ids)

    def new(
        self, *, skip_special_tokens: bool = True, kept_ids: Collection[int | None] = ()
    ) -> Detokenizer:
        """A detokeniser for one answer; `kept_ids` stay in its text though they are special."""
        skipped = self._special_token_ids - set(kept_ids) if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return _ByteLevelDetokenizer(self._backend, skipped, self._spelled)
        return _PieceDetokenizer(self._backend, skipped, self._byte_token_ids, self._anchor_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token spells by itself, behind other text; b"" for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _token_bytes(token)
        if token_id in self._byte_token_ids:
            return bytes([int(token[3:5], 16)])
        anchor = self._backend.decode([self._anchor_id], skip_special_tokens=False)
        text = self._backend.decode([self._anchor_id, token_id], skip_special_tokens=False)
        return text[len(anchor) :].encode()


class _ByteLevelDetokenizer:
    """Concatenates the bytes that tokens spell and decodes them as UTF-8."""

    def __init__(
        self, backend: BackendTokenizer, skipped: Collection[int], spelled: dict[int, bytes]
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._spelled = spelled
        # A sequence that is not finished stays inside; a broken one becomes U+FFFD, as in the
        # tokenizer's own whole decode.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False  # a sequence that is not finished

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:  # nearly always
            data = self._bytes_of(ids[0])
        else:
            data = b"".join([self._bytes_of(token_id) for token_id in ids])
        if data.isascii() and not self._is_inside:
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        data = self._spelled.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            data = self._spelled[token_id] = _token_bytes(token)
        return data

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDetokenizer:
    """Decodes finished groups of tokens, each behind an anchor token once text has begun."""

    def __init__(
        self,
        backend: BackendTokenizer,
        skipped: Collection[int],
        byte_token_ids: Collection[int],
        anchor_id: int,
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._byte_token_ids = byte_token_ids
        self._anchor_id = anchor_id
        self._anchor_length = len(backend.decode([anchor_id], skip_special_tokens=False))
        self._has_begun = False
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        num_certain = 0
        for token_id in ids:
            if token_id in self._skipped or self._backend.id_to_token(token_id) is None:
                continue
            self._held.append(token_id)
            if token_id not in self._byte_token_ids:
                num_certain = len(self._held)
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return self._decode(certain)

    def finish(self) -> str:
        held, self._held = self._held, []
        return self._decode(held)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if not self._has_begun:
            self._has_begun = True
            return self._backend.decode(ids, skip_special_tokens=False)
        # Behind an ordinary token nothing is treated as the beginning of the text.
        text = self._backend.decode([self._anchor_id, *ids], skip_special_tokens=False)
        return text[self._anchor_length :]


def _decoder_steps(backend: BackendTokenizer) -> list[dict[str, Any]]:
    """The decoder's description as a flat list of steps; [] where tokens are joined by spaces."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _check_piecewise(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        name = step["type"]
        if name not in _PIECEWISE:
            raise ConfigError(
                f'tokenizer.json: decoder "{name}" cannot be run token by token; supported are '
                f"ByteLevel alone, or any of {', '.join(sorted(_PIECEWISE))}",
                param="tokenizer",
            )
        if name == "Strip" and (step["stop"] or step["start"] > 1):
            raise ConfigError(
                f"tokenizer.json: decoder Strip has start = {step['start']} and stop = "
                f"{step['stop']}; only one leading character can be stripped",
                param="tokenizer",
            )


def _byte_token_ids(backend: BackendTokenizer) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>` that the vocabulary has."""
    spellings = [f"<0x{byte:{form}}>" for byte in range(256) for form in ("02X", "02x")]
    ids = (backend.token_to_id(spelling) for spelling in spellings)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _find_anchor(backend: BackendTokenizer, excluded: frozenset[int]) -> int:
    """An ordinary token that decodes to itself wherever it stands."""
    for token, token_id in sorted(backend.get_vocab().items()):
        is_plain = token.isascii() and token.isalnum() and token_id not in excluded
        if is_plain and backend.decode([token_id], skip_special_tokens=False) == token:
            return token_id
    raise ConfigError("tokenizer.json: no token is made of plain letters", param="tokenizer")


def _token_bytes(token: str) -> bytes:
    """Bytes a byte-level token spells; added tokens may hold characters outside the alphabet."""
    table = _byte_of_symbol()
    try:
        return bytes([table[symbol] for symbol in token])
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1)
def _byte_of_symbol() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest moves above U+0100.

    Source: the byte-to-unicode table of GPT-2, which every byte-level tokenizer shares.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(own)]
    table = {chr(byte): byte for byte in own}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return table
