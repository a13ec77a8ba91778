"""Paged store of known tokens and their chain sums, for rows with and without KV pages.

Token pages are taken from a stack as a row's tokens arrive and go back when the row becomes FREE.
The host never lets rows ask for more than there are, so the stack cannot run dry; if it did, the
error column counts it. Chain sums are what page keys are made from (`keys.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.keys import page_term, root_sum
from compiled_engine.scheduler.state import ERROR_NO_TOKEN_PAGE, SchedulerShape, SchedulerState


class PageView(NamedTuple):
    """Tokens and chain sums of some pages."""

    tokens: Tensor  # [..., page_size] i32
    chain: Tensor  # [...] i64


def row_pages(shape: SchedulerShape, state: SchedulerState, rows: Tensor) -> PageView:
    """All pages of `rows` [A]: tokens [A, P, page_size], chain [A, P]; unknown ones are garbage."""
    count = rows.shape[0]
    stored = state.token_table[rows].long()  # [A, token_table_width]
    tokens = state.token_pages[stored].reshape(count, -1, shape.page_size)
    chain = state.chain[stored].reshape(count, -1)
    return PageView(tokens[:, : shape.table_width], chain[:, : shape.table_width])


def single_pages(
    shape: SchedulerShape, state: SchedulerState, rows: Tensor, pages: Tensor
) -> PageView:
    """Page `pages[i]` of row `rows[i]`, both [K]: tokens [K, page_size], chain [K]."""
    per_store = shape.token_page_size // shape.page_size
    pages = pages.clamp(0, shape.table_width - 1)
    stored = state.token_table[rows, pages // per_store].long()
    place = pages % per_store
    offsets = place[:, None] * shape.page_size + torch.arange(shape.page_size, device=rows.device)
    return PageView(state.token_pages[stored[:, None], offsets], state.chain[stored, place])


def pop_token_pages(
    shape: SchedulerShape, state: SchedulerState, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Takes one token page for each true lane of `wanted` [K], in lane order.

    Returns:
        pages [K] i64, the null page for the other lanes, and the lanes that got one [K] bool.
    """
    rank = torch.cumsum(wanted.int(), 0) - 1
    is_given = wanted & (rank < state.num_free_token_pages)
    place = torch.where(is_given, state.num_free_token_pages - 1 - rank, shape.num_token_pages)
    pages = torch.where(is_given, state.free_token_pages[place], 0).long()
    state.num_free_token_pages.sub_(is_given.sum().int())
    missing = (wanted & ~is_given).sum().int()
    state.error[ERROR_NO_TOKEN_PAGE : ERROR_NO_TOKEN_PAGE + 1].add_(missing)
    return pages, is_given


def push_token_pages(
    shape: SchedulerShape, state: SchedulerState, rows: Tensor, is_freed: Tensor
) -> None:
    """Gives back every token page of the lanes of `rows` [F] where `is_freed` [F]."""
    width = shape.token_table_width
    used = -(-state.num_tokens[rows] // shape.token_page_size)  # [F]
    column = torch.arange(width, device=rows.device)
    is_real = (column < used[:, None]) & is_freed[:, None]
    pages = state.token_table[rows].flatten()
    is_real = is_real.flatten()
    rank = torch.cumsum(is_real.int(), 0) - 1
    place = torch.where(is_real, state.num_free_token_pages + rank, shape.num_token_pages)
    state.free_token_pages.index_put_((place,), pages)
    state.num_free_token_pages.add_(is_real.sum().int())


def append_tokens(
    shape: SchedulerShape, state: SchedulerState, tokens: Tensor, is_given: Tensor
) -> None:
    """Appends `tokens` [R + 1] i32 to the rows where `is_given`, and extends their chains."""
    rows = torch.arange(shape.max_rows + 1, device=tokens.device)
    position = state.num_tokens.long()
    column, offset = position // shape.token_page_size, position % shape.token_page_size
    column = column.clamp_max(shape.token_table_width - 1)
    fresh, got_fresh = pop_token_pages(shape, state, is_given & (offset == 0))
    target_row = torch.where(got_fresh, rows, shape.max_rows)
    state.token_table.index_put_((target_row, column), fresh.int())
    stored = torch.where(is_given, state.token_table[rows, column], 0).long()
    state.token_pages.index_put_((stored, offset), tokens)
    state.num_tokens.add_(is_given.int())
    _extend_chains(shape, state, is_given)


def _extend_chains(shape: SchedulerShape, state: SchedulerState, is_given: Tensor) -> None:
    """Adds one link for rows whose newest token completed a page."""
    rows = torch.arange(shape.max_rows + 1, device=is_given.device)
    per_store = shape.token_page_size // shape.page_size
    is_complete = is_given & (state.num_tokens % shape.page_size == 0)
    page = (state.num_tokens.long() // shape.page_size - 1).clamp_min(0)
    before = single_pages(shape, state, rows, (page - 1).clamp_min(0)).chain
    before = torch.where(page == 0, root_sum(state.salt), before)
    link = before + page_term(
        single_pages(shape, state, rows, page).tokens, page, state.place_steps
    )
    stored = state.token_table[rows, (page // per_store).clamp_max(shape.token_table_width - 1)]
    stored = torch.where(is_complete, stored, 0).long()
    state.chain.index_put_((stored, page % per_store), link)


class Runs(NamedTuple):
    """Tokens that rows get in one step, K runs of them; a row with tokens stands there once."""

    row: Tensor  # [K] i64, the dump row where there is nothing to append
    start: Tensor  # [K] i64, tokens the row knew
    end: Tensor  # [K] i64, tokens it knows now
    tokens: Tensor  # [K, max_forced] i32, the first `end - start` count


def begin_runs(
    shape: SchedulerShape, state: SchedulerState, row: Tensor, tokens: Tensor, count: Tensor
) -> Runs:
    """Lets row `row[i]` know the first `count[i]` of `tokens[i]`; `store_runs` must follow.

    Args:
        shape: static sizes.
        state: mutated in place.
        row: [K] i64.
        tokens: [K, max_forced] i32.
        count: [K] i64, 0 where there is nothing to append.
    """
    row = torch.where(count > 0, row, shape.max_rows)
    start = state.num_tokens[row].long()
    state.num_tokens.index_put_((row,), (start + count).int())
    return Runs(row, start, start + count, tokens)


def fresh_pages(shape: SchedulerShape, runs: Runs) -> tuple[Tensor, Tensor]:
    """Which runs need one more token page [K], and its place in the row's table [K]."""
    size = shape.token_page_size
    last = ((runs.end - 1).clamp_min(0) // size).clamp_max(shape.token_table_width - 1)
    is_fresh = (runs.start % size == 0) | (runs.start // size != last)
    return is_fresh & (runs.end > runs.start), last


def store_runs(shape: SchedulerShape, state: SchedulerState, runs: Runs) -> None:
    """Writes the tokens into the rows' token pages, and extends the chains."""
    size = shape.token_page_size
    place = torch.arange(runs.tokens.shape[1], device=runs.row.device)
    position = runs.start[:, None] + place  # [K, max_forced]
    column = (position // size).clamp_max(shape.token_table_width - 1)
    stored = state.token_table[runs.row[:, None], column]
    stored = torch.where(position < runs.end[:, None], stored, 0).long()
    state.token_pages.index_put_((stored, position % size), runs.tokens)
    _extend_runs(shape, state, runs.row, runs.start, runs.end)


def _extend_runs(
    shape: SchedulerShape, state: SchedulerState, row: Tensor, start: Tensor, end: Tensor
) -> None:
    """Adds the links of the pages that rows `row` [K] completed from `start` to `end` tokens."""
    per_store = shape.token_page_size // shape.page_size
    count = shape.max_forced // shape.page_size + 1
    first = start // shape.page_size
    page = first[:, None] + torch.arange(count, device=row.device)  # [K, count]
    is_complete = (page + 1) * shape.page_size <= end[:, None]
    before = single_pages(shape, state, row, (first - 1).clamp_min(0)).chain
    before = torch.where(first == 0, root_sum(state.salt[row]), before)
    rows = row[:, None].expand_as(page)
    content = single_pages(shape, state, rows.flatten(), page.flatten()).tokens
    terms = page_term(content, page.flatten(), state.place_steps).view_as(page)
    links = before[:, None] + torch.cumsum(torch.where(is_complete, terms, 0), 1)
    column = (page // per_store).clamp_max(shape.token_table_width - 1)
    stored = torch.where(is_complete, state.token_table[rows, column], 0).long()
    state.chain.index_put_((stored, page % per_store), links)
