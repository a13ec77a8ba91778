"""First sampling kernel: every tile of every row, once.

Imports Triton, so only launchers may import it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.sampling_device import (
    LOG2_E,
    LOWEST,
    MINUS_INFINITY,
    NO_TOKEN,
    allowed,
    clamped,
    first_of_max,
    mask_of,
    noise_of,
    row_key,
    safe_temperature,
    scaled_of,
)
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous


@triton.jit
def wants_noise(temperature: tl.tensor, top_k: tl.tensor, KEEP: tl.constexpr) -> tl.tensor:
    """Whether the first kernel draws: not in greedy rows, nor where few tokens will be left."""
    return (temperature != 0.0) & ((top_k <= 0) | (top_k > KEEP))


@triton.jit
def _clear(tokens: tl.tensor, stops: tl.tensor, num_rows: tl.tensor) -> None:
    """Zeros for every row, by the first program."""
    if tl.program_id(0) == 0:
        start = 0
        while start < num_rows:
            row = start + tl.arange(0, 256)
            tl.store(tokens + row, 0, mask=row < num_rows)
            tl.store(stops + row, 0, mask=row < num_rows)
            start += 256


@triton.jit(
    do_not_specialize=["setting_stride", "mask_stride", "num_rows", "vocab_size", "num_tiles"]
)
def scan_kernel(
    logits: tl.tensor, row_stride: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, setting_stride: tl.tensor, mask_bits: tl.tensor,
    mask_stride: tl.tensor, has_grammar: tl.tensor, rows: tl.tensor, floats: tl.tensor,
    ids: tl.tensor, tokens: tl.tensor, stops: tl.tensor, num_rows: tl.tensor,
    vocab_size: tl.tensor, num_tiles: tl.tensor, TILE: tl.constexpr, KEEP: tl.constexpr,
    IS_GREEDY: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Per tile of `TILE` logits: maximum, its id; unless greedy also the sum of weights and a draw.

    Grid: places x tiles. `floats` [S, 5, tiles]: maximum, lowest logit that is not LOWEST, sum of
    exp((x - maximum) / T), largest scaled logit plus noise, that token's logit. `ids`
    [S, 2, tiles]: of the maximum, of the draw. The draw is over the whole tile; the second kernel
    undoes it where it breaks a limit. A tile that holds a NaN has NO_TOKEN as the id of a maximum
    that nothing beats. With HAS_ROWS the first program clears the results of rows that no place
    names.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    if HAS_ROWS:
        _clear(tokens, stops, num_rows)
    token = tile * TILE + tl.arange(0, TILE)
    is_real = token < vocab_size
    logits += place.to(tl.int64) * row_stride
    row = place
    if HAS_ROWS:
        row = tl.load(rows + place)
    raw = tl.load(logits + token, mask=is_real, other=LOWEST).to(tl.float32)
    if HAS_MASK:
        mask, is_masked = mask_of(mask_bits, mask_stride, has_grammar, row, HAS_MASK)
        raw = allowed(raw, token, is_real, mask, is_masked)
    x = clamped(raw)
    top, top_id = first_of_max(x, token, is_real)
    is_nan = tl.max((raw != raw).to(tl.int32)) > 0
    out = floats + place * 5 * num_tiles + tile
    out_ids = ids + place * 2 * num_tiles + tile
    tl.store(out, tl.where(is_nan, float("inf"), top))
    tl.store(out_ids, tl.where(is_nan, NO_TOKEN, top_id))
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row * setting_stride)
        divisor = safe_temperature(temperature)
        weights = tl.exp2((x - top) * (LOG2_E / divisor))
        bottom = tl.min(tl.where(is_real & (x > LOWEST), x, top))
        tl.store(out + num_tiles, bottom)
        tl.store(out + 2 * num_tiles, tl.sum(tl.where(is_real, weights, 0.0)))
        if wants_noise(temperature, tl.load(top_ks + row), KEEP):
            key = row_key(tl.load(seeds + row), tl.load(positions + row))
            noisy = scaled_of(x, divisor) + noise_of(key, token)
            best, best_id = first_of_max(noisy, token, is_real)
            tl.store(out + 3 * num_tiles, best)
            tl.store(out + 4 * num_tiles, tl.max(tl.where(token == best_id, x, MINUS_INFINITY)))
            tl.store(out_ids + num_tiles, best_id)
