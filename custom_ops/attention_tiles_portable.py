"""Query-tile attention in plain Triton: any GPU, any cache dtype, and the CPU interpreter.

    out[t, h] = sum_j p[t, h, j] v[j] / (sum_j p[t, h, j] + exp(sink[h])),
    p[t, h, j] = exp(scale * q[t, h] . k[j]) over the keys j that t sees

An item is a tile times the heads folded into its rows; items are dealt to persistent programs in
the order of the list, all tiles of a chunk for one set of heads before the next set. Blocks of
keys that every row sees are taken without a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_engine.custom_ops.attention_tiles import (
    CHUNK,
    TILE_ROWS,
    TileWork,
    num_programs,
)
from compiled_engine.custom_ops.triton_common import is_interpreted, scaled_to_e4m3

LOG2E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _key_blocks(
    state: tl.tensor,
    q: tl.tensor,
    caches: tl.tensor,
    strides: tl.tensor,
    pages: tl.tensor,
    length: tl.tensor,
    row_position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    factors: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> tl.tensor:
    """Adds blocks [begin, end) of keys to the running (m, total, acc)."""
    m, total, acc = state
    column = tl.arange(0, acc.shape[1])
    for block in tl.range(begin, end):
        key = block * BLOCK + tl.arange(0, BLOCK)
        exists = key < length
        if MASKED:
            page = tl.load(pages + key // PAGE, mask=exists, other=0).to(tl.int64)
        else:
            page = tl.load(pages + key // PAGE).to(tl.int64)
        at = page * strides[0] + (key % PAGE) * strides[1]
        inside = (column < DIM)[None, :] & (exists | (not MASKED))[:, None]
        k = tl.load(caches[0] + at[:, None] + column[None, :], mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if HAS_CAP:
            e = tl.exp2(s * (factors[1] * 2 * LOG2E))
            s = factors[2] - 2 * factors[2] / (e + 1)
        if MASKED:
            seen = key[None, :] <= row_position[:, None]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > row_position[:, None] - window)
            s = tl.where(seen, s, NEGATIVE)
        m_new = tl.maximum(m, tl.max(s, 1))
        # 0 for a row that has seen no key yet, so that no difference of infinities arises
        m_scaled = tl.where(m_new == NEGATIVE, 0.0, m_new) * factors[0]
        p = tl.exp2(s * factors[0] - m_scaled[:, None])
        shrink = tl.exp2(m * factors[0] - m_scaled)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(caches[1] + at[:, None] + column[None, :], mask=inside, other=0.0)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, total, acc


@triton.jit
def _item(
    number: tl.tensor, num_tiles: tl.tensor, CHUNK: tl.constexpr, NUM_GROUPS: tl.constexpr
) -> tl.tensor:
    """Tile and set of heads of item `number`."""
    chunk = number // (CHUNK * NUM_GROUPS)
    rest = number - chunk * (CHUNK * NUM_GROUPS)
    size = tl.minimum(CHUNK, num_tiles - chunk * CHUNK)
    return chunk * CHUNK + rest % size, rest // size


@triton.jit(do_not_specialize=["table_stride", "window"])
def tiles_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    seq_rows: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    tile_seq: tl.tensor,
    tile_start: tl.tensor,
    num_tiles: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    out_scale: tl.tensor,
    table_stride: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    stride_t: tl.tensor,
    stride_h: tl.tensor,
    log_scale: tl.tensor,
    cap_scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    ROWS: tl.constexpr,
    FOLDED: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
) -> None:
    """All tiles; see the module docstring."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_DIM)
    num = tl.load(num_tiles)
    factors = (log_scale, cap_scale, cap)
    for number in range(tl.program_id(0), num * NUM_GROUPS, tl.num_programs(0)):
        tile, heads = _item(number, num, CHUNK, NUM_GROUPS)
        seq = tl.load(tile_seq + tile)
        token = tl.load(tile_start + tile)
        length = tl.load(seq_lens + seq)
        left = tl.load(starts + seq + 1) - token
        num_tokens = tl.minimum(left, ROWS // FOLDED)
        position = length - left
        pages = table + tl.load(seq_rows + seq).to(tl.int64) * table_stride
        mine = row // FOLDED
        head = heads * FOLDED + row % FOLDED
        inside = (mine < num_tokens)[:, None] & (column < DIM)[None, :]
        at = (token + mine).to(tl.int64) * q_stride_t + head * q_stride_h
        queries = tl.load(q + at[:, None] + column[None, :], mask=inside, other=0.0)
        low, open_low, open_high, high = _ranges(position, num_tokens, window, BLOCK, HAS_WINDOW)
        offset = heads // GROUPS * head_stride
        caches = (k_cache + offset, v_cache + offset)
        strides = (page_stride, slot_stride)
        state = (
            tl.full([ROWS], NEGATIVE, tl.float32),
            tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, PADDED_DIM], tl.float32),
        )
        at_key = position + mine
        for part in tl.static_range(3):
            begin = low if part == 0 else (open_low if part == 1 else open_high)
            end = open_low if part == 0 else (open_high if part == 1 else high)
            if part != 0 or HAS_WINDOW:
                state = _key_blocks(
                    state, queries, caches, strides, pages, length, at_key, begin, end, window,
                    factors, DIM, BLOCK, PAGE, part != 1, HAS_WINDOW, HAS_CAP,
                )  # fmt: skip
        m, total, acc = state
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            total += tl.exp2(sink * LOG2E - tl.where(m == NEGATIVE, 0.0, m) * log_scale)
        at = (token + mine).to(tl.int64) * stride_t + head * stride_h
        value = acc / total[:, None]
        if QUANTIZED:
            value = scaled_to_e4m3(value, out_scale, q.dtype.element_ty, ROUND_FIRST)
        target = out + at[:, None] + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _ranges(
    position: tl.tensor,
    num_tokens: tl.tensor,
    window: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Blocks [low, open_low) are masked, [open_low, open_high) open, [open_high, high) masked."""
    high = (position + num_tokens - 1) // BLOCK + 1
    open_high = (position + 1) // BLOCK
    low = 0
    open_low = 0
    if HAS_WINDOW:
        low = tl.maximum(position - window + 1, 0) // BLOCK
        open_low = tl.maximum(position + num_tokens - 1 - window, -1) // BLOCK + 1
        open_low = tl.minimum(tl.maximum(open_low, low), high)
        open_high = tl.maximum(open_high, open_low)
    return low, open_low, open_high, high


def launch_portable(work: TileWork) -> None:
    """Launches the kernel on the current stream."""
    head_dim, cache = work.q.shape[2], work.k_cache
    padded = triton.next_power_of_2(head_dim)
    log_scale, cap_scale, cap = work.factors
    tiles_kernel[(num_programs(work.q.device),)](
        work.q,
        cache,
        work.v_cache,
        work.block_table,
        work.seq_rows,
        work.seq_lens,
        work.query_start_loc,
        work.tile_seq,
        work.tile_start,
        work.num_tiles,
        work.out,
        work.q if work.sinks is None else work.sinks,
        work.q if work.out_scale is None else work.out_scale,
        work.block_table.stride(0),
        work.q.stride(0),
        work.q.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        work.out.stride(0),
        work.out.stride(1),
        log_scale,
        cap_scale,
        cap,
        work.window,
        ROWS=TILE_ROWS,
        FOLDED=work.folded,
        GROUPS=work.num_groups // cache.shape[2],
        NUM_GROUPS=work.num_groups,
        CHUNK=CHUNK,
        DIM=head_dim,
        PADDED_DIM=padded,
        BLOCK=64 if padded <= 128 else 32,
        PAGE=cache.shape[1],
        HAS_WINDOW=work.window > 0,
        HAS_CAP=work.soft_cap > 0,
        HAS_SINKS=work.sinks is not None,
        QUANTIZED=work.out_scale is not None,
        ROUND_FIRST=is_interpreted(),
        num_warps=8,
        num_stages=2,
    )
