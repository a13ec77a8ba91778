"""The way in: submits, aborts and grammar masks of one step, as fixed-size tensors.

`InboxBuilder` lives on the host and fills the tensors; `apply_inbox` is the device half, the first
thing `plan` does. A prompt arrives in pieces of one token page; the row becomes WAITING in the step
that brings its last piece. Entries of one step take effect in the order submits, aborts, masks.
A mask can bring tokens that its grammar forces in front of the position it serves: they are
appended to the row, which computes them as it computes a chunk of a prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from compiled_engine.scheduler.keys import page_term, root_sum
from compiled_engine.scheduler.state import (
    ABORTING,
    BLOCKED,
    DECODE,
    ERROR_FORCED_ELSEWHERE,
    ERROR_MASK_WITHOUT_GRAMMAR,
    ERROR_SUBMIT_TO_USED_ROW,
    FREE,
    NO_SCORES,
    PREFILL,
    RETRACTED,
    WAITING,
    SchedulerShape,
    SchedulerState,
)
from compiled_engine.scheduler.token_store import (
    Runs,
    begin_runs,
    fresh_pages,
    pop_token_pages,
    store_runs,
)


class Inbox(NamedTuple):
    """One step's entries; the first column of each table is 1 for a real entry."""

    # [max_submits, 10] i64: real, row, gen, arrival, priority, salt, num_prompt, max_len, grammar,
    # score_from
    submits: Tensor
    pieces: Tensor  # [max_pieces, 5] i64: real, row, index of the token page, length, salt
    piece_tokens: Tensor  # [max_pieces, token_page_size] i32
    aborts: Tensor  # [max_aborts, 3] i64: real, row, gen
    masks: Tensor  # [max_masks, 5] i64: real, row, gen, position, number of forced tokens
    forced_tokens: Tensor  # [max_masks, max_forced] i32


@dataclass(frozen=True, kw_only=True)
class SubmitEntry:
    """A request enters `row`, which must be FREE on the device."""

    row: int
    gen: int
    arrival: int
    priority: int
    salt: int
    prompt: list[int] = field(repr=False)
    max_len: int
    grammar: bool = False
    score_from: int = NO_SCORES


@dataclass(frozen=True, kw_only=True)
class AbortEntry:
    """The request of generation `gen` in `row` shall end."""

    row: int
    gen: int


@dataclass(frozen=True, kw_only=True)
class MaskEntry:
    """A grammar mask of `row` is on the device, for every token up to the one at `position`.

    The tokens `forced` are the row's next ones; they end in front of `position`.
    """

    row: int
    gen: int
    position: int
    forced: tuple[int, ...] = ()


Entry = SubmitEntry | AbortEntry | MaskEntry
_LateEntry = TypeVar("_LateEntry", AbortEntry, MaskEntry)


class InboxBuilder:
    """Queues entries on the host and hands out one step's worth at a time."""

    def __init__(self, shape: SchedulerShape) -> None:
        self.shape = shape
        self._submits: deque[SubmitEntry] = deque()
        self._num_pieces_sent = 0
        self._aborts: deque[AbortEntry] = deque()
        self._masks: deque[MaskEntry] = deque()
        self._empty = self._tensors({})

    @property
    def is_empty(self) -> bool:
        """Nothing waits to be handed out."""
        return not (self._submits or self._aborts or self._masks)

    def submit(
        self,
        *,
        row: int,
        gen: int,
        arrival: int,
        priority: int,
        salt: int,
        prompt: list[int],
        max_len: int,
        grammar: bool = False,
        score_from: int = NO_SCORES,
    ) -> None:
        """Queues a request; `prompt` has at least one token and fits `max_len - 1`."""
        assert 0 < len(prompt) < max_len <= self.shape.max_model_len, (len(prompt), max_len)
        entry = SubmitEntry(
            row=row,
            gen=gen,
            arrival=arrival,
            priority=priority,
            salt=salt,
            prompt=prompt,
            max_len=max_len,
            grammar=grammar,
            score_from=score_from,
        )
        self._submits.append(entry)

    def abort(self, row: int, gen: int) -> None:
        """Queues an abort.

        A prompt that is still being uploaded is cut where it is, and masks of the row that wait are
        dropped: their tokens would stand elsewhere then.
        """
        kept = (entry for entry in self._masks if (entry.row, entry.gen) != (row, gen))
        self._masks = deque(kept)
        for place, entry in enumerate(self._submits):
            if entry.row == row and entry.gen == gen:
                sent = self._num_pieces_sent * self.shape.token_page_size if place == 0 else 0
                cut = entry.prompt[: max(sent, 1)]
                self._submits[place] = replace(entry, prompt=cut)
        self._aborts.append(AbortEntry(row=row, gen=gen))

    def mask(self, row: int, gen: int, position: int, forced: tuple[int, ...] = ()) -> None:
        """Queues the arrival of a grammar mask, which serves up to `position`.

        Args:
            row: whose.
            gen: of its request.
            position: last one that the mask serves; with forced tokens the one behind them.
            forced: tokens that the row gets before it; one of them and the next must be left to be
                sampled within the row's `max_len`. At most `max_forced`.
        """
        assert len(forced) <= self.shape.max_forced, len(forced)
        self._masks.append(MaskEntry(row=row, gen=gen, position=position, forced=forced))

    def take(self) -> tuple[Inbox, list[Entry]]:
        """The next step's tensors, and the entries that take effect in it, in order."""
        if self.is_empty:
            return self._empty, []
        pieces, submits = self._take_pieces()
        pending = {(entry.row, entry.gen) for entry in self._submits}
        aborts = self._take_ready(self._aborts, self.shape.max_aborts, pending)
        masks = self._take_ready(self._masks, self.shape.max_masks, pending)
        applied: list[Entry] = [*submits, *aborts, *masks]
        inbox = self._tensors(
            {"submits": submits, "pieces": pieces, "aborts": aborts, "masks": masks}
        )
        return inbox, applied

    def _take_pieces(self) -> tuple[list[tuple[SubmitEntry, int]], list[SubmitEntry]]:
        size = self.shape.token_page_size
        pieces: list[tuple[SubmitEntry, int]] = []
        submits: list[SubmitEntry] = []
        while self._submits and len(submits) < self.shape.max_submits:
            entry = self._submits[0]
            total = -(-len(entry.prompt) // size)
            while self._num_pieces_sent < total and len(pieces) < self.shape.max_pieces:
                pieces.append((entry, self._num_pieces_sent))
                self._num_pieces_sent += 1
            if self._num_pieces_sent < total:
                break
            submits.append(self._submits.popleft())
            self._num_pieces_sent = 0
        return pieces, submits

    @staticmethod
    def _take_ready(
        queue: deque[_LateEntry], limit: int, pending: set[tuple[int, int]]
    ) -> list[_LateEntry]:
        """Up to `limit` entries whose submit is not still on its way; the rest keep their order."""
        ready: list[_LateEntry] = []
        later: list[_LateEntry] = []
        while queue and len(ready) < limit:
            entry = queue.popleft()
            (later if (entry.row, entry.gen) in pending else ready).append(entry)
        queue.extendleft(reversed(later))
        return ready

    def _tensors(self, entries: dict[str, list[Any]]) -> Inbox:
        shape = self.shape
        submits = np.zeros((shape.max_submits, 10), np.int64)
        submits[:, 1] = shape.max_rows
        for i, s in enumerate(entries.get("submits", [])):
            submits[i] = (
                1, s.row, s.gen, s.arrival, s.priority, s.salt, len(s.prompt), s.max_len, s.grammar,
                s.score_from,
            )  # fmt: skip
        pieces = np.zeros((shape.max_pieces, 5), np.int64)
        pieces[:, 1] = shape.max_rows
        size = shape.token_page_size
        piece_tokens = np.zeros((shape.max_pieces, size), np.int32)
        for i, (s, index) in enumerate(entries.get("pieces", [])):
            part = s.prompt[index * size : (index + 1) * size]
            pieces[i] = (1, s.row, index, len(part), s.salt)
            piece_tokens[i, : len(part)] = part
        aborts = np.zeros((shape.max_aborts, 3), np.int64)
        aborts[:, 1] = shape.max_rows
        for i, a in enumerate(entries.get("aborts", [])):
            aborts[i] = (1, a.row, a.gen)
        masks = np.zeros((shape.max_masks, 5), np.int64)
        masks[:, 1] = shape.max_rows
        forced_tokens = np.zeros((shape.max_masks, shape.max_forced), np.int32)
        for i, m in enumerate(entries.get("masks", [])):
            masks[i] = (1, m.row, m.gen, m.position, len(m.forced))
            forced_tokens[i, : len(m.forced)] = m.forced
        tables = (submits, pieces, piece_tokens, aborts, masks, forced_tokens)
        return Inbox(*(torch.from_numpy(table) for table in tables))


def apply_inbox(shape: SchedulerShape, state: SchedulerState, inbox: Inbox) -> None:
    """Writes one step's entries into the state, in place."""
    is_piece = (inbox.pieces[:, 0] == 1) & (state.state[inbox.pieces[:, 1]] == FREE)
    _apply_submits(shape, state, inbox.submits)
    real, row, gen = inbox.aborts.unbind(1)
    row_state = state.state[row]
    hit = (real == 1) & (state.gen[row] == gen) & _is_live(row_state)
    target = torch.where(hit, row, shape.max_rows)
    state.state.index_put_((target,), torch.full_like(row_state, ABORTING))
    runs = _apply_masks(shape, state, inbox.masks, inbox.forced_tokens)
    _store_tokens(shape, state, inbox, is_piece, runs)
    # The dump row took the masked lanes: it must never look like a request.
    is_dump = torch.arange(shape.max_rows + 1, device=row.device) == shape.max_rows
    state.state.masked_fill_(is_dump, FREE)
    mask_missing = state.grammar & (state.mask_pos < state.num_tokens)
    state.state.masked_fill_((state.state == BLOCKED) & ~mask_missing, DECODE)


def _is_live(row_state: Tensor) -> Tensor:
    """WAITING, PREFILL, DECODE, BLOCKED or RETRACTED."""
    return (row_state >= WAITING) & (row_state <= RETRACTED)


def _store_tokens(
    shape: SchedulerShape, state: SchedulerState, inbox: Inbox, is_piece: Tensor, runs: Runs
) -> None:
    """Takes token pages for the pieces where `is_piece`, then for the runs, and fills them.

    Pages of both are written into the table at once: behind a second write compilers copy it.
    """
    _, row, index, *_ = inbox.pieces.unbind(1)
    is_fresh, column = fresh_pages(shape, runs)
    stored, is_given = pop_token_pages(shape, state, torch.cat((is_piece, is_fresh)))
    target = torch.where(is_given, torch.cat((row, runs.row)), shape.max_rows)
    state.token_table.index_put_((target, torch.cat((index, column))), stored.int())
    num_pieces = row.shape[0]
    _store_pieces(shape, state, inbox, stored[:num_pieces], is_given[:num_pieces])
    store_runs(shape, state, runs)


def _store_pieces(
    shape: SchedulerShape, state: SchedulerState, inbox: Inbox, stored: Tensor, is_real: Tensor
) -> None:
    """Puts prompt pieces into the token pages `stored` and forms their chain sums."""
    _, row, index, length, salt = inbox.pieces.unbind(1)
    state.token_pages.index_put_((stored,), inbox.piece_tokens)
    per_store = shape.token_page_size // shape.page_size
    tokens = inbox.piece_tokens.view(-1, per_store, shape.page_size)
    place = torch.arange(per_store, device=row.device)
    page = index[:, None] * per_store + place  # [max_pieces, per_store]
    is_full = ((place + 1) * shape.page_size <= length[:, None]) & is_real[:, None]
    terms = torch.where(is_full, page_term(tokens, page, state.place_steps), 0)
    # Pieces of one row in one step continue each other: add the totals of the earlier ones.
    same = (row[:, None] == row) & is_real[:, None] & is_real
    earlier = (same & (index[:, None] > index)).long()
    before = (earlier * terms.sum(1)).sum(1)
    first = torch.where(same, index, shape.token_table_width).amin(1)
    first = first.clamp_max(shape.token_table_width - 1)
    previous = state.token_table[row, (first - 1).clamp_min(0)].long()
    base = torch.where(first == 0, root_sum(salt), state.chain[previous, per_store - 1])
    chain = (base + before)[:, None] + torch.cumsum(terms, 1)
    state.chain.index_put_((stored,), chain)


def _apply_submits(shape: SchedulerShape, state: SchedulerState, submits: Tensor) -> None:
    real, row, gen, arrival, priority, salt, num_prompt, max_len, *rest = submits.unbind(1)
    grammar, score_from = rest
    is_real = (real == 1) & (state.state[row] == FREE)
    dropped = ((real == 1) & ~is_real).sum().int()
    state.error[ERROR_SUBMIT_TO_USED_ROW : ERROR_SUBMIT_TO_USED_ROW + 1].add_(dropped)
    target = torch.where(is_real, row, shape.max_rows)

    def put(tensor: Tensor, value: Tensor | int) -> None:
        filled = value if isinstance(value, Tensor) else torch.full_like(row, value)
        tensor.index_put_((target,), filled.to(tensor.dtype))

    put(state.state, WAITING)
    put(state.gen, gen)
    put(state.arrival, arrival)
    put(state.priority, priority)
    put(state.salt, salt)
    put(state.num_prompt, num_prompt)
    put(state.max_len, max_len)
    put(state.grammar, grammar)
    put(state.score_from, score_from)
    put(state.num_tokens, num_prompt)
    put(state.num_computed, 0)
    put(state.mask_pos, -1)
    put(state.pub_ok, 0)
    put(state.num_cached, 0)


def _apply_masks(
    shape: SchedulerShape, state: SchedulerState, masks: Tensor, forced_tokens: Tensor
) -> Runs:
    """Notes the masks; returns what they bring, which the rows know of and nobody has stored."""
    real, row, gen, position, num_forced = masks.unbind(1)
    is_ours = (real == 1) & (state.gen[row] == gen) & _is_live(state.state[row])
    wrong = (is_ours & ~state.grammar[row]).sum().int()
    state.error[ERROR_MASK_WITHOUT_GRAMMAR : ERROR_MASK_WITHOUT_GRAMMAR + 1].add_(wrong)
    is_ours = is_ours & state.grammar[row]
    is_elsewhere = (num_forced > 0) & (state.num_tokens[row] + num_forced != position)
    dropped = (is_ours & is_elsewhere).sum().int()
    state.error[ERROR_FORCED_ELSEWHERE : ERROR_FORCED_ELSEWHERE + 1].add_(dropped)
    is_ours = is_ours & ~is_elsewhere
    has_forced = is_ours & (num_forced > 0)
    runs = begin_runs(shape, state, row, forced_tokens, torch.where(has_forced, num_forced, 0))
    target = torch.where(has_forced & (state.state[row] == BLOCKED), row, shape.max_rows)
    state.state.index_put_((target,), torch.full_like(state.state[row], PREFILL))
    rows = torch.arange(shape.max_rows + 1, device=row.device)
    given = torch.where((rows[:, None] == row) & is_ours, position, -1).amax(1)
    state.mask_pos.copy_(torch.maximum(state.mask_pos, given.int()))
    return runs
