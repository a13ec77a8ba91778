"""The prefix index: matching waiting rows, publishing completed pages. Dense torch form.

The index is a table of buckets, all ways of a bucket compared at once. A hit needs an equal key,
equal tokens and the parent's publication number, so a colliding key is a miss and never somebody
else's KV. Publication numbers are never used again; page ids are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.keys import page_key
from compiled_engine.scheduler.pages import push_head
from compiled_engine.scheduler.state import (
    NO_POSITION,
    GroupState,
    SchedulerShape,
    SchedulerState,
)
from compiled_engine.scheduler.token_store import PageView, row_pages, single_pages


class Matches(NamedTuple):
    """What the index holds of each candidate."""

    pages: Tensor  # [A, P] i64, the pages found; 0 from the first miss on
    matched: Tensor  # [A] i64, pages found from the start on
    first_key: Tensor  # [A] i64, key of the first page not found
    limit: Tensor  # [A] i64, pages that may be matched at most


class Lookup(NamedTuple):
    """Result of asking the index for keys."""

    page: Tensor  # i64, 0 = not there
    is_found: Tensor  # bool, the key is there
    has_equal_tokens: Tensor  # bool


def lookup(shape: SchedulerShape, group: GroupState, key: Tensor, tokens: Tensor) -> Lookup:
    """Asks for keys of any shape [...] with their tokens [..., page_size]."""
    bucket = key & (shape.index_buckets - 1)
    is_hit = (group.tkey[bucket] == key.unsqueeze(-1)) & (group.tpage[bucket] > 0)
    page = (group.tpage[bucket] * is_hit).sum(-1)  # a key stands at most once in its bucket
    has_equal_tokens = (group.page_tokens[page] == tokens).all(-1)
    return Lookup(page, page > 0, has_equal_tokens)


def match(
    shape: SchedulerShape, state: SchedulerState, group: GroupState, candidates: Tensor
) -> Matches:
    """Finds the cached prefix of each candidate row [A], all pages at once. Reads only."""
    view = row_pages(shape, state, candidates)
    key = page_key(shape, view.chain)  # [A, P]
    found = lookup(shape, group, key, view.tokens)
    reusable = torch.minimum(state.num_tokens[candidates] - 1, state.score_from[candidates])
    limit = reusable.long().clamp_min(0) // shape.page_size
    uid = group.uid[found.page]
    root = -(state.salt[candidates] + 1)
    before = torch.cat((root[:, None], uid[:, :-1]), 1)
    place = torch.arange(shape.table_width, device=key.device)
    is_match = found.is_found & found.has_equal_tokens & (place < limit[:, None])
    is_match = is_match & (group.parent_uid[found.page] == before)
    matched = torch.where(is_match, shape.table_width, place).amin(1)
    if not shape.prefix_caching:
        matched = torch.zeros_like(matched)
    first_key = key.gather(1, matched.clamp_max(shape.table_width - 1)[:, None]).squeeze(1)
    pages = torch.where(place < matched[:, None], found.page, 0)
    return Matches(pages, matched, first_key, limit)


def forget_all(group: GroupState) -> None:
    """Unpublishes every page, in place: nothing matches until something is published anew.

    For a scheduler whose rows are all FREE: a row that runs on would publish children of pages that
    are gone. The free pages stay as they are; publication numbers go on, so none is used again.
    """
    group.uid.zero_()
    group.parent_uid.zero_()
    group.index_slot.fill_(-1)
    group.tkey.zero_()
    group.tpage.zero_()


class _Places(NamedTuple):
    """Pages that this step completed, as a list of K places in (row, page) order."""

    row: Tensor  # [K] i64, dump row where unused
    page: Tensor  # [K] i64, index in the row's table
    is_real: Tensor  # [K] bool
    is_first: Tensor  # [K] bool, first of its row in this step
    start: Tensor  # [K] i64, list index of its row's first place
    own: Tensor  # [K] i64, page id the row computed


def publish(
    shape: SchedulerShape,
    state: SchedulerState,
    group: GroupState,
    first: Tensor,
    last: Tensor,
) -> None:
    """Publishes pages `first[r]` to `last[r]` of each row, in place; both [R + 1] i64.

    A page whose content is published already is swapped for the published one. A collision, a full
    bucket or a broken parent clears the row's `pub_ok`: it goes on with private pages.
    """
    places = _list_places(shape, group, first, last)
    view = single_pages(shape, state, places.row, places.page)
    key = page_key(shape, view.chain)
    found = lookup(shape, group, key, view.tokens)
    is_existing = places.is_real & found.is_found
    is_new = places.is_real & ~found.is_found
    index = torch.arange(shape.max_publishes, device=key.device)
    is_equal = (key[:, None] == key) & is_new[:, None] & is_new
    leader = torch.where(is_equal, index, shape.max_publishes - 1).amin(1)
    is_leader = is_new & (leader == index)
    canonical_uid = torch.where(is_existing, group.uid[found.page], group.uid_next + leader)
    parent_uid = _parent_uids(state, group, places, canonical_uid)
    bucket, way, has_way = _free_way(shape, group, key, is_leader)
    follower_ok = (view.tokens == view.tokens[leader]).all(1) & (parent_uid == parent_uid[leader])
    existing_ok = found.has_equal_tokens & (group.parent_uid[found.page] == parent_uid)
    is_ok = torch.where(is_existing, existing_ok, torch.where(is_leader, has_way, follower_ok))
    # Rare, and then cautious: after any failure in this step nobody follows a leader.
    is_follower = is_new & ~is_leader
    is_ok = is_ok & ~(is_follower & (places.is_real & ~is_ok).any())
    is_bad = places.is_real & ~is_ok
    bad_so_far = torch.cumsum(is_bad.long(), 0)
    bad_before = (bad_so_far - is_bad.long())[places.start]
    holds = places.is_real & (bad_so_far == bad_before)
    is_inserted = is_leader & holds
    _insert(shape, group, places, view, key, parent_uid, (bucket, way), is_inserted=is_inserted)
    canonical = torch.where(is_existing, found.page, places.own[leader])
    _swap(shape, group, places, canonical, holds & ~is_leader)
    broken = torch.where(is_bad, places.row, shape.max_rows)
    state.pub_ok.index_put_((broken,), torch.zeros_like(is_bad))
    group.uid_next.add_(shape.max_publishes)


def _list_places(shape: SchedulerShape, group: GroupState, first: Tensor, last: Tensor) -> _Places:
    count = (last - first).clamp_min(0)
    start = torch.cumsum(count, 0) - count
    index = torch.arange(shape.max_publishes, device=first.device)
    inside = (index[:, None] >= start) & (index[:, None] < start + count)
    rows = torch.arange(shape.max_rows + 1, device=first.device)
    is_real = inside.any(1)
    row = torch.where(is_real, (inside * rows).sum(1), shape.max_rows)
    page = torch.where(is_real, first[row] + index - start[row], 0)
    row_start = torch.where(is_real, start[row], 0)
    own = torch.where(is_real, group.block_table[row, page], 0).long()
    return _Places(row, page, is_real, index == row_start, row_start, own)


def _parent_uids(
    state: SchedulerState, group: GroupState, places: _Places, canonical_uid: Tensor
) -> Tensor:
    """Publication number of what stands before each place, after this step's swaps."""
    in_table = group.block_table[places.row, (places.page - 1).clamp_min(0)].long()
    at_start = torch.where(places.page == 0, -(state.salt[places.row] + 1), group.uid[in_table])
    return torch.where(places.is_first, at_start, canonical_uid.roll(1))


def _free_way(
    shape: SchedulerShape, group: GroupState, key: Tensor, is_leader: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Bucket and way [K] for each leader, and whether there is one."""
    bucket = key & (shape.index_buckets - 1)
    index = torch.arange(key.shape[0], device=key.device)
    is_before = (index[:, None] > index) & is_leader & (bucket[:, None] == bucket)
    rank = is_before.sum(1)
    is_empty = group.tpage[bucket] == 0  # [K, ways]
    nth = torch.cumsum(is_empty.int(), 1) - 1
    is_ours = is_empty & (nth == rank[:, None])
    ways = torch.arange(shape.index_ways, device=key.device)
    return bucket, (is_ours * ways).sum(1), is_ours.any(1)


def _insert(
    shape: SchedulerShape,
    group: GroupState,
    places: _Places,
    view: PageView,
    key: Tensor,
    parent_uid: Tensor,
    slot: tuple[Tensor, Tensor],
    *,
    is_inserted: Tensor,
) -> None:
    bucket, way = slot
    page = torch.where(is_inserted, places.own, 0)
    index = torch.arange(shape.max_publishes, device=key.device)
    uid = torch.where(is_inserted, group.uid_next + index, 0)
    group.uid.index_put_((page,), uid)
    group.parent_uid.index_put_((page,), torch.where(is_inserted, parent_uid, 0))
    flat = torch.where(is_inserted, bucket * shape.index_ways + way, -1)
    group.index_slot.index_put_((page,), flat.int())
    kept = torch.where(is_inserted[:, None], view.tokens, group.page_tokens[0])
    group.page_tokens.index_put_((page,), kept)
    bucket = torch.where(is_inserted, bucket, shape.index_buckets)
    way = torch.where(is_inserted, way, 0)
    group.tkey.index_put_((bucket, way), torch.where(is_inserted, key, 0))
    group.tpage.index_put_((bucket, way), page.int())


def _swap(
    shape: SchedulerShape,
    group: GroupState,
    places: _Places,
    canonical: Tensor,
    is_swapped: Tensor,
) -> None:
    """Puts the published page into the table instead of the row's own copy, which becomes free."""
    row = torch.where(is_swapped, places.row, shape.max_rows)
    column = torch.where(is_swapped, places.page, 0)
    group.block_table.index_put_((row, column), torch.where(is_swapped, canonical, 0).int())
    gained = torch.where(is_swapped, canonical, 0)
    lost = torch.where(is_swapped, places.own, 0)
    amount = is_swapped.int()
    # Gained pages leave the free set, each once; lost ones join it and are not published.
    index = torch.arange(shape.max_publishes, device=row.device)
    taker = torch.full_like(group.uid, shape.max_publishes)
    taker = taker.scatter_reduce(0, gained, index, "amin")
    was_free = is_swapped & (group.ref[gained] == 0)
    num_taken = (was_free & (taker[gained] == index)).sum().int()
    group.num_free.add_(amount.sum().int() - num_taken)
    group.num_free_cached.sub_(num_taken)
    group.ring_pos.index_put_((gained,), torch.full_like(gained, NO_POSITION))
    group.ref.index_add_(0, gained, amount)
    group.ref.index_add_(0, lost, -amount)
    push_head(shape, group, places.own, is_swapped)
