"""Grants to the step's flattened inputs: which token of which row stands where.

The only part of a step whose shape is the token bucket `T`. Reads the scheduler's state and plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState


class StepInputs(NamedTuple):
    """Inputs of one step over T tokens and R sequence places."""

    token_ids: Tensor  # [T] i64, 0 past the end
    positions: Tensor  # [T] i64
    token_rows: Tensor  # [T] i64, the dump row past the end
    slot_mapping: Tensor  # [T] i64, -1 past the end
    seq_rows: Tensor  # [R] i32, row by rank; the dump row where unused
    seq_lens: Tensor  # [R] i32, tokens with KV after this step; 0 where unused
    query_start_loc: Tensor  # [R + 1] i32
    logits_indices: Tensor  # [R] i64, last token of each sequence; 0 where unused


def layout(shape: SchedulerShape, state: SchedulerState, plan: Plan, num_tokens: int) -> StepInputs:
    """Lays the rows with tokens out by rank into `num_tokens` places. Reads only."""
    token = torch.arange(num_tokens, device=plan.give.device)
    return layout_places(shape, state, plan, token)


def layout_places(
    shape: SchedulerShape, state: SchedulerState, plan: Plan, token: Tensor
) -> StepInputs:
    """The same with the places given as `token = arange(T)`, so that T can be a dynamic size."""
    group = state.groups[0]
    device = plan.give.device
    rows = torch.arange(shape.max_rows + 1, device=device)
    listed = torch.full((shape.max_rows + 1,), shape.max_rows, dtype=torch.int64, device=device)
    place = torch.where(plan.give > 0, plan.rank, shape.max_rows).long()
    listed.index_put_((place,), torch.where(plan.give > 0, rows, shape.max_rows))
    seq_rows = listed[: shape.max_rows]
    lengths = torch.where(seq_rows < shape.max_rows, plan.give[seq_rows], 0)
    ends = torch.cumsum(lengths, 0)
    is_real = token < ends[-1]
    seq = torch.searchsorted(ends, token, right=True).clamp_max(shape.max_rows - 1)
    row = torch.where(is_real, seq_rows[seq], shape.max_rows)
    offset = token - (ends[seq] - lengths[seq])
    position = torch.where(is_real, state.num_computed[row] + offset, 0)
    stored = state.token_table[row, position // shape.token_page_size].long()
    token_ids = state.token_pages[stored, position % shape.token_page_size].long()
    page = group.block_table[row, position // shape.page_size].long()
    slot = page * shape.page_size + position % shape.page_size
    computed = torch.where(lengths > 0, state.num_computed[seq_rows] + lengths, 0)
    starts = torch.cat((torch.zeros_like(ends[:1]), ends))
    return StepInputs(
        token_ids=torch.where(is_real, token_ids, 0),
        positions=position,
        token_rows=row,
        slot_mapping=torch.where(is_real, slot, -1),
        seq_rows=seq_rows.int(),
        seq_lens=computed.int(),
        query_start_loc=starts.int(),
        logits_indices=torch.where(lengths > 0, ends - 1, 0),
    )
