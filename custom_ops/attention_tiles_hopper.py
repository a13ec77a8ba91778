"""Query-tile attention on Hopper: pages by TMA, two warpgroups of WGMMA, one warp that loads.

    out[t, h] = sum_j p[t, h, j] v[j] / (sum_j p[t, h, j] + exp(sink[h])),
    p[t, h, j] = exp(scale * q[t, h] . k[j]) over the keys j that t sees

A program (one a multiprocessor) takes items, a tile times the heads folded into its rows, from a
counter in device memory: the loading warp draws them, describes them in shared memory, and runs
ahead with the copies. Each page is one box of a copy, so paging costs no arithmetic. Of the 128
rows of a tile either consumer takes 64. Blocks of keys go from the last to the first; in the loop
the product with the values of one block runs under the softmax of the next.

Items are drawn tile by tile for one head group at a time, `chunk` tiles long: programs that run at
the same time read the same keys, and within a chunk the list's order (heaviest first) is kept.
Where there are fewer items than programs, the keys of an item are cut into parts that are drawn
like items (`attention_tiles_hopper_split`) and added up (`attention_tiles_hopper_merge`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled_engine.custom_ops.attention_tiles import CHUNK, TileWork, num_programs
from compiled_engine.custom_ops.attention_tiles_hopper_load import (
    HEADS,
    HIGH,
    ITEM_EMPTY,
    ITEM_FULL,
    ITEM_SLOTS,
    K_EMPTY,
    K_FULL,
    LENGTH,
    LOW,
    NUM_TOKENS,
    PANEL,
    POSITION,
    Q_EMPTY,
    Q_FULL,
    ROWS,
    SHARE,
    TOKEN,
    TURN,
    V_EMPTY,
    V_FULL,
    WORDS,
    TileConfig,
    load_items,
    recall,
)
from compiled_engine.custom_ops.attention_tiles_hopper_merge import (
    HALF,
    HEAD,
    NEGATIVE,
    add_parts,
    add_sinks,
    finite,
    leave_part,
    store,
)
from compiled_engine.custom_ops.attention_tiles_hopper_split import (
    MAX_PARTS,
    MAX_TILES,
    WHOLE,
    most_parts,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr) -> gl.tensor:
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def _scores(s: gl.tensor, factors: gl.tensor, C: gl.constexpr) -> gl.tensor:
    """Soft cap, if there is one: cap * tanh(s * scale / cap)."""
    if C.has_cap:
        e = gl.exp2(s * (factors[1] * 2 * LOG2E))
        s = factors[2] - 2 * factors[2] / (e + 1)
    return s


@gluon.jit
def _mask(
    s: gl.tensor, block: gl.tensor, row_position: gl.tensor, window: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    layout: gl.constexpr = s.type.layout
    key = block * C.block + gl.arange(0, C.block, layout=gl.SliceLayout(0, layout))
    seen = key[None, :] <= row_position[:, None]
    if C.has_window:
        seen = seen & (key[None, :] > row_position[:, None] - window)
    return gl.where(seen, s, NEGATIVE)


@gluon.jit
def _clear_tail(v_smem: gl.tensor, stage: gl.tensor, valid: gl.tensor, C: gl.constexpr) -> None:
    """Zeroes the values of slots past the sequence's end: 0 * NaN would reach the sums."""
    pages: gl.constexpr = C.block // C.page_size
    panels: gl.constexpr = C.head_dim // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offset = gl.arange(0, C.page_size, layout=gl.SliceLayout(1, layout))
    for panel in gl.static_range(panels):
        page = v_smem.index(stage * (pages * panels) + panel * pages + valid // C.page_size)
        values = page.load(layout)
        kept = offset[:, None] < valid % C.page_size
        page.store(gl.where(kept, values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _first_block(
    q: gl.tensor,
    k: gl.tensor,
    zero: gl.tensor,
    k_empty: gl.tensor,
    high: gl.tensor,
    row_position: gl.tensor,
    window: gl.tensor,
    factors: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(token,))
    mbarrier.arrive(k_empty, count=1)
    s = _mask(_scores(s, factors, C), high, row_position, window, C)
    m = gl.max(s, 1)
    p = gl.exp2(s * factors[0] - (finite(m) * factors[0])[:, None])
    return m, gl.sum(p, 1), p


@gluon.jit
def _place_of(step: gl.tensor, C: gl.constexpr) -> gl.tensor:
    """Stage and phase of block number `step` of this program, in the rings of keys and values."""
    return step % C.stages, (step // C.stages) & 1


@gluon.jit
def _start_products(
    side: gl.constexpr,
    q: gl.tensor,
    k: gl.tensor,
    v: gl.tensor,
    weights: gl.tensor,
    zero: gl.tensor,
    acc: gl.tensor,
    bars: gl.tensor,
    stage: gl.tensor,
    v_place: gl.tensor,
    turn: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Starts the scores of the block in `stage`, then the sums of the one at `v_place`."""
    v_stage, v_phase = v_place
    if C.takes_turns:
        mbarrier.wait(bars[TURN].index(side), turn ^ (1 - side))
        turn ^= 1
    s_token = warpgroup_mma(q, k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(bars[V_FULL].index(v_stage), v_phase)
    acc_token = warpgroup_mma(weights, v.index(v_stage), acc, is_async=True)
    if C.takes_turns:
        mbarrier.arrive(bars[TURN].index(1 - side), count=1)
    return s_token, acc_token, turn


@gluon.jit
def _soften(s: gl.tensor, m: gl.tensor, total: gl.tensor, factors: gl.tensor) -> gl.tensor:
    """Row maxima and sums with one more block; what older sums shrink by, and its weights."""
    m_new = gl.maximum(m, gl.max(s, 1))
    m_scaled = finite(m_new) * factors[0]
    shrink = gl.exp2(m * factors[0] - m_scaled)
    p = gl.exp2(s * factors[0] - m_scaled[:, None])
    return m_new, total * shrink + gl.sum(p, 1), shrink, p


@gluon.jit
def _masked_range(
    position: gl.tensor, num_tokens: gl.tensor, window: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    """Blocks from the first on, and below the second, hold keys that some row does not see."""
    masked_from = (position + 1) // C.block
    masked_below = 0
    if C.has_window:
        masked_below = (position + num_tokens - 1 - window) // C.block + 1
    return masked_from, masked_below


@gluon.jit
def _attend_item(
    side: gl.constexpr,
    q: gl.tensor,
    k: gl.tensor,
    v: gl.tensor,
    v_pages: gl.tensor,
    item: gl.tensor,
    bars: gl.tensor,
    num_items: gl.tensor,
    step: gl.tensor,
    turn: gl.tensor,
    slot: gl.tensor,
    window: gl.tensor,
    factors: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """One item's rows of one consumer: sums [64, head_dim], row maxima and row sums."""
    position = recall(item, slot, POSITION)
    num_tokens = recall(item, slot, NUM_TOKENS)
    low = recall(item, slot, LOW)
    high = recall(item, slot, HIGH)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.head_dim, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zero = warpgroup_mma_init(gl.full([ROWS // 2, C.block], 0.0, gl.float32, s_layout))
    row = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, s_layout))
    row_position = position + side * (ROWS // 2 // C.folded) + row // C.folded
    stage, phase = _place_of(step, C)
    q_stage = num_items % C.query_stages
    q = q.index(q_stage * 2 + side)
    mbarrier.wait(bars[Q_FULL].index(q_stage), (num_items // C.query_stages) & 1)
    mbarrier.wait(bars[K_FULL].index(stage), phase)
    keys = k.index(stage).permute((1, 0))
    m, total, p = _first_block(
        q, keys, zero, bars[K_EMPTY].index(stage), high, row_position, window, factors, C
    )
    weights = gl.convert_layout(p.to(q.dtype), p_layout)
    acc = gl.full([ROWS // 2, C.head_dim], 0.0, gl.float32, o_layout)
    valid = recall(item, slot, LENGTH) - high * C.block
    if (valid < C.block) & (valid % C.page_size != 0):
        mbarrier.wait(bars[V_FULL].index(stage), phase)
        _clear_tail(v_pages, stage, valid, C)
    step += 1
    next_stage, next_phase = _place_of(step, C)
    mbarrier.wait(bars[K_FULL].index(next_stage), next_phase, pred=high > low)
    masked_from, masked_below = _masked_range(position, num_tokens, window, C)
    for i in range(1, high - low + 1):
        block = high - i
        v_stage, v_phase = stage, phase
        stage, phase = next_stage, next_phase
        s_token, acc_token, turn = _start_products(
            side, q, k, v, weights, zero, acc, bars, stage, (v_stage, v_phase), turn, C
        )
        s = warpgroup_mma_wait(1, deps=(s_token,))
        mbarrier.arrive(bars[K_EMPTY].index(stage), count=1)
        s = _scores(s, factors, C)
        if (block >= masked_from) | (block < masked_below):
            s = _mask(s, block, row_position, window, C)
        m, total, shrink, p = _soften(s, m, total, factors)
        step += 1
        next_stage, next_phase = _place_of(step, C)
        # This wait's branch also keeps the assembler from moving the softmax below the next wait.
        mbarrier.wait(bars[K_FULL].index(next_stage), next_phase, pred=block > low)
        acc, p = warpgroup_mma_wait(0, deps=(acc_token, p))
        mbarrier.arrive(bars[V_EMPTY].index(v_stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(p.to(q.dtype), p_layout)
    mbarrier.arrive(bars[Q_EMPTY].index(q_stage), count=1)
    mbarrier.wait(bars[V_FULL].index(stage), phase)
    acc_token = warpgroup_mma(weights, v.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    mbarrier.arrive(bars[V_EMPTY].index(stage), count=1)
    return acc, m, total, step, turn


@gluon.jit
def _attend(
    side: gl.constexpr,
    buffers: gl.tensor,
    bars: gl.tensor,
    results: gl.tensor,
    window: gl.tensor,
    factors: gl.tensor,
    flat: gl.constexpr,
    C: gl.constexpr,
) -> None:
    """One of the two consumers."""
    q_smem, k_smem, v_smem, item = buffers
    out, out_scale, sinks, scratch, strides = results
    q = q_smem._reinterpret(q_smem.dtype, [C.query_stages * 2, ROWS // 2, C.head_dim], flat)
    k = k_smem._reinterpret(q_smem.dtype, [C.stages, C.block, C.head_dim], flat)
    v = v_smem._reinterpret(q_smem.dtype, [C.stages, C.block, C.head_dim], flat)
    num_items = 0
    step = 0
    turn = 0
    mbarrier.wait(bars[ITEM_FULL].index(0), 0)
    while recall(item, num_items % ITEM_SLOTS, NUM_TOKENS) > 0:
        slot = num_items % ITEM_SLOTS
        acc, m, total, step, turn = _attend_item(
            side,
            q,
            k,
            v,
            v_smem,
            item,
            bars,
            num_items,
            step,
            turn,
            slot,
            window,
            factors,
            C,
        )
        # Read only now: there are no registers to keep it in while the item's blocks are taken.
        num_tokens = recall(item, slot, NUM_TOKENS)
        token = recall(item, slot, TOKEN)
        head = recall(item, slot, HEADS) * C.folded
        share = recall(item, slot, SHARE)
        mbarrier.arrive(bars[ITEM_EMPTY].index(slot), count=1)
        place = (side, token, num_tokens, head)
        if share == WHOLE:
            total = add_sinks(total, m, sinks + head, factors[0], C)
            o_layout: gl.constexpr = acc.type.layout
            acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
            store((out, out_scale, strides), acc, place, q_smem.dtype, C)
        else:
            if leave_part(acc, m, total, scratch, share, place, C):
                target = (out, out_scale, strides)
                add_parts(scratch, share, target, sinks, place, factors[0], q_smem.dtype, C)
        num_items += 1
        next_slot = num_items % ITEM_SLOTS
        mbarrier.wait(bars[ITEM_FULL].index(next_slot), num_items // ITEM_SLOTS & 1)


@gluon.jit(do_not_specialize=["table_stride", "row_past_end", "window"])
def tiles_kernel(
    q_desc: gl.tensor,
    k_desc: gl.tensor,
    v_desc: gl.tensor,
    table: gl.tensor,
    seq_rows: gl.tensor,
    seq_lens: gl.tensor,
    starts: gl.tensor,
    tile_seq: gl.tensor,
    tile_start: gl.tensor,
    num_tiles: gl.tensor,
    scratch: gl.tensor,
    out: gl.tensor,
    sinks: gl.tensor,
    out_scale: gl.tensor,
    table_stride: gl.tensor,
    row_past_end: gl.tensor,
    stride_t: gl.tensor,
    stride_h: gl.tensor,
    log_scale: gl.tensor,
    cap_scale: gl.tensor,
    cap: gl.tensor,
    window: gl.tensor,
    C: gl.constexpr,
) -> None:
    """All tiles; see the module docstring."""
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = k_desc.layout
    parts: gl.constexpr = C.stages * (C.head_dim // PANEL) * (C.block // C.page_size)
    buffers = (
        gl.allocate_shared_memory(
            dtype,
            [C.query_stages * 2 * (C.head_dim // PANEL), ROWS // 2 // C.folded, C.folded, PANEL],
            q_desc.layout,
        ),
        gl.allocate_shared_memory(dtype, [parts, C.page_size, PANEL], flat),
        gl.allocate_shared_memory(dtype, [parts, C.page_size, PANEL], flat),
        gl.allocate_shared_memory(
            gl.int32, [ITEM_SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
    )
    bars = (
        _barriers(C.query_stages, 1),
        _barriers(C.query_stages, 2),
        _barriers(ITEM_SLOTS, 1),
        _barriers(ITEM_SLOTS, 2),
        _barriers(C.stages, 1),
        _barriers(C.stages, 2),
        _barriers(C.stages, 1),
        _barriers(C.stages, 2),
        _barriers(2, 1),
    )
    fence_async_shared()
    ends = gl.allocate_shared_memory(gl.int32, [MAX_TILES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    strides = (stride_t, stride_h)
    factors = (log_scale, cap_scale, cap)
    lists = (tile_seq, tile_start, seq_rows, seq_lens, starts)
    descs = (q_desc, k_desc, v_desc)
    paging = (table, table_stride, row_past_end)
    work = (num_tiles, scratch, ends)
    results = (out, out_scale, sinks, scratch, strides)
    gl.warp_specialize(
        [
            (_attend, (0, buffers, bars, results, window, factors, flat, C)),
            (_attend, (1, buffers, bars, results, window, factors, flat, C)),
            (load_items, (descs, buffers, bars, lists, paging, work, window, C)),
        ],
        [4, 1],
        [232, 40],
    )


def config_of(work: TileWork) -> TileConfig:
    """The compiled kernel that serves these arguments."""
    head_dim = work.q.shape[2]
    return TileConfig(
        folded=work.folded,
        groups=work.num_groups // work.k_cache.shape[2],
        num_groups=work.num_groups,
        head_dim=head_dim,
        block=64 if head_dim == 256 else 128,
        page_size=work.k_cache.shape[1],
        stages=3 if head_dim == 64 else 2,
        query_stages=1 if head_dim == 256 else 2,
        chunk=CHUNK,
        has_window=work.window > 0,
        has_cap=work.soft_cap > 0,
        has_sinks=work.sinks is not None,
        is_quantized=work.out_scale is not None,
    )


def _pages_of(cache: Tensor, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """The cache as rows of slots, copied one page by one panel at a time."""
    num_pages, page_size, num_heads, head_dim = cache.shape
    width = num_heads * head_dim
    block = [page_size, PANEL.value]
    return TensorDescriptor(cache, [num_pages * page_size, width], [width, 1], block, layout)


def _scratch(work: TileWork, programs: int) -> Tensor:
    """What parts of items leave, behind the counters, which are zeros."""
    places = work.tile_seq.shape[0] * work.num_groups
    parts = min(most_parts(programs), places * MAX_PARTS.value)
    assert 2 * parts < HEAD.value, f"{programs} programs have more than {HEAD.value} counters"
    words = HEAD.value + parts * 2 * HALF.value * (work.q.shape[2] + 2)
    scratch = torch.empty(words, dtype=torch.float32, device=work.q.device)
    scratch[: 1 + 2 * parts].zero_()
    return scratch


def launch_hopper(work: TileWork, config: TileConfig | None = None) -> None:
    """Launches the kernel on the current stream; `config` replaces the default choice."""
    config = config or config_of(work)
    q, cache = work.q, work.k_cache
    flat = gl.NVMMASharedLayout(128, 16, rank=2)
    query_block = [ROWS.value // 2 // config.folded, config.folded, PANEL.value]
    queries = gl.NVMMASharedLayout(128, 16, rank=3)
    programs = num_programs(q.device)
    tiles_kernel[(programs,)](
        TensorDescriptor(q, list(q.shape), list(q.stride()), query_block, queries),
        _pages_of(cache, flat),
        _pages_of(work.v_cache, flat),
        work.block_table,
        work.seq_rows,
        work.seq_lens,
        work.query_start_loc,
        work.tile_seq,
        work.tile_start,
        work.num_tiles,
        _scratch(work, programs),
        work.out,
        q if work.sinks is None else work.sinks,
        q if work.out_scale is None else work.out_scale,
        work.block_table.stride(0),
        cache.shape[0] * cache.shape[1],
        work.out.stride(0),
        work.out.stride(1),
        *work.factors,
        work.window,
        config,
        num_warps=4,
    )
