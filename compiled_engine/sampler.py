"""Logits and row parameters to tokens: pure, vectorised over rows, random by (seed, position) only.

Sampling adds Gumbel noise to the kept logits and takes the maximum. The noise of a token is a hash
of (seed, position, token id), so a row's result never depends on its neighbours, on the batch or on
a generator's state. Three variants, each a superset of the one before: GREEDY, SAMPLED, FULL (with
penalties, bias and min_tokens); the host picks the smallest that serves every row it has submitted.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_engine.custom_ops import sampling_threshold
from compiled_engine.request import MAX_LOGIT_BIAS_ENTRIES, MAX_STOP_TOKEN_IDS, SamplingParams
from compiled_engine.scheduler.keys import mix
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
    """
    rows = seq_rows.long()
    stop_ids = params.stop_ids[rows]  # [S, MAX_STOP_IDS]
    scores = logits[:, :vocab_size].float()
    if variant == Variant.FULL:
        scores = _penalise(shape, state, params, scores, rows)
    chosen = scores.argmax(-1)
    if variant != Variant.GREEDY:
        drawn = _draw(state, params, scores, rows)
        is_greedy = params.floats[rows, TEMPERATURE] == 0.0
        chosen = torch.where(is_greedy, chosen, drawn)
    is_stop = (stop_ids == chosen[:, None]).any(1)
    all_rows = shape.max_rows + 1
    tokens = torch.zeros(all_rows, dtype=torch.int32, device=logits.device)
    stops = torch.zeros(all_rows, dtype=torch.bool, device=logits.device)
    tokens = tokens.index_put((rows,), chosen.int())
    stops = stops.index_put((rows,), is_stop)
    return Sampled(tokens[:, None], stops[:, None])


def _draw(state: SchedulerState, params: RowParams, scores: Tensor, rows: Tensor) -> Tensor:
    """Gumbel maximum over the logits that top-k, top-p and min-p keep: [S] i64."""
    floats = params.floats[rows]
    temperature = floats[:, TEMPERATURE]
    # Below a millionth the division could overflow; the best token has won long before.
    temperature = torch.where(temperature == 0.0, 1.0, temperature.clamp_min(1e-6))
    scaled = scores / temperature[:, None]
    # Lowest to highest finite: a bias of minus infinity must not become a NaN in exp.
    scaled = scaled.clamp_min(-1e30)
    cut = sampling_threshold(scaled, params.top_k[rows], floats[:, TOP_P], floats[:, MIN_P])
    noise = gumbel_noise(params.seed[rows], state.num_tokens[rows], scores.shape[1])
    kept = torch.where(scaled >= cut[:, None], scaled + noise, float("-inf"))
    return kept.argmax(-1)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [S, vocab] fp32, a function of (seed, position, token id) only."""
    row_key = mix(mix(seed) + position.long())
    token = torch.arange(vocab_size, dtype=torch.int64, device=seed.device)
    # 23 random bits: with half added they are exact in fp32, so 0 < uniform < 1.
    bits = mix(row_key[:, None] + token) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * (1.0 / (1 << 23))
    return -torch.log(-torch.log(uniform))


def _penalise(
    shape: SchedulerShape, state: SchedulerState, params: RowParams, scores: Tensor, rows: Tensor
) -> Tensor:
    """Penalties over the row's known tokens, bias, and no end before min_tokens: [S, vocab]."""
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
