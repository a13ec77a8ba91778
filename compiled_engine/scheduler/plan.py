"""The first half of a step: inbox, release, match, admit, budget, pages, victim.

A pure function of state, inbox and budget in the sense that matters: static shapes, no loop over
rows, pages or tokens, nothing read back to the host; the state is advanced in place. All ties are
broken by row index, page order or list index, so every rank of a group decides the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.inbox import Inbox, apply_inbox
from compiled_engine.scheduler.keys import page_key
from compiled_engine.scheduler.pages import compact, first_rows, release, take
from compiled_engine.scheduler.prefix import Matches, match
from compiled_engine.scheduler.state import (
    BLOCKED,
    DECODE,
    NO_POSITION,
    PREFILL,
    RETRACTED,
    WAITING,
    GroupState,
    SchedulerShape,
    SchedulerState,
)
from compiled_engine.scheduler.token_store import single_pages

ARRIVAL_BITS = 40  # priority is 16 bits above it, the class two bits above that
CLASS_SHIFT = 57


class Plan(NamedTuple):
    """What this step computes. Rows are [R + 1]."""

    give: Tensor  # i32, tokens of the row in this step
    emit: Tensor  # bool, the row's last known token is computed: one is sampled
    rank: Tensor  # i32, place among the rows with tokens; R for the others
    victim: Tensor  # i32 scalar, row to retract, -1 = none
    admitted: Tensor  # bool
    num_tokens: Tensor  # i32 scalar, tokens of the whole step
    wanted: Tensor  # i32 scalar, tokens that rows on the device could have used
    num_unserved: Tensor  # i32 scalar, rows that wanted tokens and got none


def plan(shape: SchedulerShape, state: SchedulerState, inbox: Inbox, budget: Tensor) -> Plan:
    """Advances the state up to the model run and says which row computes how many tokens.

    Args:
        shape: static sizes.
        state: mutated in place.
        inbox: this step's entries.
        budget: int32 scalar on the device, tokens this step may compute.
    """
    group = state.groups[0]
    apply_inbox(shape, state, inbox)
    is_release_pending = release(shape, state, group)
    budget = budget.clamp_max(shape.max_tokens)
    order = (state.priority.long() << ARRIVAL_BITS) + state.arrival
    admitted = _admit(shape, state, group, order, budget)
    want, is_runnable = _wanted(state)
    row_class = torch.where(state.state == DECODE, 0, torch.where(admitted, 2, 1))
    full_order = order + (row_class.long() << CLASS_SHIFT)
    precedes = (full_order < full_order[:, None]) & is_runnable  # [i, j]: j stands before i
    give = torch.minimum((budget - _before(precedes, want)).clamp_min(0), want)
    give, got, need = _grant_pages(shape, state, group, precedes, give)
    victim = _choose_victim(shape, state, group, order, give, need > got, is_release_pending)
    compact(shape, group)
    has_tokens = give > 0
    rank = torch.where(has_tokens, _before(precedes, has_tokens.int()), shape.max_rows)
    return Plan(
        give=give,
        emit=has_tokens & (state.num_computed + give == state.num_tokens),
        rank=rank.int(),
        victim=victim,
        admitted=admitted,
        num_tokens=give.sum().int(),
        wanted=want.sum().int(),
        num_unserved=((want > 0) & ~has_tokens).sum().int(),
    )


def _before(precedes: Tensor, amount: Tensor) -> Tensor:
    """Sum of `amount` [R + 1] over the rows that stand before each row."""
    return (precedes * amount).sum(1).int()


def _mask_missing(state: SchedulerState) -> Tensor:
    """The row's next token needs a grammar mask that is not here yet."""
    return state.grammar & (state.mask_pos < state.num_tokens)


def _pages(shape: SchedulerShape, tokens: Tensor) -> Tensor:
    return (tokens + shape.page_size - 1) // shape.page_size


def _wanted(state: SchedulerState) -> tuple[Tensor, Tensor]:
    """Tokens each row could compute now [R + 1] i32, and the rows that can run."""
    is_runnable = (state.state == PREFILL) | (state.state == DECODE)
    want = state.num_tokens - state.num_computed - _mask_missing(state).int()
    return torch.where(is_runnable, want.clamp_min(0), 0), is_runnable


def _target(shape: SchedulerShape, state: SchedulerState) -> Tensor:
    """Pages a row is promised: its tokens and one page more, never more than it can fill."""
    tokens = torch.minimum(state.num_tokens + shape.page_size, state.max_len - 1)
    return _pages(shape, tokens)


def _admit(
    shape: SchedulerShape,
    state: SchedulerState,
    group: GroupState,
    order: Tensor,
    budget: Tensor,
) -> Tensor:
    """Moves waiting rows to PREFILL with their cached pages; returns which [R + 1]."""
    is_waiting = (state.state == WAITING) | ((state.state == RETRACTED) & (group.owned == 0))
    rank = ((order < order[:, None]) & is_waiting).sum(1)
    rows = first_rows(shape, is_waiting, rank, shape.num_candidates)  # [A]
    is_real = rows < shape.max_rows
    found = match(shape, state, group, rows)
    is_considered = is_real & ~_is_deferred(shape, state, order, rows, found)
    place = torch.arange(shape.table_width, device=rows.device)
    is_page = (place < found.matched[:, None]) & is_considered[:, None]  # [A, P]
    pages = torch.where(is_page, found.pages, 0)
    num_charged = _charged_pages(shape, group, pages)
    is_admitted = is_considered & _passes_gate(
        shape, state, group, (rows, found), (num_charged, is_considered), budget
    )
    is_page = is_page & is_admitted[:, None]
    pages = torch.where(is_page, pages, 0)
    num_taken = torch.where(is_admitted, num_charged, 0).sum().int()
    group.num_free.sub_(num_taken)
    group.num_free_cached.sub_(num_taken)  # only published pages are found
    group.ref.index_add_(0, pages.flatten(), is_page.flatten().int())
    group.ring_pos.index_put_((pages,), torch.full_like(pages, NO_POSITION))
    target = torch.where(is_admitted, rows, shape.max_rows)
    matched = torch.where(is_admitted, found.matched, 0).int()
    group.block_table.index_put_((target,), pages.int())
    group.owned.index_put_((target,), matched)
    state.num_computed.index_put_((target,), matched * shape.page_size)
    # Forced tokens behind the prompt may be found too.
    in_prompt = torch.minimum(matched * shape.page_size, state.num_prompt[rows])
    cached = torch.where(state.state[rows] == WAITING, in_prompt, state.num_cached[rows])
    state.num_cached.index_put_((target,), torch.where(is_admitted, cached, 0))
    admitted = torch.zeros_like(is_waiting).index_put((target,), is_admitted)
    state.pub_ok.masked_fill_(admitted, shape.prefix_caching)
    state.state.masked_fill_(admitted, PREFILL)
    return admitted


def _is_deferred(
    shape: SchedulerShape,
    state: SchedulerState,
    order: Tensor,
    rows: Tensor,
    found: Matches,
) -> Tensor:
    """Candidates [A] whose next page somebody ahead of them is about to compute."""
    if not shape.prefix_caching:
        return torch.zeros_like(rows, dtype=torch.bool)
    can_use = (found.matched < found.limit) & (rows < shape.max_rows)
    # An earlier candidate that misses the same page and can fill it without a held-back token.
    reachable = state.num_tokens - _mask_missing(state).int()
    is_fillable = (found.matched + 1) * shape.page_size <= reachable[rows]
    is_fillable = is_fillable & (rows < shape.max_rows)
    is_same = (found.first_key[:, None] == found.first_key) & is_fillable
    index = torch.arange(shape.num_candidates, device=rows.device)
    behind_candidate = (is_same & (index < index[:, None])).any(1)
    # A resident prefill row ahead in order whose next page it is.
    all_rows = torch.arange(shape.max_rows + 1, device=rows.device)
    next_page = state.num_computed.long() // shape.page_size
    next_key = page_key(shape, single_pages(shape, state, all_rows, next_page).chain)
    fills = (state.state == PREFILL) & state.pub_ok
    fills = fills & ((next_page + 1) * shape.page_size <= reachable)
    is_same = (found.first_key[:, None] == next_key) & fills & (order < order[rows][:, None])
    return can_use & (behind_candidate | is_same.any(1))


def _charged_pages(shape: SchedulerShape, group: GroupState, pages: Tensor) -> Tensor:
    """Cached pages [A] that would leave the free set, each charged to the first that matched it."""
    index = torch.arange(shape.num_candidates, device=pages.device)
    lanes = index[:, None].expand_as(pages)
    first = torch.full(
        (shape.num_pages,), shape.num_candidates, dtype=torch.int64, device=pages.device
    )
    first = first.scatter_reduce(0, pages.flatten(), lanes.flatten(), "amin")
    is_charged = (pages > 0) & (first[pages] == lanes) & (group.ref[pages] == 0)
    return is_charged.sum(1)


def _passes_gate(
    shape: SchedulerShape,
    state: SchedulerState,
    group: GroupState,
    candidates: tuple[Tensor, Matches],
    considered: tuple[Tensor, Tensor],
    budget: Tensor,
) -> Tensor:
    """Which considered candidates [A] fit, in order: pages for the whole prompt, tokens now."""
    rows, found = candidates
    num_charged, is_considered = considered
    target = _target(shape, state)
    is_resident = (state.state == PREFILL) | (state.state == DECODE) | (state.state == BLOCKED)
    reserve = torch.where(is_resident, (target - group.owned).clamp_min(0), 0).sum()
    charge = num_charged + target[rows] - found.matched
    charge = torch.where(is_considered, charge, 0)
    has_pages = torch.cumsum(charge, 0) <= group.num_free - reserve
    want = state.num_tokens - _mask_missing(state).int()
    want_now = torch.where(is_considered, want[rows] - found.matched * shape.page_size, 0)
    resident_want = _wanted(state)[0].sum()
    has_tokens = torch.cumsum(want_now, 0) - want_now < budget - resident_want
    fails = is_considered & ~(has_pages & has_tokens)
    return torch.cumsum(fails.int(), 0) == 0


def _grant_pages(
    shape: SchedulerShape,
    state: SchedulerState,
    group: GroupState,
    precedes: Tensor,
    give: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes pages for the granted tokens; returns the final grants, pages got, pages needed."""
    need = (_pages(shape, state.num_computed + give) - group.owned).clamp_min(0)
    need = torch.where(give > 0, need, 0)
    offset = _before(precedes, need)
    got = torch.minimum((group.num_free - offset).clamp_min(0), need)
    room = (group.owned + got) * shape.page_size - state.num_computed
    give = torch.minimum(give, room.clamp_min(0))
    take(shape, group, offset, got)
    return give, got, need


def _choose_victim(
    shape: SchedulerShape,
    state: SchedulerState,
    group: GroupState,
    order: Tensor,
    give: Tensor,
    is_short: Tensor,
    is_release_pending: Tensor,
) -> Tensor:
    """The resident to retract after this step (i32 scalar), or -1."""
    is_resident = (state.state == PREFILL) | (state.state == DECODE) | (state.state == BLOCKED)
    is_resident = is_resident & (group.owned > 0)
    last = torch.where(is_resident, order, torch.iinfo(torch.int64).min).amax()
    is_last = is_resident & (order == last)
    precedes_last = (is_short & (order < last)).any()
    is_pressed = is_short.any() & (precedes_last | (give.sum() == 0)) & ~is_release_pending
    rows = torch.arange(shape.max_rows + 1, device=order.device)
    victim = torch.where(is_last, rows, -1).amax()
    return torch.where(is_pressed, victim, -1).int()
