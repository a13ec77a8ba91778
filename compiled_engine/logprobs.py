"""Log probabilities of a step: made on the device where a row asked for them, and their way out.

Of sampled tokens there is one record (see `logprob_data`) a row; of prompts one for each scored
position, made in chunks of positions so that logits of a whole prompt never exist. They are copied
to the host behind the step and read with its record, one step later. Steps in which no row asks
launch nothing of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_engine.custom_ops.sampling import top_logprobs
from compiled_engine.logprob_data import record_words
from compiled_engine.request import MAX_LOGPROBS
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState

# Likeliest tokens that steps record: each is a step of its own kind, so there are few.
NUM_TOPS = (5, MAX_LOGPROBS)
# Positions scored at once are as many as a step has rows, but at least these.
MIN_CHUNK = 16
# Words in front of the record of a prompt position: row, generation, position of the scored token.
PLACE_WORDS = 3


def records(logits: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    """Records of the chosen tokens, [S, record_words(num_top)] i32.

    Args:
        logits: [S, vocab], real columns only.
        chosen: [S] integer token ids.
        num_top: likeliest tokens of each record; those a small vocabulary lacks have the id -1.
    """
    count = min(num_top, logits.shape[1])
    ids, best, picked, rank = top_logprobs(logits, chosen, count)
    if count < num_top:
        ids = torch.nn.functional.pad(ids, (0, num_top - count), value=-1)
        best = torch.nn.functional.pad(best, (0, num_top - count))
    columns = (picked[:, None].view(torch.int32), rank[:, None], ids, best.view(torch.int32))
    return torch.cat(columns, 1)


def row_records(
    logits: Tensor, tokens: Tensor, seq_rows: Tensor, vocab_size: int, num_top: int
) -> Tensor:
    """Records of the sampled tokens by row, [R + 1, record_words(num_top)] i32.

    Args:
        logits: [S, padded vocab], as the model gave them.
        tokens: [R + 1, 1] i32, sampled.
        seq_rows: [S] i32, row of each place; the dump row where unused.
        vocab_size: real token ids.
        num_top: see `records`.
    """
    rows = seq_rows.long()
    # A row without a valid token gets the record of some token, which nobody reads.
    chosen = tokens[:, 0][rows].clamp(0, vocab_size - 1)
    made = records(logits[:, :vocab_size], chosen, num_top)
    out = made.new_zeros(tokens.shape[0], made.shape[1])
    return out.index_put((rows,), made)


class ScoredPlaces(NamedTuple):
    """Tokens of a step whose next prompt token is scored; P places."""

    places: Tensor  # [P] i64, among the step's tokens
    chosen: Tensor  # [P] i64, the token that follows; 0 where unused
    labels: Tensor  # [P, PLACE_WORDS] i32; row -1 where unused


def scored_places(
    shape: SchedulerShape,
    state: SchedulerState,
    token_rows: Tensor,
    positions: Tensor,
    max_scored: int,
) -> ScoredPlaces:
    """Finds the tokens of a step whose row wants the next prompt token scored, in their order.

    Args:
        shape: static sizes.
        state: read only.
        token_rows: [T] i64, the dump row past the end.
        positions: [T] i64.
        max_scored: places of the result; at least as many as there are such tokens. On a CPU the
            result has no unused places.
    """
    is_wanted = (token_rows < shape.max_rows) & (positions >= state.score_from[token_rows])
    is_wanted &= positions + 1 < state.num_prompt[token_rows]
    if is_wanted.is_cuda:
        order = is_wanted.to(torch.uint8).sort(descending=True, stable=True).indices
        places = order[:max_scored]
    else:
        places = is_wanted.nonzero().flatten()
    is_real = is_wanted[places]
    rows = token_rows[places]
    following = torch.where(is_real, positions[places] + 1, 0)
    stored = state.token_table[rows, following // shape.token_page_size].long()
    chosen = state.token_pages[stored, following % shape.token_page_size].long()
    labels = (torch.where(is_real, rows, -1), state.gen[rows], following)
    return ScoredPlaces(
        places=places,
        chosen=torch.where(is_real, chosen, 0),
        labels=torch.stack([label.int() for label in labels], 1),
    )


def prompt_records(
    scored: ScoredPlaces,
    residual: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    num_top: int,
    chunk: int,
) -> Tensor:
    """Labels and records of the scored places, [P, PLACE_WORDS + record_words(num_top)] i32.

    Args:
        scored: the places.
        residual: [T, hidden], of all tokens of the step.
        head: residual [S, hidden] to logits [S, padded vocab].
        vocab_size: real token ids.
        num_top: see `records`.
        chunk: positions whose logits exist at once.
    """
    made = [
        records(head(residual[places])[:, :vocab_size], chosen, num_top)
        for places, chosen in zip(
            scored.places.split(chunk), scored.chosen.split(chunk), strict=True
        )
    ]
    return torch.cat((scored.labels, torch.cat(made)), 1)


@dataclass(frozen=True)
class HostLogprobs:
    """What one step brought.

    Attributes:
        rows: [R + 1, record_words(num_top)] int32; None if no sampled token was asked for.
        num_top: likeliest tokens of these.
        prompt: [P, PLACE_WORDS + record_words(num_score_top)] int32; None if nothing was scored.
        num_score_top: likeliest tokens of these.
    """

    rows: np.ndarray | None
    num_top: int
    prompt: np.ndarray | None
    num_score_top: int


class _Sent(NamedTuple):
    rows: Tensor | None
    num_top: int
    prompt: Tensor | None
    num_score_top: int
    event: torch.cuda.Event | None


class LogprobOutbox:
    """Records on their way to the host, in the order of their steps.

    Args:
        num_rows: R + 1.
        device: where steps run.

    Attributes:
        staged: [num_rows, words] i32, where a step leaves the records of its rows; captured steps
            write there too.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        width = record_words(MAX_LOGPROBS)
        self.staged = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._prompt: Tensor | None = None
        self._unread: deque[_Sent] = deque()

    def stage_rows(self, made: Tensor) -> None:
        """Puts records where `note_launch` takes them from; may be captured."""
        self.staged[:, : made.shape[1]].copy_(made)

    def stage_prompt(self, made: Tensor) -> None:
        """The same for scored prompts; not in captured steps."""
        self._prompt = made

    def note_launch(self, num_top: int, num_score_top: int) -> None:
        """Queues the copies of a step that was launched on the current stream.

        Args:
            num_top: likeliest tokens of the rows' records; 0 if it made none.
            num_score_top: of the prompts' records.
        """
        rows = self._to_host(self.staged[:, : record_words(num_top)]) if num_top else None
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt = self._to_host(prompt)
        event = None
        if self.staged.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._unread.append(_Sent(rows, num_top, prompt, num_score_top, event))

    def read(self) -> HostLogprobs:
        """What the oldest unread step brought; waits for its copies, which its record follows."""
        sent = self._unread.popleft()
        if sent.event is not None:
            sent.event.synchronize()
        rows = None if sent.rows is None else sent.rows.numpy()
        prompt = None if sent.prompt is None else sent.prompt.numpy()
        return HostLogprobs(rows, sent.num_top, prompt, sent.num_score_top)

    def _to_host(self, made: Tensor) -> Tensor:
        if not made.is_cuda:
            return made.clone()
        # The allocator of pinned memory keeps what is freed, once its copies are done.
        target = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return target.copy_(made, non_blocking=True)
