"""The second half of a step: sampled tokens, published pages, transitions.

Runs after the model. Pages of rows that end or are retracted are released by the next `plan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.plan import Plan
from compiled_engine.scheduler.prefix import publish
from compiled_engine.scheduler.state import (
    BLOCKED,
    DECODE,
    ERROR_TOKENS_TO_IDLE_ROW,
    FINISHED,
    PREFILL,
    RETRACTED,
    WAITING,
    SchedulerShape,
    SchedulerState,
)
from compiled_engine.scheduler.token_store import append_tokens

(
    COUNT_DECODE_ROWS,
    COUNT_RESIDENT_ROWS,
    COUNT_WAITING_ROWS,
    COUNT_UNSERVED_ROWS,
    COUNT_WANTED_TOKENS,
    COUNT_STEP_TOKENS,
    COUNT_FREE_PAGES,
    COUNT_CACHED_PAGES,
    COUNT_RETRACTIONS,
    COUNT_ERRORS,
) = range(10)
NUM_COUNTS = 10


class StepRecord(NamedTuple):
    """What one step produced, for the outbox. Rows are [R + 1]."""

    gen: Tensor  # i32
    emitted: Tensor  # bool, the row got tokens
    tokens: Tensor  # [R + 1, W] i32
    is_finished: Tensor  # bool, this step ended the row
    is_failed: Tensor  # bool, likewise, because it got no valid token; `tokens` has what it got
    is_free: Tensor  # bool, the row is FREE after this step's plan
    is_retracted: Tensor  # bool, this step took the row's pages back
    num_cached: Tensor  # i32
    counts: Tensor  # [NUM_COUNTS] i64


def advance(
    shape: SchedulerShape,
    state: SchedulerState,
    plan: Plan,
    tokens: Tensor,
    count: Tensor,
    is_stop: Tensor,
) -> StepRecord:
    """Advances the state by the sampled tokens, in place.

    A row that was computed and has no token of the vocabulary fails, mid-prompt too: its logits
    held NaN, or its sampler went wrong. It ends, gets no token, and none of the pages it completed
    in this step is published.

    Args:
        shape: static sizes.
        state: mutated in place.
        plan: what this step computed.
        tokens: [R + 1, W] i32, sampled tokens of the rows that computed any; W is 1.
        count: [R + 1] i32, how many of them count.
        is_stop: [R + 1, W] bool, the token ends the row.
    """
    group = state.groups[0]
    is_runnable = (state.state == PREFILL) | (state.state == DECODE)
    idle = ((plan.give > 0) & ~is_runnable).sum().int()
    state.error[ERROR_TOKENS_TO_IDLE_ROW : ERROR_TOKENS_TO_IDLE_ROW + 1].add_(idle)
    give = torch.where(is_runnable, plan.give, 0)
    is_token = (tokens[:, 0] >= 0) & (tokens[:, 0] < shape.vocab_size)
    is_failed = (give > 0) & ~is_token
    emit = plan.emit & (count > 0) & is_runnable & ~is_failed
    old_pages = state.num_computed.long() // shape.page_size
    state.num_computed.add_(give)
    append_tokens(shape, state, tokens[:, 0], emit)
    if shape.prefix_caching:
        new_pages = state.num_computed.long() // shape.page_size
        publishes = state.pub_ok & (give > 0) & ~is_failed
        new_pages = torch.where(publishes, new_pages, old_pages)
        publish(shape, state, group, old_pages, new_pages)
    is_finished = is_failed | emit & (is_stop[:, 0] | (state.num_tokens >= state.max_len))
    is_blocked = state.grammar & (state.mask_pos < state.num_tokens)
    state.state.masked_fill_(emit, DECODE)
    state.state.masked_fill_(emit & is_blocked, BLOCKED)
    state.state.masked_fill_(is_finished, FINISHED)
    rows = torch.arange(shape.max_rows + 1, device=tokens.device)
    is_resident = (state.state >= PREFILL) & (state.state <= BLOCKED)
    is_retracted = (rows == plan.victim) & is_resident
    state.state.masked_fill_(is_retracted, RETRACTED)
    state.num_retractions.add_(is_retracted.sum())
    return StepRecord(
        gen=state.gen.clone(),
        emitted=emit,
        tokens=tokens,
        is_finished=is_finished,
        is_failed=is_failed,
        is_free=state.state == 0,
        is_retracted=is_retracted,
        num_cached=state.num_cached.clone(),
        counts=_counts(state, plan),
    )


def _counts(state: SchedulerState, plan: Plan) -> Tensor:
    group = state.groups[0]
    row_state = state.state
    is_waiting = (row_state == WAITING) | (row_state == RETRACTED)
    is_resident = (row_state >= PREFILL) & (row_state <= BLOCKED)
    values = (
        (row_state == DECODE).sum(),
        is_resident.sum(),
        is_waiting.sum(),
        plan.num_unserved,
        plan.wanted,
        plan.num_tokens,
        group.num_free,
        group.num_free_cached,
        state.num_retractions,
        state.error.sum(),
    )
    return torch.stack([value.to(torch.int64) for value in values])
