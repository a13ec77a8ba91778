"""Logits and row parameters to tokens: pure, vectorised over rows, random by (seed, position) only.

Owns the parameters by row, penalties and variants; the draw itself is the op `sample_rows`. Three
variants, each a superset of the one before: GREEDY, SAMPLED, FULL (with
penalties, bias and min_tokens); the host picks the smallest that serves every row it has submitted.
Under a grammar a row's mask is applied by the draw, behind the penalties.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_engine.custom_ops.sampling import Masks, sample_rows_reference
from compiled_engine.request import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, SamplingParams
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState

MAX_EOS_TOKEN_IDS = 16
MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS

(TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION) = range(6)
NUM_FLOATS = 6


class Variant(IntEnum):
    """Which parameters a sampling step honours."""

    GREEDY = 0
    SAMPLED = 1
    FULL = 2


def variant_of(params: SamplingParams) -> Variant:
    """The smallest variant that honours `params`."""
    has_penalty = params.frequency_penalty or params.presence_penalty
    has_penalty = has_penalty or params.repetition_penalty != 1.0
    if has_penalty or params.logit_bias or params.min_tokens:
        return Variant.FULL
    return Variant.GREEDY if params.temperature == 0.0 else Variant.SAMPLED


class RowParams(NamedTuple):
    """Sampling parameters by row; the last row is the dump row."""

    floats: Tensor  # [R + 1, NUM_FLOATS] fp32
    top_k: Tensor  # [R + 1] i32
    min_tokens: Tensor  # [R + 1] i32
    seed: Tensor  # [R + 1] i64
    stop_ids: Tensor  # [R + 1, MAX_STOP_IDS] i32, -1 = unused
    bias_ids: Tensor  # [R + 1, MAX_LOGIT_BIAS_ENTRIES] i32, -1 = unused
    bias_values: Tensor  # [R + 1, MAX_LOGIT_BIAS_ENTRIES] fp32


class ParamInbox(NamedTuple):
    """Parameters of the rows submitted in this step; `rows` is the dump row where unused."""

    rows: Tensor  # [max_submits] i64
    values: RowParams  # the same fields over [max_submits]


def new_row_params(num_rows: int, device: torch.device | str) -> RowParams:
    """Parameters of `num_rows` greedy rows."""
    return RowParams(*(torch.from_numpy(a).to(device) for a in _blank(num_rows)))


def _blank(count: int) -> tuple[np.ndarray, ...]:
    floats = np.zeros((count, NUM_FLOATS), np.float32)
    floats[:, [TOP_P, REPETITION]] = 1.0
    return (
        floats,
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.zeros(count, np.int64),
        np.full((count, MAX_STOP_IDS), -1, np.int32),
        np.full((count, MAX_LOGIT_BIAS_ENTRIES), -1, np.int32),
        np.zeros((count, MAX_LOGIT_BIAS_ENTRIES), np.float32),
    )


def build_param_inbox(
    shape: SchedulerShape, entries: list[tuple[int, SamplingParams, int, tuple[int, ...]]]
) -> ParamInbox:
    """Host tensors for this step's submits: (row, params, seed, ids that stop the row)."""
    rows = np.full(shape.max_submits, shape.max_rows, np.int64)
    blank = _blank(shape.max_submits)
    floats, top_k, min_tokens, seeds, stop_ids, bias_ids, bias_values = blank
    for i, (row, params, seed, stops) in enumerate(entries):
        rows[i] = row
        floats[i] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.frequency_penalty,
            params.presence_penalty,
            params.repetition_penalty,
        )
        top_k[i] = max(params.top_k, 0)
        min_tokens[i] = params.min_tokens
        seeds[i] = seed
        stop_ids[i, : len(stops)] = stops
        bias_ids[i, : len(params.logit_bias)] = list(params.logit_bias)
        bias_values[i, : len(params.logit_bias)] = list(params.logit_bias.values())
    return ParamInbox(torch.from_numpy(rows), RowParams(*map(torch.from_numpy, blank)))


def apply_params(params: RowParams, inbox: ParamInbox) -> None:
    """Writes the submitted rows' parameters, in place."""
    for target, value in zip(params, inbox.values, strict=True):
        target.index_put_((inbox.rows,), value)


class RowMask(NamedTuple):
    """The tokens that a row's grammar allows at its next position."""

    row: int
    bits: np.ndarray  # [words] i32, bit i % 32 of word i // 32 is token i


def new_mask_bits(num_rows: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """The `Masks.bits` of all rows, [num_rows, bytes] u8.

    Args:
        num_rows: R + 1.
        vocab_size: columns of the logits, padding included.
        device: where.
    """
    num_words = -(-vocab_size // 32)
    return torch.zeros(num_rows, num_words * 4, dtype=torch.uint8, device=device)


class Sampled(NamedTuple):
    """Result of one sampling step, by row."""

    tokens: Tensor  # [R + 1, 1] i32
    is_stop: Tensor  # [R + 1, 1] bool


def sample(
    shape: SchedulerShape,
    state: SchedulerState,
    params: RowParams,
    logits: Tensor,
    seq_rows: Tensor,
    vocab_size: int,
    variant: Variant,
    *,
    masks: Masks | None = None,
) -> Sampled:
    """Chooses a token for each sequence place and brings it to its row.

    Args:
        shape: static sizes.
        state: read only.
        params: read only.
        logits: [S, padded vocab]; columns from `vocab_size` on are padding and never chosen.
        seq_rows: [S] i32, row of each place; the dump row where unused.
        vocab_size: real token ids.
        variant: what to honour; see the module docstring.
        masks: by row; None if no row has a grammar.
    """
    if variant == Variant.FULL:
        logits = penalised(shape, state, params, logits, seq_rows, vocab_size)
    return draw(state, params, logits, seq_rows, vocab_size, variant, masks=masks)


def draw(
    state: SchedulerState,
    params: RowParams,
    scores: Tensor,
    seq_rows: Tensor,
    vocab_size: int,
    variant: Variant,
    *,
    masks: Masks | None = None,
) -> Sampled:
    """The part of `sample` that is behind penalties; `scores` are logits or what those gave."""
    # On a GPU the op, one or two kernels; on a CPU its body, so that the compiler sees into it.
    sample_rows = torch.ops.ce.sample_rows.default if scores.is_cuda else sample_rows_reference
    floats = params.floats
    tokens, is_stop = sample_rows(
        scores,
        floats[:, TEMPERATURE],
        params.top_k,
        floats[:, TOP_P],
        floats[:, MIN_P],
        params.seed,
        state.num_tokens,
        seq_rows,
        params.stop_ids,
        vocab_size,
        variant == Variant.GREEDY,
        *(masks or ()),
    )
    return Sampled(tokens, is_stop)


def penalised(
    shape: SchedulerShape,
    state: SchedulerState,
    params: RowParams,
    logits: Tensor,
    seq_rows: Tensor,
    vocab_size: int,
) -> Tensor:
    """Penalties over the row's known tokens, bias, and no end before min_tokens: [S, vocab] fp32.

    Arguments as of `sample`.
    """
    scores, rows = logits[:, :vocab_size].float(), seq_rows.long()
    floats = params.floats[rows]
    generated, seen = _token_counts(shape, state, rows, scores.shape[1])
    repetition = floats[:, REPETITION, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    scores = scores - floats[:, FREQUENCY, None] * generated
    scores = scores - floats[:, PRESENCE, None] * (generated > 0)
    ids = params.bias_ids[rows].long()
    values = torch.where(ids >= 0, params.bias_values[rows], 0.0)
    scores = scores.scatter_add(1, ids.clamp_min(0), values)
    num_generated = state.num_tokens[rows] - state.num_prompt[rows]
    must_go_on = num_generated < params.min_tokens[rows]
    stop_ids = params.stop_ids[rows].long()
    is_ended = torch.zeros_like(scores).scatter_add(
        1, stop_ids.clamp_min(0), (stop_ids >= 0).to(scores.dtype)
    )
    return torch.where((is_ended > 0) & must_go_on[:, None], float("-inf"), scores)


def _token_counts(
    shape: SchedulerShape, state: SchedulerState, rows: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """How often each id was generated [S, vocab] fp32, and whether it is known at all (bool)."""
    stored = state.token_table[rows].long()
    tokens = state.token_pages[stored].reshape(rows.shape[0], -1)[:, : shape.max_model_len].long()
    place = torch.arange(tokens.shape[1], device=rows.device)
    is_known = place < state.num_tokens[rows][:, None]
    is_generated = is_known & (place >= state.num_prompt[rows][:, None])
    tokens = torch.where(is_known, tokens, 0).clamp(0, vocab_size - 1)
    zeros = torch.zeros(rows.shape[0], vocab_size, device=rows.device)
    generated = zeros.scatter_add(1, tokens, is_generated.float())
    seen = zeros.scatter_add(1, tokens, is_known.float()) > 0
    return generated, seen
