"""The loading warp of the Hopper tile kernel, and what both sides of it share.

Draws items, or parts of items (`attention_tiles_hopper_split`), describes them to the consumers in
shared memory, and copies queries and pages by TMA.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from compiled_engine.custom_ops.attention_tiles_hopper_split import (
    MAX_TILES,
    TILES,
    WHOLE,
    choose_length,
    find_part,
    pack_share,
    part_ends,
    part_range,
)

PANEL = gl.constexpr(64)  # columns of one swizzled panel of shared memory: 128 bytes
ROWS = gl.constexpr(128)  # of a tile

# places in the tuple of barriers
Q_FULL = gl.constexpr(0)
Q_EMPTY = gl.constexpr(1)
ITEM_FULL = gl.constexpr(2)
ITEM_EMPTY = gl.constexpr(3)
K_FULL = gl.constexpr(4)
K_EMPTY = gl.constexpr(5)
V_FULL = gl.constexpr(6)
V_EMPTY = gl.constexpr(7)
TURN = gl.constexpr(8)

# words of an item's description
NUM_TOKENS = gl.constexpr(0)
POSITION = gl.constexpr(1)
TOKEN = gl.constexpr(2)
HEADS = gl.constexpr(3)
LENGTH = gl.constexpr(4)
LOW = gl.constexpr(5)  # first and last block of keys
HIGH = gl.constexpr(6)
SHARE = gl.constexpr(7)  # which part of an item this is
TABLE_ROW = gl.constexpr(8)
WORDS = gl.constexpr(16)
ITEM_SLOTS = gl.constexpr(4)  # descriptions in shared memory


@dataclass(frozen=True)
class TileConfig:
    """What a compiled kernel is made for.

    Attributes:
        folded: query heads that share a tile.
        groups: sets of `folded` heads of one kv head.
        num_groups: sets of `folded` heads in all.
        head_dim: 64, 128 or 256.
        block: keys of a block.
        page_size: tokens of a page; divides `block`.
        stages: blocks of keys, and as many of values, that shared memory holds.
        query_stages: tiles of queries that shared memory holds.
        chunk: tiles that are finished for one set of heads before the next set.
        has_window, has_cap, has_sinks, is_quantized: whether these arguments mean anything.
        takes_turns: the two consumers issue their products in turn.
    """

    folded: int
    groups: int
    num_groups: int
    head_dim: int
    block: int
    page_size: int
    stages: int = 2
    query_stages: int = 2
    chunk: int = 128
    has_window: bool = False
    has_cap: bool = False
    has_sinks: bool = False
    takes_turns: bool = False
    is_quantized: bool = False


@gluon.jit
def _note(item: gl.tensor, slot: gl.tensor, word: gl.constexpr, value: gl.tensor) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    item.index(slot * WORDS + word).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def recall(item: gl.tensor, slot: gl.tensor, word: gl.constexpr) -> gl.tensor:
    """One word of an announced item, the same in every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(item.index(slot * WORDS + word).load(layout), 0)


@gluon.jit
def seen_blocks(
    position: gl.tensor, num_tokens: gl.tensor, window: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    """First and last block of keys that any row of the tile sees."""
    high = (position + num_tokens - 1) // C.block
    low = 0
    if C.has_window:
        low = gl.maximum(position - window + 1, 0) // C.block
    return low, high


@gluon.jit
def _find_tile(tile: gl.tensor, lists: gl.tensor, C: gl.constexpr) -> gl.tensor:
    """Block-table row, length, first token, its position, tokens; of a tile or a tensor of them."""
    tile_seq, tile_start, seq_rows, seq_lens, starts = lists
    seq = gl.load(tile_seq + tile)
    token = gl.load(tile_start + tile)
    row = gl.load(seq_rows + seq)
    length = gl.load(seq_lens + seq)
    left = gl.load(starts + seq + 1) - token
    return row, length, token, length - left, gl.minimum(ROWS // C.folded, left)


@gluon.jit
def _plan_parts(
    num_tiles: gl.tensor, ends: gl.tensor, lists: gl.tensor, window: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    """Parts of one head group, whose `part_ends` go into `ends`; 0: no item is cut."""
    parts = 0
    items = num_tiles * C.num_groups
    if (items > 0) & (items < gl.num_programs(0)) & (num_tiles <= MAX_TILES):
        tile = gl.arange(0, MAX_TILES, layout=TILES)
        _, _, _, position, tokens = _find_tile(gl.minimum(tile, num_tiles - 1), lists, C)
        low, high = seen_blocks(position, tokens, window, C)
        blocks = gl.where(tile < num_tiles, high - low + 1, 0)
        length = choose_length(blocks, num_tiles, C.num_groups, gl.num_programs(0))
        if length > 0:
            part_end = part_ends(blocks, length)
            ends.store(part_end)
            parts = gl.max(part_end, 0)
    return parts


@gluon.jit
def _locate(number: gl.tensor, plan: gl.tensor, C: gl.constexpr) -> gl.tensor:
    """Tile and head group of item `number`, or of part `number` where items are cut; which part."""
    num_tiles, num_parts, ends = plan
    part = 0
    parts = 1
    share = WHOLE
    if num_parts > 0:
        heads = number // num_parts
        rest = number - heads * num_parts
        tile, first, parts = find_part(ends.load(TILES), rest)
        part = rest - first
        if parts > 1:
            share = pack_share(heads * num_parts + first, part, parts)
    else:
        per_chunk = C.chunk * C.num_groups
        chunk = number // per_chunk
        rest = number - chunk * per_chunk
        size = gl.minimum(C.chunk, num_tiles - chunk * C.chunk)
        heads = rest // size
        tile = chunk * C.chunk + (rest - heads * size)
    return tile, heads, part, parts, share


@gluon.jit
def _announce(
    number: gl.tensor,
    item: gl.tensor,
    bars: gl.tensor,
    num_items: gl.tensor,
    plan: gl.tensor,
    lists: gl.tensor,
    window: gl.tensor,
    C: gl.constexpr,
) -> None:
    """Describes item `number`, this program's item `num_items`; no tokens: there is none left."""
    num_tiles, num_parts, _ = plan
    slot = num_items % ITEM_SLOTS
    mbarrier.wait(bars[ITEM_EMPTY].index(slot), (num_items // ITEM_SLOTS & 1) ^ 1)
    if number < gl.where(num_parts > 0, num_parts, num_tiles) * C.num_groups:
        tile, heads, part, parts, share = _locate(number, plan, C)
        row, length, token, position, num_tokens = _find_tile(tile, lists, C)
        low, high = seen_blocks(position, num_tokens, window, C)
        low, high = part_range(low, high, part, parts)
        _note(item, slot, NUM_TOKENS, num_tokens)
        _note(item, slot, POSITION, position)
        _note(item, slot, TOKEN, token)
        _note(item, slot, HEADS, heads)
        _note(item, slot, LENGTH, length)
        _note(item, slot, LOW, low)
        _note(item, slot, HIGH, high)
        _note(item, slot, SHARE, share)
        _note(item, slot, TABLE_ROW, row)
    else:
        _note(item, slot, NUM_TOKENS, 0)
    mbarrier.arrive(bars[ITEM_FULL].index(slot), count=1)


@gluon.jit
def _page_rows(
    pages: gl.tensor,
    block: gl.tensor,
    last_page: gl.tensor,
    row_past_end: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Row of the flattened cache where each page of a block begins; past the last page: outside."""
    rows: gl.tuple = ()
    for i in gl.static_range(C.block // C.page_size):
        page = block * (C.block // C.page_size) + i
        row = gl.load(pages + gl.minimum(page, last_page)) * C.page_size
        rows = rows + (gl.where(page > last_page, row_past_end, row),)  # noqa: RUF005
    return rows


@gluon.jit
def _copy_block(
    desc: gl.tensor,
    rows: gl.tensor,
    column: gl.tensor,
    full: gl.tensor,
    smem: gl.tensor,
    stage: gl.tensor,
    C: gl.constexpr,
) -> None:
    pages: gl.constexpr = C.block // C.page_size
    panels: gl.constexpr = C.head_dim // PANEL
    mbarrier.expect(full, C.block * C.head_dim * 2)
    for i in gl.static_range(pages):
        for panel in gl.static_range(panels):
            part = smem.index(stage * (pages * panels) + panel * pages + i)
            tma.async_copy_global_to_shared(desc, [rows[i], column + panel * PANEL], full, part)


@gluon.jit
def _copy_queries(
    desc: gl.tensor,
    token: gl.tensor,
    head: gl.tensor,
    bars: gl.tensor,
    num_items: gl.tensor,
    smem: gl.tensor,
    C: gl.constexpr,
) -> None:
    stage = num_items % C.query_stages
    mbarrier.wait(bars[Q_EMPTY].index(stage), ((num_items // C.query_stages) & 1) ^ 1)
    full = bars[Q_FULL].index(stage)
    panels: gl.constexpr = C.head_dim // PANEL
    half: gl.constexpr = ROWS // 2 // C.folded
    mbarrier.expect(full, ROWS * C.head_dim * 2)
    for i in gl.static_range(2):
        for panel in gl.static_range(panels):
            part = smem.index((stage * 2 + i) * panels + panel)
            tma.async_copy_global_to_shared(
                desc, [token + i * half, head, panel * PANEL], full, part
            )


@gluon.jit
def load_items(
    descs: gl.tensor,
    buffers: gl.tensor,
    bars: gl.tensor,
    lists: gl.tensor,
    paging: gl.tensor,
    work: gl.tensor,
    window: gl.tensor,
    C: gl.constexpr,
) -> None:
    """The loading warp."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, item = buffers
    table, table_stride, row_past_end = paging
    num_tiles, scratch, ends = work
    num_tiles = gl.load(num_tiles)
    plan = (num_tiles, _plan_parts(num_tiles, ends, lists, window, C), ends)
    counter = scratch.to(gl.pointer_type(gl.int32), bitcast=True)
    num_items = 0
    step = 0
    _announce(gl.program_id(0), item, bars, num_items, plan, lists, window, C)
    while recall(item, num_items % ITEM_SLOTS, NUM_TOKENS) > 0:
        slot = num_items % ITEM_SLOTS
        pages = table + recall(item, slot, TABLE_ROW).to(gl.int64) * table_stride
        last_page = (recall(item, slot, LENGTH) - 1) // C.page_size
        heads = recall(item, slot, HEADS)
        column = heads // C.groups * C.head_dim
        token = recall(item, slot, TOKEN)
        low = recall(item, slot, LOW)
        high = recall(item, slot, HIGH)
        for i in range(high - low + 1):
            stage = step % C.stages
            phase = ((step // C.stages) & 1) ^ 1
            rows = _page_rows(pages, high - i, last_page, row_past_end, C)
            mbarrier.wait(bars[K_EMPTY].index(stage), phase)
            _copy_block(k_desc, rows, column, bars[K_FULL].index(stage), k_smem, stage, C)
            if i == 0:
                _copy_queries(q_desc, token, heads * C.folded, bars, num_items, q_smem, C)
            mbarrier.wait(bars[V_EMPTY].index(stage), phase)
            _copy_block(v_desc, rows, column, bars[V_FULL].index(stage), v_smem, stage, C)
            if i == 0:
                # The next item is looked up now: its loads end long before this item does.
                number = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                _announce(number, item, bars, num_items + 1, plan, lists, window, C)
            step += 1
        num_items += 1
