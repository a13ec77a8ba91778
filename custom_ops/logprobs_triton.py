"""Triton kernels of `top_logprobs`: likeliest tokens of every tile, then of the row; no sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.library import note_plain_body
from compiled_engine.custom_ops.sampling import top_logprobs_reference
from compiled_engine.custom_ops.sampling_device import (
    LOWEST,
    MINUS_INFINITY,
    NO_ID,
    first_of_max,
    loaded,
    log_of,
)
from compiled_engine.custom_ops.triton_common import (
    DTYPES,
    has_pdl,
    let_next_start,
    wait_for_previous,
)

MAX_K = 20
MAX_CANDIDATES = 8192


@triton.jit(do_not_specialize=["vocab_size", "num_tiles", "k"])
def _scan_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    chosen: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    k: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per tile: its `k` largest logits and their ids [S, tiles, k], and sums [S, tiles, 3].

    Grid: places x tiles. The sums are the maximum m, the sum of exp(x - m), and how many logits
    are larger than the chosen one's. Places that a short tile cannot fill get NO_ID.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    place = program // num_tiles
    token = program % num_tiles * TILE + tl.arange(0, TILE)
    is_real = token < vocab_size
    row = logits + place.to(tl.int64) * row_stride
    x = loaded(row + token, is_real)
    picked = loaded(row + tl.load(chosen + place), True)
    top = tl.max(x)
    tl.store(sums + program * 3, top)
    tl.store(sums + program * 3 + 1, tl.sum(tl.where(is_real, tl.exp(x - top), 0.0)))
    tl.store(sums + program * 3 + 2, tl.sum(tl.where(is_real & (x > picked), 1.0, 0.0)))
    is_open = is_real
    for i in range(k):
        best, best_id = first_of_max(x, token, is_open)
        tl.store(values + program * k + i, best)
        tl.store(ids + program * k + i, best_id)
        is_open = is_open & (token != best_id)


@triton.jit(do_not_specialize=["num_tiles", "k"])
def _merge_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    chosen: tl.tensor,
    out_ids: tl.tensor,
    out_logprobs: tl.tensor,
    out_chosen: tl.tensor,
    out_rank: tl.tensor,
    num_tiles: tl.tensor,
    k: tl.tensor,
    TILES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The `k` best of the tiles' best, as log probabilities. Grid: places."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    part = sums + (place * num_tiles + tile) * 3
    maxima = tl.load(part, mask=is_tile, other=LOWEST)
    top = tl.max(maxima)
    total = tl.sum(tl.load(part + 1, mask=is_tile, other=0.0) * tl.exp(maxima - top))
    normalizer = top + log_of(total)
    num_larger = tl.sum(tl.load(part + 2, mask=is_tile, other=0.0))
    tl.store(out_rank + place, num_larger.to(tl.int32) + 1)
    token = tl.load(chosen + place)
    x = tl.load(logits + place.to(tl.int64) * row_stride + token).to(tl.float32)
    tl.store(out_chosen + place, x - normalizer)
    candidate = tl.arange(0, CANDIDATES)
    start = place * num_tiles * k
    is_open = candidate < num_tiles * k
    found = tl.load(values + start + candidate, mask=is_open, other=LOWEST)
    found_ids = tl.load(ids + start + candidate, mask=is_open, other=NO_ID)
    is_open = is_open & (found_ids != NO_ID)
    for i in range(k):
        best, best_id = first_of_max(found, found_ids, is_open)
        logprob = tl.where(best > LOWEST, best - normalizer, MINUS_INFINITY)
        tl.store(out_logprobs + place * k + i, logprob)
        tl.store(out_ids + place * k + i, best_id)
        is_open = is_open & (found_ids != best_id)


def unsupported_reason(logits: Tensor, chosen: Tensor, k: int) -> str | None:
    """Why the kernels cannot serve these arguments; None if they can. Reads shapes and dtypes."""
    rules = (
        (logits.dtype in DTYPES, f"{logits.dtype}, they take {', '.join(map(str, DTYPES))}"),
        (logits.dim() == 2 and logits.stride(-1) == 1, "logits that are not rows"),
        (chosen.dtype in (torch.int32, torch.int64), "chosen ids that are not integers"),
        (0 < k <= min(MAX_K, logits.shape[-1]), f"k = {k}, they take 1 to {MAX_K}"),
        (logits.shape[-1] <= 8192 * MAX_CANDIDATES // MAX_K, "too large a vocabulary"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def default_tile(vocab_size: int) -> int:
    """Logits a program of the first kernel: few enough tiles for one program to merge."""
    tile = 2048
    while triton.cdiv(vocab_size, tile) * MAX_K > MAX_CANDIDATES // 4 and tile < 8192:
        tile *= 2
    return tile


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, ...]:
    """As `top_logprobs_reference`, which also serves what `unsupported_reason` names."""
    if (reason := unsupported_reason(logits, chosen, k)) is not None:
        note_plain_body("top_logprobs", reason)
        return top_logprobs_reference(logits, chosen, k)
    return launch(logits, chosen, k)


def launch(
    logits: Tensor, chosen: Tensor, k: int, *, tile: int = 0, is_pdl: bool = True
) -> tuple[Tensor, ...]:
    """Runs the kernels on arguments they support; `tile` 0: `default_tile`."""
    num_places, vocab_size = logits.shape
    device = logits.device
    out_ids = torch.empty(num_places, k, dtype=torch.int32, device=device)
    out_logprobs = torch.empty(num_places, k, dtype=torch.float32, device=device)
    out_chosen = torch.empty(num_places, dtype=torch.float32, device=device)
    out_rank = torch.empty(num_places, dtype=torch.int32, device=device)
    if not num_places:
        return out_ids, out_logprobs, out_chosen, out_rank
    chosen = chosen.contiguous()
    tile = tile or default_tile(vocab_size)
    num_tiles = triton.cdiv(vocab_size, tile)
    sums = torch.empty(num_places, num_tiles, 3, dtype=torch.float32, device=device)
    values = torch.empty(num_places, num_tiles, k, dtype=torch.float32, device=device)
    ids = torch.empty(num_places, num_tiles, k, dtype=torch.int32, device=device)
    is_pdl = is_pdl and has_pdl(device)
    switches = {"PDL": is_pdl, "launch_pdl": is_pdl}
    _scan_kernel[(num_places * num_tiles,)](
        logits, logits.stride(0), chosen, sums, values, ids, vocab_size, num_tiles, k, TILE=tile,
        num_warps=max(4, tile // 1024), **switches,
    )  # fmt: skip
    _merge_kernel[(num_places,)](
        logits, logits.stride(0), sums, values, ids, chosen, out_ids, out_logprobs,
        out_chosen, out_rank, num_tiles, k, TILES=triton.next_power_of_2(num_tiles),
        CANDIDATES=triton.next_power_of_2(num_tiles * k), num_warps=4, **switches,
    )  # fmt: skip
    return out_ids, out_logprobs, out_chosen, out_rank
