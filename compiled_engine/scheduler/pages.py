"""The page ring: release, take, push before the head, compaction. Dense torch form.

Free pages stand in a ring in the order in which they will be taken: unpublished ones first, then
cached ones, least recently used first. An entry is valid while `ring_pos` of its page names it.
Masked lanes of a scatter go to page 0 or to the dump place behind the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_engine.scheduler.state import (
    ABORTING,
    FINISHED,
    FREE,
    NO_POSITION,
    RETRACTED,
    GroupState,
    SchedulerShape,
    SchedulerState,
)
from compiled_engine.scheduler.token_store import push_token_pages


def release(shape: SchedulerShape, state: SchedulerState, group: GroupState) -> Tensor:
    """Releases the pages of the first F rows that ended or were retracted, in place.

    A page enters the ring once, at its last touch in (row ascending, page descending) order, so
    that a prefix never leaves the cache before what continues it.

    Returns:
        bool scalar: some row still awaits its release.
    """
    row_state = state.state
    has_ended = (row_state == FINISHED) | (row_state == ABORTING)
    is_pending = has_ended | ((row_state == RETRACTED) & (group.owned > 0))
    rank = torch.cumsum(is_pending.int(), 0) - 1
    is_released = is_pending & (rank < shape.max_releases)
    rows = first_rows(shape, is_released, rank, shape.max_releases)
    column = torch.arange(shape.table_width - 1, -1, -1, device=rows.device)
    is_owned = (column < group.owned[rows][:, None]).flatten()  # the dump row owns nothing
    pages = torch.where(is_owned, group.block_table[rows].flip(1).flatten(), 0).long()
    group.ref.index_add_(0, pages, -is_owned.int())
    flat = torch.arange(pages.shape[0], device=pages.device)
    touch = torch.full((shape.num_pages,), NO_POSITION, dtype=torch.int64, device=pages.device)
    touch = touch.scatter_reduce(0, pages, torch.where(is_owned, flat, NO_POSITION), "amax")
    is_last = is_owned & (touch[pages] == flat) & (group.ref[pages] == 0)
    is_published = group.uid[pages] > 0
    push_tail(shape, group, pages, is_last & is_published)
    push_head(shape, group, pages, is_last & ~is_published)
    group.num_free.add_(is_last.sum().int())
    group.num_free_cached.add_((is_last & is_published).sum().int())
    push_token_pages(shape, state, rows, has_ended[rows])
    group.owned.masked_fill_(is_released, 0)
    state.num_computed.masked_fill_(is_released, 0)
    row_state.masked_fill_(is_released & has_ended, FREE)
    return is_pending.sum() > shape.max_releases


def first_rows(shape: SchedulerShape, is_chosen: Tensor, rank: Tensor, count: int) -> Tensor:
    """Rows in order of `rank` [R + 1] as a list [count] i64; unused places hold the dump row."""
    rows = torch.arange(shape.max_rows + 1, device=rank.device)
    listed = torch.full((count + 1,), shape.max_rows, dtype=torch.int64, device=rank.device)
    place = torch.where(is_chosen & (rank < count), rank, count).long()
    listed.index_put_((place,), torch.where(place == count, shape.max_rows, rows))
    return listed[:count]


def push_tail(shape: SchedulerShape, group: GroupState, pages: Tensor, is_pushed: Tensor) -> None:
    """Appends the chosen lanes of `pages` [K], in lane order: taken last."""
    rank = torch.cumsum(is_pushed.long(), 0) - 1
    _write_entries(shape, group, pages, is_pushed, group.tail + rank)
    group.tail.add_(is_pushed.sum())


def push_head(shape: SchedulerShape, group: GroupState, pages: Tensor, is_pushed: Tensor) -> None:
    """Puts the chosen lanes of `pages` [K] before the head, one by one: taken first."""
    rank = torch.cumsum(is_pushed.long(), 0) - 1
    _write_entries(shape, group, pages, is_pushed, group.head - 1 - rank)
    group.head.sub_(is_pushed.sum())


def _write_entries(
    shape: SchedulerShape, group: GroupState, pages: Tensor, is_real: Tensor, position: Tensor
) -> None:
    place = torch.where(is_real, position & (shape.ring_size - 1), shape.ring_size)
    group.ring.index_put_((place,), pages.int())
    target = torch.where(is_real, pages, 0)
    group.ring_pos.index_put_((target,), torch.where(is_real, position, NO_POSITION))


def _valid_entries(shape: SchedulerShape, group: GroupState) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [C] from the head on, their pages [C], and which entries are valid [C]."""
    position = group.head + torch.arange(shape.ring_size, device=group.ring.device)
    pages = group.ring[position & (shape.ring_size - 1)].long()
    return position, pages, (position < group.tail) & (group.ring_pos[pages] == position)


def _listed(shape: SchedulerShape, pages: Tensor, is_real: Tensor, count: int) -> Tensor:
    """The real lanes of `pages` in order, as a list [count]; the rest is page 0."""
    rank = torch.cumsum(is_real.int(), 0) - 1
    place = torch.where(is_real & (rank < count), rank, count).long()
    listed = torch.zeros(count + 1, dtype=torch.int64, device=pages.device)
    listed.index_put_((place,), torch.where(place == count, 0, pages))
    return listed[:count]


def take(shape: SchedulerShape, group: GroupState, offset: Tensor, count: Tensor) -> None:
    """Gives row r the ring's valid entries `offset[r]` to `offset[r] + count[r]`, in place.

    Both are [R + 1] i32, with disjoint ranges that start at 0 together. A published page leaves the
    index. The caller has checked that there are enough free pages.
    """
    position, pages, is_valid = _valid_entries(shape, group)
    total = count.sum()
    rank = torch.cumsum(is_valid.int(), 0) - 1
    is_taken = is_valid & (rank < total)
    limit = min(shape.max_publishes, shape.num_pages)
    taken = _listed(shape, pages, is_taken, limit)
    entry = torch.arange(limit, device=taken.device)
    is_real = entry < total
    inside = (entry[:, None] >= offset) & (entry[:, None] < offset + count)
    rows = torch.arange(shape.max_rows + 1, device=taken.device)
    row = torch.where(is_real, (inside * rows).sum(1), shape.max_rows)
    column = (group.owned[row] + entry - offset[row]).clamp(0, shape.table_width - 1)
    group.block_table.index_put_((row, column), taken.int())
    group.owned.add_(count)
    group.num_free.sub_(total.int())
    group.num_free_cached.sub_((is_real & (group.uid[taken] > 0)).sum().int())
    _unpublish(shape, group, taken)
    ones = is_real.int()
    group.ref.index_put_((taken,), torch.where(is_real, ones, 1))  # ref[0] stays 1
    group.ring_pos.index_put_((taken,), torch.full_like(taken, NO_POSITION))
    last = torch.where(is_taken, position, NO_POSITION).amax()
    group.head.copy_(torch.maximum(group.head, last + 1))


def _unpublish(shape: SchedulerShape, group: GroupState, pages: Tensor) -> None:
    """Takes pages out of the index; unpublished ones and page 0 are left as they are."""
    slot = group.index_slot[pages].long()
    bucket = torch.where(slot >= 0, slot // shape.index_ways, shape.index_buckets)
    way = torch.where(slot >= 0, slot % shape.index_ways, 0)
    zeros = torch.zeros_like(pages)
    group.tpage.index_put_((bucket, way), zeros.int())
    group.tkey.index_put_((bucket, way), zeros)
    group.uid.index_put_((pages,), zeros)
    group.parent_uid.index_put_((pages,), zeros)
    group.index_slot.index_put_((pages,), torch.full_like(pages, -1).int())


def compact(shape: SchedulerShape, group: GroupState) -> None:
    """Rewrites the valid entries at the tail, in order, when dead ones might fill the ring."""
    is_due = group.tail - group.head > shape.ring_size - shape.num_pages
    _, pages, is_valid = _valid_entries(shape, group)
    count = is_valid.sum()
    listed = _listed(shape, pages, is_valid, shape.num_pages)
    place = torch.arange(shape.num_pages, device=listed.device)
    is_moved = is_due & (place < count)
    position = group.tail + place
    at = position & (shape.ring_size - 1)
    group.ring.index_put_((at,), torch.where(is_moved, listed.int(), group.ring[at]))
    target = torch.where(is_moved, listed, 0)
    group.ring_pos.index_put_((target,), torch.where(is_moved, position, NO_POSITION))
    group.head.copy_(torch.where(is_due, group.tail, group.head))
    group.tail.add_(torch.where(is_due, count, 0))
