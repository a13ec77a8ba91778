"""Search for the cut of a row: the logit where top-k or top-p ends, exactly and without a sort.

The cut is the largest t with F(t) >= target, where F(t) counts the logits >= t or sums their
weights. A bracket [low, high) of logits holds it; a pass over the row evaluates F at seven pivots
inside and keeps one eighth. Pivots are guesses by value first, then even in the order of floats, so
the search always ends, at one value. A pass may also collect what lies between its outer pivots,
by lane and without communication; once the bracket lies inside, only the collection is read.

Imports Triton, so only launchers may import it.

Source: selection by bracketing (Floyd and Rivest); weights in the place of counts for top-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.sampling_device import loaded, loaded_row, order_of, value_of

PIVOTS = tl.constexpr(8)
# Passes whose pivots are guessed by value.
NUM_GUESSES = tl.constexpr(5)
# How far the outer pivots are from a guess, in widths of the bracket.
REACH = tl.constexpr(0.12)


@triton.jit
def tally(
    source: tl.tensor,
    lengths: tl.tensor,
    depth: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pivots: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    LANES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Counts and weights [PIVOTS] of the logits in [low, high) that are at or above each pivot.

    Lane j reads `source[d * LANES + j]` for d below its length and below `depth`.
    """
    lane = tl.arange(0, LANES)[None, :]
    counts = tl.zeros((PIVOTS, LANES), tl.float32)
    weights = tl.zeros((PIVOTS, LANES), tl.float32)
    steps = tl.reshape(pivots, (PIVOTS, 1))
    for d in range(depth):
        is_real = d < lengths
        x = loaded(source + d * LANES + lane, is_real)
        weight = tl.exp2((x - top) * scale)
        hit = is_real & (x >= low) & (x < high) & (x >= steps)
        counts += tl.where(hit, 1.0, 0.0)
        weights += tl.where(hit, weight, 0.0)
    return tl.sum(counts, axis=1), tl.sum(weights, axis=1)


@triton.jit
def tally_and_collect(
    source: tl.tensor,
    lengths: tl.tensor,
    depth: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    pivots: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    from_value: tl.tensor,
    below_value: tl.tensor,
    kept_values: tl.tensor,
    kept_ids: tl.tensor,
    mask: tl.tensor,
    is_masked: tl.tensor,
    HAS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`tally` of a row that also stores its logits in [from_value, below_value) with ids, by lane.

    The row is read under its mask, see `mask_of`.

    Returns:
        Counts, weights, and how many each lane has [1, LANES]; beyond `DEPTH` they were not stored.
    """
    lane = tl.arange(0, LANES)[None, :]
    counts = tl.zeros((PIVOTS, LANES), tl.float32)
    weights = tl.zeros((PIVOTS, LANES), tl.float32)
    used = tl.zeros((1, LANES), tl.int32)
    steps = tl.reshape(pivots, (PIVOTS, 1))
    for d in range(depth):
        is_real = d < lengths
        x = loaded_row(source, d * LANES + lane, is_real, mask, is_masked, HAS_MASK)
        weight = tl.exp2((x - top) * scale)
        hit = is_real & (x >= low) & (x < high) & (x >= steps)
        counts += tl.where(hit, 1.0, 0.0)
        weights += tl.where(hit, weight, 0.0)
        is_kept = is_real & (x >= from_value) & (x < below_value)
        fits = is_kept & (used < DEPTH)
        tl.store(kept_values + used * LANES + lane, x.to(kept_values.dtype.element_ty), mask=fits)
        tl.store(kept_ids + used * LANES + lane, d * LANES + lane, mask=fits)
        used += is_kept.to(tl.int32)
    return tl.sum(counts, axis=1), tl.sum(weights, axis=1), used


@triton.jit
def at_least(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Order of the lowest representable logit that is not below `value`."""
    order = order_of(value, SHIFT)
    return tl.where(value_of(order, SHIFT) < value, order + 1, order)


@triton.jit
def even_pivots(low: tl.tensor, high: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Pivots [PIVOTS] from order `low` on that cut [low, high) into even parts."""
    width = high.to(tl.int64) - low.to(tl.int64)
    return (low + (width * tl.arange(0, PIVOTS).to(tl.int64)) // PIVOTS).to(tl.int32)


@triton.jit
def first_pivots(
    guess: tl.tensor, top: tl.tensor, low: tl.tensor, high: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Pivot 0 at order `low`, 1 just above (all there is if only LOWEST is), then guess to top."""
    place = tl.arange(0, PIVOTS)
    t = (place - 2).to(tl.float32) * (1.0 / (PIVOTS - 3))
    order = order_of(guess * (1.0 - t) + top * t, SHIFT)
    order = tl.minimum(tl.maximum(order, low + 1), high - 1)
    return tl.where(place <= 1, tl.minimum(low + place, high - 1), order)


@triton.jit
def close_pivots(
    center: tl.tensor, reach: tl.tensor, low: tl.tensor, high: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """Pivot 0 at order `low`, the others within `reach` of a logit, denser near it."""
    place = tl.arange(0, PIVOTS)
    t = (place - 4).to(tl.float32) * (1.0 / 3.0)
    order = order_of(center + reach * t * tl.abs(t), SHIFT)
    order = tl.minimum(tl.maximum(order, low), high - 1)
    return tl.where(place == 0, low, order)


@triton.jit
def picked(values: tl.tensor, place: tl.tensor) -> tl.tensor:
    """`values[place]` of [PIVOTS]; 0 past its end."""
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == place, values, 0))


@triton.jit
def narrowed(
    pivots: tl.tensor, counts: tl.tensor, weights: tl.tensor, is_count: tl.tensor,
    target: tl.tensor, high: tl.tensor, count_above: tl.tensor, weight_above: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The part between two pivots that holds the cut.

    Returns:
        Orders low and high, count and weight above high, count and weight at or above low.
    """
    reached = tl.where(is_count, count_above + counts, weight_above + weights) >= target
    # Reached at pivot 0 by the search's own assumption, whatever rounding says.
    place = tl.maximum(tl.sum(reached.to(tl.int32)) - 1, 0)
    has_next = place < PIVOTS - 1
    count_low = count_above + picked(counts, place)
    weight_low = weight_above + picked(weights, place)
    count_high = tl.where(has_next, count_above + picked(counts, place + 1), count_above)
    weight_high = tl.where(has_next, weight_above + picked(weights, place + 1), weight_above)
    high = tl.where(has_next, picked(pivots, place + 1), high)
    return picked(pivots, place), high, count_high, weight_high, count_low, weight_low


@triton.jit
def next_pivots(
    level: tl.tensor, is_collected: tl.tensor, guess: tl.tensor, top: tl.tensor, low: tl.tensor,
    high: tl.tensor, share: tl.tensor, SHIFT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Pivots of a pass: from the guess to the top; then around where F should reach its target."""
    low_value, high_value = value_of(low, SHIFT), value_of(high, SHIFT)
    width = high_value - low_value
    close = close_pivots(low_value + share * width, REACH * width, low, high, SHIFT)
    chosen = tl.where(level == 0, first_pivots(guess, top, low, high, SHIFT), close)
    is_even = (level >= NUM_GUESSES) | ((level > 0) & is_collected)
    return tl.where(is_even, even_pivots(low, high, SHIFT), chosen)


@triton.jit
def search(
    logits: tl.tensor, mask: tl.tensor, is_masked: tl.tensor, HAS_MASK: tl.constexpr,
    lengths: tl.tensor, depth: tl.tensor, kept_values: tl.tensor,
    kept_ids: tl.tensor, kept: tl.tensor, kept_from: tl.tensor, kept_below: tl.tensor,
    floor: tl.tensor, is_count: tl.tensor, target: tl.tensor, share_target: tl.tensor,
    guess: tl.tensor, is_few: tl.tensor, top: tl.tensor, scale: tl.tensor,
    LANES: tl.constexpr, DEPTH: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The largest t >= floor with F(t) >= target; a target below 0: `share_target` of F(floor).

    `kept` [1, LANES] collected logits a lane, those in [kept_from, kept_below), are read in the
    place of the row where they cover the bracket, and replaced by what a pass collects.

    Returns:
        t, the number of logits >= t, and the collection: kept, kept_from, kept_below.
    """
    low = at_least(floor, SHIFT)
    high = order_of(top, SHIFT) + 1
    count_above, weight_above = top * 0.0, top * 0.0
    count_low, weight_low = count_above + 1e9, count_above
    share = count_above
    level = 0
    while high.to(tl.int64) - low.to(tl.int64) > 1:
        low_value, high_value = value_of(low, SHIFT), value_of(high, SHIFT)
        is_collected = (low_value >= kept_from) & (high_value <= kept_below)
        pivots = next_pivots(level, is_collected, guess, top, low, high, share, SHIFT)
        values = value_of(pivots, SHIFT)
        if is_collected:
            counts, weights = tally(
                kept_values, kept, tl.max(kept), low_value, high_value, values, top, scale, LANES
            )
        else:
            inside = count_low - count_above
            is_all = inside <= LIMIT
            # About a quarter of the bracket lies between the outer pivots.
            is_worth = is_all | tl.where(level == 0, is_few, inside <= 4 * LIMIT)
            outer = picked(values, tl.where(level == 0, 2, 1))
            kept_from = tl.where(is_all, low_value, outer)
            kept_from = tl.where(is_worth, kept_from, float("inf"))
            kept_below = tl.where(is_all | (level == 0), high_value, tl.max(values))
            counts, weights, kept = tally_and_collect(
                logits, lengths, depth, low_value, high_value, values, top, scale,
                kept_from, kept_below, kept_values, kept_ids, mask, is_masked, HAS_MASK,
                LANES, DEPTH,
            )  # fmt: skip
            # Readers of the collection may be other threads than its writers.
            tl.debug_barrier()
            kept_from = tl.where(tl.max(kept) <= DEPTH, kept_from, float("inf"))
        target = tl.where(target < 0.0, share_target * tl.max(weights), target)
        low, high, count_above, weight_above, count_low, weight_low = narrowed(
            pivots, counts, weights, is_count, target, high, count_above, weight_above
        )
        reached = tl.where(is_count, count_low, weight_low)
        spread = tl.maximum(reached - tl.where(is_count, count_above, weight_above), 1e-30)
        share = tl.minimum(tl.maximum((reached - target) / spread, 0.0), 1.0)
        level += 1
    return value_of(low, SHIFT), count_low, kept, kept_from, kept_below
