"""Requests of a loop that want log probabilities: what steps must make, and who gets what.

The device finds the prompt positions to score by itself; here their records are put together until
the request's first token, with which they leave. Positions that are computed again after a
retraction are simply written again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from compiled_engine.logprob_data import record_words
from compiled_engine.logprobs import NUM_TOPS, PLACE_WORDS, HostLogprobs
from compiled_engine.outbox import COLUMN_FLAGS, COLUMN_GEN, FLAG_EMITTED
from compiled_engine.request import Request
from compiled_engine.scheduler.state import NO_SCORES
from compiled_engine.step_key import StepKey


class StepLogprobs(NamedTuple):
    """Records by request id, of the requests that gained a token in a step and asked for some."""

    tokens: dict[int, bytes]
    prompts: dict[int, bytes]


NOTHING = StepLogprobs({}, {})


@dataclass
class _Row:
    request_id: int
    gen: int
    num_top: int | None  # None: sampled tokens are not asked for
    num_score_top: int
    first: int  # position of the first scored token
    scores: np.ndarray | None  # [positions, words] int32; None: the prompt is not asked for
    is_known: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    is_delivered: bool = False
    is_over: bool = False


def score_from(request: Request) -> int:
    """Prompt positions from here on must be computed; see `SchedulerState.score_from`."""
    params = request.params
    return NO_SCORES if params.prompt_logprobs is None else params.logprob_start


class LogprobRows:
    """All requests of a loop that want log probabilities, by row."""

    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}

    def seat(self, request: Request, row: int, gen: int) -> None:
        """The request got a row; nothing happens if it wants none."""
        params = request.params
        if params.logprobs is None and params.prompt_logprobs is None:
            return
        scores, num_score_top = None, params.prompt_logprobs or 0
        num_scored = max(0, len(request.prompt_token_ids) - 1 - params.logprob_start)
        if params.prompt_logprobs is not None:
            scores = np.zeros((num_scored, record_words(num_score_top)), np.int32)
        self.rows[row] = _Row(
            request_id=request.request_id,
            gen=gen,
            num_top=params.logprobs,
            num_score_top=num_score_top,
            first=params.logprob_start + 1,
            scores=scores,
            is_known=np.zeros(num_scored, np.bool_),
        )

    def end(self, row: int) -> None:
        """The row's request is over."""
        if row in self.rows:
            self.rows[row].is_over = True

    def leave(self, row: int) -> None:
        """The row is free."""
        self.rows.pop(row, None)

    def extend(self, key: StepKey) -> StepKey:
        """The step that also makes what the rows want."""
        rows = self.rows.values()
        tops = [r.num_top for r in rows if r.num_top is not None and not r.is_over]
        if tops:
            key = key._replace(num_top=_step_top(max(tops)))
        waiting = [r for r in rows if r.scores is not None and not (r.is_over or r.is_delivered)]
        if waiting:
            # The device also scores what it computes again for those that have their scores.
            total = sum(len(r.scores) for r in rows if r.scores is not None)
            key = key._replace(
                num_scored=min(key.num_tokens, total),
                num_score_top=_step_top(max(r.num_score_top for r in waiting)),
            )
        return key

    def take(self, record_rows: np.ndarray, values: HostLogprobs) -> StepLogprobs:
        """Sorts what a step brought; `record_rows` [R + 1, 4] are those of its record."""
        found = StepLogprobs({}, {})
        for place, row in self.rows.items():
            if row.is_over:
                continue
            if row.scores is not None and not row.is_delivered and values.prompt is not None:
                _keep_scores(place, row, values)
            gen, flags = record_rows[place, [COLUMN_GEN, COLUMN_FLAGS]].tolist()
            if gen != row.gen or not flags & FLAG_EMITTED:
                continue
            tokens = b""
            if row.num_top is not None:
                assert values.rows is not None, "a step made no records for a row that asked"
                tokens = _cut(values.rows[place], values.num_top, row.num_top).tobytes()
            found.tokens[row.request_id] = tokens
            if row.scores is not None and not row.is_delivered:
                assert row.is_known.all(), "a prompt position was computed and not scored"
                found.prompts[row.request_id] = row.scores.tobytes()
                row.is_delivered, row.scores = True, row.scores[:, :0].copy()
        return found


def _step_top(num_top: int) -> int:
    return next(size for size in NUM_TOPS if size >= num_top)


def _cut(made: np.ndarray, num_made: int, num_top: int) -> np.ndarray:
    """Records [..., words] with the first `num_top` of their `num_made` likeliest tokens."""
    ids = made[..., : 2 + num_top]
    return np.concatenate((ids, made[..., 2 + num_made : 2 + num_made + num_top]), -1)


def _keep_scores(place: int, row: _Row, values: HostLogprobs) -> None:
    assert row.scores is not None
    assert values.prompt is not None
    labels = values.prompt[:, :PLACE_WORDS]
    mine = np.nonzero((labels[:, 0] == place) & (labels[:, 1] == row.gen))[0]
    made = values.prompt[mine, PLACE_WORDS:]
    index = labels[mine, 2] - row.first
    row.scores[index] = _cut(made, values.num_score_top, row.num_score_top)
    row.is_known[index] = True
