"""Log probabilities on their way from the device to the client: rows of int32 words.

A record of one token is 2 + 2 k words: the bits of its log probability, its rank (1 is the
likeliest), the ids of the k likeliest tokens from the likeliest on (-1 where a small vocabulary has
no more), and the bits of theirs. No torch: the server reads what the engine wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# OpenAI's word for "as unlikely as can be". JSON has neither minus infinity nor NaN: everything
# below this, and NaN, becomes this.
LOWEST_LOGPROB = -9999.0


def record_words(num_top: int) -> int:
    """Words of a record with `num_top` likeliest tokens."""
    return 2 + 2 * num_top


class TokenLogprob(NamedTuple):
    """What the model thought of one token.

    Attributes:
        token_id: the token.
        logprob: at least `LOWEST_LOGPROB`.
        rank: 1 + the number of tokens that are likelier.
        top: (id, log probability) of the likeliest tokens, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def read_records(data: bytes, token_ids: Iterable[int], num_top: int) -> list[TokenLogprob]:
    """The records of `data`, one for each of `token_ids` in order.

    Raises:
        ValueError: there are more or fewer records than tokens.
    """
    words, floats = memoryview(data).cast("i"), memoryview(data).cast("f")
    width = record_words(num_top)
    starts = range(0, len(words), width)
    return [
        TokenLogprob(
            token_id,
            finite(floats[start]),
            words[start + 1],
            [
                (words[place], finite(floats[place + num_top]))
                for place in range(start + 2, start + 2 + num_top)
                if words[place] >= 0
            ],
        )
        for token_id, start in zip(token_ids, starts, strict=True)
    ]


def finite(logprob: float) -> float:
    """`logprob`, or the lowest one that is told; see `LOWEST_LOGPROB`."""
    # In this order NaN loses too.
    return max(LOWEST_LOGPROB, logprob)
