"""Second sampling kernels: from tiles to tokens, one program a place.

Imports Triton, so only launchers may import it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.sampling_device import (
    LOG2_E,
    LOWEST,
    MINUS_INFINITY,
    NO_ID,
    first_of_max,
    loaded,
    loaded_row,
    log_of,
    mask_of,
    noise_of,
    raw_floor,
    row_key,
    safe_temperature,
    scaled_of,
)
from compiled_engine.custom_ops.sampling_scan import wants_noise
from compiled_engine.custom_ops.sampling_search import search, tally_and_collect
from compiled_engine.custom_ops.triton_common import let_next_start, wait_for_previous


@triton.jit
def _emit(
    token: tl.tensor, row: tl.tensor, tokens: tl.tensor, stops: tl.tensor, stop_ids: tl.tensor,
    stop_stride: tl.tensor, NUM_STOPS: tl.constexpr, STOP_BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the token of a row and whether it is one of the row's stop ids; NO_TOKEN is none."""
    tl.store(tokens + row, token)
    if HAS_ROWS:
        place = tl.arange(0, STOP_BLOCK)
        stop = tl.load(
            stop_ids + row.to(tl.int64) * stop_stride + place, mask=place < NUM_STOPS, other=-1
        )
        is_stop = (stop == token) & (token >= 0)
        tl.store(stops + row, tl.max(is_stop.to(tl.int32)).to(tl.uint8))


@triton.jit(do_not_specialize=["stop_stride", "num_tiles"])
def greedy_kernel(
    floats: tl.tensor, ids: tl.tensor, rows: tl.tensor, stop_ids: tl.tensor, stop_stride: tl.tensor,
    tokens: tl.tensor, stops: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr,
    NUM_STOPS: tl.constexpr, STOP_BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The token of a place: lowest id of the largest tile maximum. Grid: places."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    maxima = tl.load(floats + place * 5 * num_tiles + tile, mask=is_tile, other=LOWEST)
    found = tl.load(ids + place * 2 * num_tiles + tile, mask=is_tile, other=NO_ID)
    token = first_of_max(maxima, found, is_tile)[1]
    row = place
    if HAS_ROWS:
        row = tl.load(rows + place)
    _emit(token, row, tokens, stops, stop_ids, stop_stride, NUM_STOPS, STOP_BLOCK, HAS_ROWS)


@triton.jit
def _count_guess(
    maxima: tl.tensor, bottoms: tl.tensor, is_tile: tl.tensor, top_k: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A logit that at least k are not below, and whether few more are: the k-th tile maximum."""
    ordered = tl.sort(tl.where(is_tile, maxima, LOWEST), descending=True)
    place = tl.arange(0, maxima.shape[0])
    known = tl.max(tl.where(place == top_k - 1, ordered, LOWEST))
    is_known = top_k <= tl.sum(is_tile.to(tl.int32))
    return tl.where(is_known, known, tl.min(tl.where(is_tile, bottoms, float("inf")))), is_known


@triton.jit
def _weight_guess(
    maxima: tl.tensor, sums: tl.tensor, is_tile: tl.tensor, top: tl.tensor, scale: tl.tensor,
    top_p: tl.tensor, vocab_size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """A logit the cut of top-p is not below, and whether few are above it.

    The largest tile maxima alone may reach the target. If not: even if every logit lay below the
    guess, they would weigh no more than the `1 - top_p` that may be cut away.
    """
    total = tl.sum(tl.where(is_tile, sums * tl.exp2((maxima - top) * scale), 0.0))
    ordered = tl.sort(tl.where(is_tile, maxima, LOWEST), descending=True)
    reached = tl.cumsum(tl.exp2((ordered - top) * scale)) >= top_p * total
    known = tl.max(tl.where(reached, ordered, LOWEST))
    share = tl.maximum((1.0 - top_p) * total / vocab_size, 1e-30)
    guess = top + tl.minimum(log_of(share) * LOG2_E / scale, 0.0)
    return tl.maximum(tl.maximum(guess, known), LOWEST), known > LOWEST


@triton.jit
def _draw_from_kept(
    kept_values: tl.tensor, kept_ids: tl.tensor, kept: tl.tensor, floor: tl.tensor,
    temperature: tl.tensor, key: tl.tensor, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Token of the largest noisy logit among the collected ones from `floor` on."""
    lane = tl.arange(0, LANES)[None, :]
    best = floor * 0.0 + MINUS_INFINITY
    best_id = tl.full((), NO_ID, tl.int32)
    for d in range(tl.max(kept)):
        is_real = d < kept
        x = loaded(kept_values + d * LANES + lane, is_real)
        token = tl.load(kept_ids + d * LANES + lane, mask=is_real, other=0)
        noisy = scaled_of(x, temperature) + noise_of(key, token)
        found, found_id = first_of_max(noisy, token, is_real & (x >= floor))
        is_better = (found > best) | ((found == best) & (found_id < best_id))
        best, best_id = tl.where(is_better, found, best), tl.where(is_better, found_id, best_id)
    return best_id


@triton.jit
def _draw_from_tiles(
    logits: tl.tensor, mask: tl.tensor, is_masked: tl.tensor, HAS_MASK: tl.constexpr,
    draws: tl.tensor, draw_logits: tl.tensor, draw_ids: tl.tensor,
    maxima: tl.tensor, floor: tl.tensor, temperature: tl.tensor, key: tl.tensor,
    vocab_size: tl.tensor, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Token of the largest noisy logit from `floor` on, given each tile's draw without a floor.

    Only a tile whose own draw is below the floor, and beats the best one that is not, is drawn
    again. Tiles that are not there have a maximum below every floor.
    """
    tile = tl.arange(0, maxima.shape[0])
    is_valid = draw_logits >= floor
    best, best_id = first_of_max(draws, draw_ids, is_valid)
    is_open = (maxima >= floor) & ~is_valid
    bound, again = first_of_max(draws, tile, is_open)
    while (bound >= best) & (again < maxima.shape[0]):
        token = again * TILE + tl.arange(0, TILE)
        is_real = token < vocab_size
        x = loaded_row(logits, token, is_real, mask, is_masked, HAS_MASK)
        noisy = scaled_of(x, temperature) + noise_of(key, token)
        found, found_id = first_of_max(noisy, token, is_real & (x >= floor))
        is_better = (found > best) | ((found == best) & (found_id < best_id))
        best, best_id = tl.where(is_better, found, best), tl.where(is_better, found_id, best_id)
        is_open = is_open & (tile != again)
        bound, again = first_of_max(draws, tile, is_open)
    return best_id


@triton.jit(
    do_not_specialize=["setting_stride", "mask_stride", "stop_stride", "vocab_size", "num_tiles"]
)
def draw_kernel(
    logits: tl.tensor, row_stride: tl.tensor, temperatures: tl.tensor, top_ks: tl.tensor,
    top_ps: tl.tensor, min_ps: tl.tensor, seeds: tl.tensor, positions: tl.tensor,
    setting_stride: tl.tensor, mask_bits: tl.tensor, mask_stride: tl.tensor,
    has_grammar: tl.tensor, floats: tl.tensor, ids: tl.tensor, kept_values: tl.tensor,
    kept_ids: tl.tensor, rows: tl.tensor, stop_ids: tl.tensor, stop_stride: tl.tensor,
    tokens: tl.tensor, stops: tl.tensor, vocab_size: tl.tensor, num_tiles: tl.tensor,
    TILE: tl.constexpr, TILES: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr,
    DEPTH: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, NUM_STOPS: tl.constexpr,
    STOP_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The token of a place: greedy, or the largest noisy logit of those that the limits keep.

    Grid: places. Limits: min-p by a comparison, then top-k and top-p by `search`; all compare
    unscaled logits, as division by the temperature is monotone, and equal scaled ones stay equal.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    place = tl.program_id(0)
    row = place
    if HAS_ROWS:
        row = tl.load(rows + place)
    tile = tl.arange(0, TILES)
    is_tile = tile < num_tiles
    floats += place * 5 * num_tiles + tile
    ids += place * 2 * num_tiles + tile
    maxima = tl.load(floats, mask=is_tile, other=MINUS_INFINITY)
    top, token = first_of_max(maxima, tl.load(ids, mask=is_tile, other=NO_ID), is_tile)
    temperature = tl.load(temperatures + row * setting_stride)
    if (temperature != 0.0) & (token >= 0):
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row * setting_stride)
        min_p = tl.load(min_ps + row * setting_stride)
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        logits += place.to(tl.int64) * row_stride
        mask, is_masked = mask_of(mask_bits, mask_stride, has_grammar, row, HAS_MASK)
        divisor = safe_temperature(temperature)
        has_draw = tl.where(wants_noise(temperature, top_k, KEEP), tile, num_tiles) < num_tiles
        has_k = (top_k > 0) & (top_k < vocab_size)
        floor = LOWEST + top * 0.0
        is_done = False
        if min_p > 0.0:
            cut = scaled_of(top, divisor) + tl.minimum(log_of(min_p), 0.0)
            floor = tl.minimum(raw_floor(cut, divisor), top)
        if has_k | (top_p < 1.0):
            kept_values += place.to(tl.int64) * (DEPTH * LANES)
            kept_ids += place.to(tl.int64) * (DEPTH * LANES)
            floor, kept, is_done = _floor_of(
                logits, mask, is_masked, HAS_MASK, vocab_size, kept_values, kept_ids, floats,
                num_tiles, maxima, is_tile, top, floor, divisor, has_k, top_k, top_p,
                LANES, DEPTH, LIMIT, SHIFT,
            )  # fmt: skip
            if is_done:
                token = _draw_from_kept(kept_values, kept_ids, kept, floor, divisor, key, LANES)
        if not is_done:
            # Where the first kernel drew nothing any tile may hold the best.
            draws = tl.load(floats + 3 * num_tiles, mask=has_draw, other=float("inf"))
            draw_logits = tl.load(floats + 4 * num_tiles, mask=has_draw, other=MINUS_INFINITY)
            draw_ids = tl.load(ids + num_tiles, mask=has_draw, other=NO_ID)
            token = _draw_from_tiles(
                logits, mask, is_masked, HAS_MASK, draws, draw_logits, draw_ids, maxima, floor,
                divisor, key, vocab_size, TILE,
            )  # fmt: skip
    _emit(token, row, tokens, stops, stop_ids, stop_stride, NUM_STOPS, STOP_BLOCK, HAS_ROWS)


@triton.jit
def _floor_of(
    logits: tl.tensor, mask: tl.tensor, is_masked: tl.tensor, HAS_MASK: tl.constexpr,
    vocab_size: tl.tensor, kept_values: tl.tensor, kept_ids: tl.tensor, floats: tl.tensor,
    num_tiles: tl.tensor, maxima: tl.tensor, is_tile: tl.tensor, top: tl.tensor, floor: tl.tensor,
    divisor: tl.tensor, has_k: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    LANES: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Lowest logit that the limits keep, and the collected logits from there on, if they are.

    Returns:
        The floor, how many logits each lane collected, and whether these are all the kept ones.
    """
    scale = LOG2_E / divisor
    bottoms = tl.load(floats + num_tiles, mask=is_tile, other=0.0)
    sums = tl.load(floats + 2 * num_tiles, mask=is_tile, other=0.0)
    lane = tl.arange(0, LANES)[None, :]
    lengths = (vocab_size - lane + LANES - 1) // LANES
    depth = tl.cdiv(vocab_size, LANES)
    kept = tl.zeros((1, LANES), tl.int32)
    kept_from, kept_below = top * 0.0 + float("inf"), top
    num_kept = 1e9 + top * 0.0
    for phase in range(2):
        is_count = phase == 0
        if tl.where(is_count, has_k, top_p < 1.0):
            if is_count:
                guess, is_few = _count_guess(maxima, bottoms, is_tile, top_k)
            else:
                guess, is_few = _weight_guess(maxima, sums, is_tile, top, scale, top_p, vocab_size)
            target = tl.where(is_count, top_k.to(tl.float32), -1.0)
            cut, num_kept, kept, kept_from, kept_below = search(
                logits, mask, is_masked, HAS_MASK, lengths, depth, kept_values, kept_ids, kept,
                kept_from, kept_below, floor, is_count, target, top_p, guess, is_few, top, scale,
                LANES, DEPTH, LIMIT, SHIFT,
            )  # fmt: skip
            # Other logits may be equal once scaled.
            floor = tl.maximum(floor, tl.minimum(raw_floor(scaled_of(cut, divisor), divisor), cut))
    if ((floor < kept_from) | (kept_below <= top)) & (num_kept <= LIMIT):
        kept_from = floor
        kept_below = top * 0.0 + float("inf")
        none = tl.full((8,), float("inf"), tl.float32)
        kept = tally_and_collect(
            logits, lengths, depth, floor, kept_below, none, top, scale, kept_from, kept_below,
            kept_values, kept_ids, mask, is_masked, HAS_MASK, LANES, DEPTH,
        )[2]  # fmt: skip
        tl.debug_barrier()
        kept_from = tl.where(tl.max(kept) <= DEPTH, kept_from, float("inf"))
    is_done = (floor >= kept_from) & (kept_below > top)
    return floor, kept, is_done
