"""Triton kernels of one-token attention over the paged cache: split, then merge.

    out[t, h] = softmax(scale * q[t, h] . K[row(t), 0..p(t)]) @ V[row(t), 0..p(t)]

`split_kernel`, persistent, one program for each lane and KV head, walks the tiles that the work
list gives its lane: parts of single tokens' KV, with the query heads of the KV head as one tile of
at least 16 rows, and parts of prefixes that several tokens share, with the heads of all of them in
one tile. What begins and ends in one lane and is not shared is a final result; all else leaves a
normalised partial result in fp32 and its log2 of the sum. `merge_kernel`, a program a token and
head, combines those, adds the sink, and zeroes padding tokens.

Scores and sums are fp32; weights are rounded to the dtype of the queries for the second product.
Nothing outside [begin, end) of a tile is loaded, so what lies there may be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from compiled_engine.custom_ops.attention_work import (
    GROUP_TILE,
    KV_TILE,
    LANE_FIELDS,
    MERGE_FIELDS,
    UNIT_FIELDS,
    Header,
    Lane,
    Merge,
    Unit,
)
from compiled_engine.custom_ops.triton_common import (
    let_next_start,
    scaled_to_e4m3,
    wait_for_previous,
)

_LOG2E = tl.constexpr(1.4426950408889634)
# How the work list and the block table are read before the wait: not from a cache that may still
# hold what the previous step left there.
_FRESH = tl.constexpr(".cg")
# below every score; not infinite, so that differences of maxima are numbers
_LOWEST = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class DecodeConfig:
    """What the kernels are compiled for.

    Attributes:
        group: query heads of a KV head.
        padded_dim: head dim rounded up to a power of two.
        rows: of the tile of one token.
        width: members that share a tile of a prefix.
        group_rows: of such a tile.
        lanes, units: where these regions of the work list begin.
        block: KV positions of a step of the inner loop.
        stages: of its software pipeline.
        group_stages: of the pipeline over a shared prefix, whose queries need memory too.
        prefetch: KV positions asked for in L2 before the wait, a multiple of `block`.
        merge_block: partial results combined at a time.
        early: lets the next kernel's programs be placed before this one has waited.
        is_quantized: results are e4m3, with the scale that the kernels are given.
        round_first: as the interpreter needs.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    head_dim: int
    padded_dim: int
    page_size: int
    rows: int
    width: int
    group_rows: int
    lanes: int
    units: int
    has_groups: bool
    has_window: bool
    has_cap: bool
    has_sinks: bool
    block: int
    stages: int
    group_stages: int
    prefetch: int
    merge_block: int
    value_bytes: int
    early: bool
    pdl: bool
    is_quantized: bool = False
    round_first: bool = False
    kv_tile: int = KV_TILE
    group_tile: int = GROUP_TILE
    lane_fields: int = LANE_FIELDS
    unit_fields: int = UNIT_FIELDS
    merge_fields: int = MERGE_FIELDS
    lane_unit: int = Lane.UNIT
    lane_tile: int = Lane.TILE
    lane_stop: int = Lane.STOP
    num_real: int = Header.NUM_REAL
    tile_start: int = Unit.TILE_START
    num_tiles: int = Unit.NUM_TILES
    kv_start: int = Unit.KV_START
    kv_end: int = Unit.KV_END
    row: int = Unit.ROW
    token: int = Unit.TOKEN
    num_members: int = Unit.NUM_MEMBERS
    partial: int = Unit.PARTIAL
    merge_token: int = Merge.TOKEN
    own_row: int = Merge.OWN_ROW
    own_count: int = Merge.OWN_COUNT
    group_row: int = Merge.GROUP_ROW
    group_count: int = Merge.GROUP_COUNT


@triton.jit
def _load_unit(work: tl.tensor, unit: tl.tensor, there: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """Fields of a unit that a lane needs; an empty one if it is not `there`."""
    record = work + C.units + unit * C.unit_fields
    first = tl.load(record + C.tile_start, mask=there, other=0, cache_modifier=_FRESH)
    count = tl.load(record + C.num_tiles, mask=there, other=0, cache_modifier=_FRESH)
    kv_start = tl.load(record + C.kv_start, mask=there, other=0, cache_modifier=_FRESH)
    kv_end = tl.load(record + C.kv_end, mask=there, other=0, cache_modifier=_FRESH)
    row = tl.load(record + C.row, mask=there, other=0, cache_modifier=_FRESH)
    token = tl.load(record + C.token, mask=there, other=0, cache_modifier=_FRESH)
    num_members = tl.load(record + C.num_members, mask=there, other=0, cache_modifier=_FRESH)
    partial = tl.load(record + C.partial, mask=there, other=0, cache_modifier=_FRESH)
    return first, first + count, kv_start, kv_end, row, token, num_members, partial


@triton.jit
def _bounds(
    unit: tl.tuple, tile: tl.tensor, stop: tl.tensor, window: tl.tensor, C: tl.constexpr
) -> tl.tuple:
    """Positions [begin, end) of tiles [tile, stop) of the line that lie in a unit."""
    first, _, kv_start, kv_end, _, _, num_members, _ = unit
    size = tl.where(num_members > 0, C.group_tile, C.kv_tile)
    begin = kv_start + (tile - first) * size
    end = tl.minimum(kv_end, kv_start + (stop - first) * size)
    if C.has_window:
        begin = tl.where(num_members == 0, tl.maximum(begin, kv_end - window), begin)
    return begin, end


@triton.jit
def _load_pages(
    block_table: tl.tensor,
    table_stride: tl.tensor,
    row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    CACHE: tl.constexpr,
    C: tl.constexpr,
) -> tl.tensor:
    """Page of each of the `block` positions from `begin` on."""
    position = begin + tl.arange(0, C.block)
    pages = block_table + row.to(tl.int64) * table_stride + position // C.page_size
    return tl.load(pages, mask=position < end, other=0, cache_modifier=CACHE)


@triton.jit
def _prefetch(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    kv_head: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Asks L2 for the keys and values of the first `block` positions."""
    position = begin + tl.arange(0, C.block)
    slot = pages.to(tl.int64) * C.page_size + position % C.page_size
    line: tl.constexpr = 128 // C.value_bytes
    lines: tl.constexpr = (C.padded_dim + line - 1) // line
    value = tl.minimum(tl.arange(0, lines) * line, C.head_dim - 1)
    offset = (slot * C.num_kv_heads + kv_head)[:, None] * C.head_dim + value[None, :]
    wanted = ((position < end)[:, None] & (value >= 0)[None, :]).to(tl.int32)
    for cache in tl.static_range(2):
        source = k_cache if cache == 0 else v_cache
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.u32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [(source + offset).to(tl.uint64), wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _scaled(scores: tl.tensor, factors: tl.tuple, C: tl.constexpr) -> tl.tensor:
    """Raw products to scores in units of log2, with the soft cap."""
    scale, soft_cap = factors
    if C.has_cap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right for any x
        power = tl.exp2(scores * (scale / soft_cap * (2.0 * _LOG2E)))
        scores = (1.0 - 2.0 / (power + 1.0)) * (soft_cap * _LOG2E)
    else:
        scores = scores * (scale * _LOG2E)
    return scores


@triton.jit
def _attend(
    q: tl.tensor,
    lows: tl.tensor,
    span: tl.tuple,
    pages: tl.tensor,
    caches: tl.tuple,
    factors: tl.tuple,
    STAGES: tl.constexpr,
    C: tl.constexpr,
) -> tl.tuple:
    """Weighted sum of values [rows, D], largest score and sum of weights [rows] of a span of KV.

    `span` is begin, end, KV head, block-table row; row r of the queries sees no position before
    `lows[r]`.
    """
    begin, end, kv_head, row = span
    k_cache, v_cache, block_table, table_stride = caches
    rows: tl.constexpr = q.shape[0]
    width: tl.constexpr = C.padded_dim
    at = tl.arange(0, C.block)
    value = tl.arange(0, C.padded_dim)
    top = tl.zeros((rows,), tl.float32) + _LOWEST
    # With few rows a row's weights are spread over warps: they are added up once, at the end.
    late: tl.constexpr = rows <= 16
    columns: tl.constexpr = C.block
    total = tl.zeros((rows, columns), tl.float32) if late else tl.zeros((rows,), tl.float32)
    acc = tl.zeros((rows, width), tl.float32)
    for start in tl.range(begin, end, C.block, num_stages=STAGES):
        position = start + at
        inside = position < end
        slot = pages.to(tl.int64) * C.page_size + position % C.page_size
        offset = (slot * C.num_kv_heads + kv_head)[:, None] * C.head_dim + value[None, :]
        mask = inside[:, None] & (value < C.head_dim)[None, :]
        k = tl.load(k_cache + offset, mask=mask, other=0.0)
        v = tl.load(v_cache + offset, mask=mask, other=0.0)
        # a step ahead, so that the copies above never wait for it
        pages = _load_pages(block_table, table_stride, row, start + C.block, end, "", C)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        scores = _scaled(scores, factors, C)
        visible = inside[None, :]
        if C.has_window:
            visible = visible & (position[None, :] >= lows[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        if late:
            total = total * shrink[:, None] + weights
        else:
            total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        top = higher
    if late:
        total = tl.sum(total, 1)
    return acc, top, total


@triton.jit
def _as_result(
    values: tl.tensor, out: tl.tensor, out_scale: tl.tensor, DTYPE: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """fp32 results as `out` holds them."""
    if C.is_quantized:
        values = scaled_to_e4m3(values, out_scale, DTYPE, C.round_first)
    return values.to(out.dtype.element_ty)


@triton.jit
def _attend_token(
    unit: tl.tuple,
    span: tl.tuple,
    lane: tl.tensor,
    pages: tl.tensor,
    query: tl.tuple,
    caches: tl.tuple,
    factors: tl.tuple,
    window: tl.tensor,
    results: tl.tuple,
    C: tl.constexpr,
) -> None:
    """One token's part in a lane: its result, or a partial one."""
    q, stride_t, stride_h = query
    out, partials, sums, sinks, out_scale = results
    _, _, _, kv_end, _, token, _, partial = unit
    part = tl.arange(0, C.rows)
    value = tl.arange(0, C.padded_dim)
    head = span[2] * C.group + part
    mask = (part < C.group)[:, None] & (value < C.head_dim)[None, :]
    source = q + token.to(tl.int64) * stride_t + head[:, None] * stride_h + value[None, :]
    rows = tl.load(source, mask=mask, other=0.0)
    lows = part * 0 + kv_end - window
    acc, top, total = _attend(rows, lows, span, pages, caches, factors, C.stages, C)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    sum_log = top + tl.log2(total)
    if partial < 0:
        if C.has_sinks:
            sink = tl.load(sinks + head, mask=part < C.group, other=0.0).to(tl.float32)
            acc = acc / (1.0 + tl.exp2(sink * _LOG2E - sum_log))[:, None]
        target = out + (token.to(tl.int64) * C.num_heads + head)[:, None] * C.head_dim
        result = _as_result(acc, out, out_scale, q.dtype.element_ty, C)
        tl.store(target + value[None, :], result, mask=mask)
    else:
        place = (partial + lane).to(tl.int64) * C.num_heads + head
        tl.store(partials + place[:, None] * C.head_dim + value[None, :], acc, mask=mask)
        tl.store(sums + place, sum_log, mask=part < C.group)


@triton.jit
def _attend_group(
    unit: tl.tuple,
    span: tl.tuple,
    lane: tl.tensor,
    pages: tl.tensor,
    query: tl.tuple,
    caches: tl.tuple,
    factors: tl.tuple,
    window: tl.tensor,
    results: tl.tuple,
    tokens: tl.tuple,
    C: tl.constexpr,
) -> None:
    """A shared prefix's part in a lane: a partial result of every member."""
    q, stride_t, stride_h = query
    members, positions = tokens
    _, partials, sums, _, _ = results
    _, _, _, _, _, first_member, num_members, partial = unit
    part = tl.arange(0, C.group_rows)
    value = tl.arange(0, C.padded_dim)
    member = part // C.group
    there = member < num_members
    token = tl.load(members + first_member + member, mask=there, other=0)
    head = span[2] * C.group + part % C.group
    mask = there[:, None] & (value < C.head_dim)[None, :]
    source = q + (token.to(tl.int64) * stride_t + head * stride_h)[:, None] + value[None, :]
    rows = tl.load(source, mask=mask, other=0.0)
    lows = part * 0
    if C.has_window:
        last = tl.load(positions + token, mask=there, other=0).to(tl.int32)
        lows = last + 1 - window
    acc, top, total = _attend(rows, lows, span, pages, caches, factors, C.group_stages, C)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = (partial + lane * C.width + member).to(tl.int64) * C.num_heads + head
    tl.store(partials + place[:, None] * C.head_dim + value[None, :], acc, mask=mask)
    tl.store(sums + place, top + tl.log2(total), mask=there)


@triton.jit
def split_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    work: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    out_scale: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    stride_t: tl.tensor,
    stride_h: tl.tensor,
    members_start: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Grid: lanes times KV heads, the KV heads of a lane side by side. See the module docstring."""
    let_next_start(C.pdl and C.early)
    kv_head = tl.program_id(0) % C.num_kv_heads
    lane = tl.program_id(0) // C.num_kv_heads
    record = work + C.lanes + lane * C.lane_fields
    tile = tl.load(record + C.lane_tile, cache_modifier=_FRESH)
    stop = tl.load(record + C.lane_stop, cache_modifier=_FRESH)
    place = tl.load(record + C.lane_unit, cache_modifier=_FRESH)
    unit = _load_unit(work, place, tile < stop, C)
    begin, end = _bounds(unit, tile, stop, window, C)
    pages = _load_pages(block_table, table_stride, unit[4], begin, end, _FRESH, C)
    if C.prefetch > 0:
        _prefetch(k_cache, v_cache, pages, begin, end, kv_head, C)
    wait_for_previous(C.pdl)
    let_next_start(C.pdl and not C.early)
    query = (q, stride_t, stride_h)
    caches = (k_cache, v_cache, block_table, table_stride)
    factors = (scale, soft_cap)
    results = (out, partials, sums, sinks, out_scale)
    while tile < stop:
        span = (begin, end, kv_head, unit[4])
        if C.has_groups:
            if unit[6] > 0:
                tokens = (work + members_start, positions)
                _attend_group(
                    unit, span, lane, pages, query, caches, factors, window, results, tokens, C
                )
            else:
                _attend_token(unit, span, lane, pages, query, caches, factors, window, results, C)
        else:
            _attend_token(unit, span, lane, pages, query, caches, factors, window, results, C)
        tile = unit[1]
        place += 1
        unit = _load_unit(work, place, tile < stop, C)
        begin, end = _bounds(unit, tile, stop, window, C)
        pages = _load_pages(block_table, table_stride, unit[4], begin, end, _FRESH, C)


@triton.jit
def _merge(
    record: tl.tuple,
    head: tl.tensor,
    partials: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    C: tl.constexpr,
) -> tl.tensor:
    """Combination [D] of the partial results of one token and head."""
    own_row, own_count, group_row, group_count = record
    value = tl.arange(0, C.padded_dim)
    top = _LOWEST
    total = 0.0
    if C.has_sinks:
        top = tl.load(sinks + head).to(tl.float32) * _LOG2E
        total = 1.0
    acc = tl.zeros_like(value).to(tl.float32)
    for first in range(0, own_count + group_count, C.merge_block):
        i = first + tl.arange(0, C.merge_block)
        there = i < own_count + group_count
        row = tl.where(i < own_count, own_row + i, group_row + (i - own_count) * C.width)
        place = row.to(tl.int64) * C.num_heads + head
        sum_log = tl.load(sums + place, mask=there, other=float("-inf"))
        mask = there[:, None] & (value < C.head_dim)[None, :]
        source = partials + place[:, None] * C.head_dim + value[None, :]
        part = tl.load(source, mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(sum_log, 0))
        weights = tl.exp2(sum_log - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        top = higher
    return acc / total


@triton.jit
def merge_kernel(
    work: tl.tensor,
    partials: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    out_scale: tl.tensor,
    q: tl.tensor,
    merges_start: tl.tensor,
    num_candidates: tl.tensor,
    num_tokens: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Grid: candidates times heads; of `q` only the dtype is read. See the module docstring."""
    let_next_start(C.pdl and C.early)
    head = tl.program_id(0) % C.num_heads
    candidate = tl.program_id(0) // C.num_heads
    merge = work + merges_start + candidate * C.merge_fields
    token = tl.load(merge + C.merge_token, cache_modifier=_FRESH)
    own_row = tl.load(merge + C.own_row, cache_modifier=_FRESH)
    own_count = tl.load(merge + C.own_count, cache_modifier=_FRESH)
    group_row = tl.load(merge + C.group_row, cache_modifier=_FRESH)
    group_count = tl.load(merge + C.group_count, cache_modifier=_FRESH)
    num_real = tl.load(work + C.num_real, cache_modifier=_FRESH)
    wait_for_previous(C.pdl)
    let_next_start(C.pdl and not C.early)
    value = tl.arange(0, C.padded_dim)
    target = out + head * C.head_dim + value
    mask = value < C.head_dim
    step: tl.constexpr = C.num_heads * C.head_dim
    if token >= 0:
        record = (own_row, own_count, group_row, group_count)
        merged = _merge(record, head, partials, sums, sinks, C)
        result = _as_result(merged, out, out_scale, q.dtype.element_ty, C)
        tl.store(target + token.to(tl.int64) * step, result, mask=mask)
    zero = tl.zeros_like(value).to(tl.float32).to(out.dtype.element_ty)
    for padding in range(num_real + candidate, num_tokens, num_candidates):
        tl.store(target + padding * step, zero, mask=mask)
