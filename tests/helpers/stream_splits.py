"""The ways in which a text may be cut into the pieces of a stream."""

from __future__ import annotations

import random
from collections.abc import Iterator

MAX_TWO_WAY = 300


def stream_splits(text: str) -> Iterator[list[str]]:
    """Pieces of `text`: characters, words, all at once, every two-way cut, random short runs.

    A long text is cut in two at `MAX_TWO_WAY` places only.
    """
    yield list(text)
    yield words_of(text)
    yield [text]
    for index in range(0, len(text) + 1, max(1, len(text) // MAX_TWO_WAY)):
        yield [text[:index], text[index:]]
    rng = random.Random(0)
    for _ in range(5):
        yield random_pieces(text, rng)


def words_of(text: str) -> list[str]:
    """Pieces about as long as tokens: a word with its space, a bracket, a run of letters."""
    pieces: list[str] = []
    for character in text:
        if pieces and character.isalnum() and pieces[-1][-1].isalnum() and len(pieces[-1]) < 6:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


def random_pieces(text: str, rng: random.Random) -> list[str]:
    """Pieces of two to seven words each."""
    words, pieces = words_of(text), []
    while words:
        size = rng.randint(2, 7)
        pieces.append("".join(words[:size]))
        words = words[size:]
    return pieces
