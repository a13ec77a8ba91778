"""Triton kernels of `attention_work`, and its launcher on a GPU.

`scan_kernel`, a program a candidate, compares its first page, then its leading pages, with those of
the first candidate that has the same first page, and lists the query tiles of longer sequences.
`plan_kernel`, one program, forms groups, lays all units in a line of tiles, and cuts it by lanes.
`attention_work_spec` says the same in plain Python.

Neither kernel lets the next one start early: later kernels read the work list before they wait for
their direct predecessor, and that is safe only because nothing starts before these have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.attention_work import (
    KV_TILE,
    MAX_CANDIDATES,
    MERGE_FIELDS,
    MIN_MEMBERS,
    MIN_SHARED_POSITIONS,
    UNIT_FIELDS,
    Header,
    Heads,
    Merge,
    StepIndices,
    WorkShape,
    num_lanes,
    work_shape,
)
from compiled_engine.custom_ops.triton_common import has_pdl, wait_for_previous

_MANY = tl.constexpr(1 << 30)


class Places(NamedTuple):
    """Sizes and places that follow the size of the step: given when a kernel is launched."""

    num_candidates: int
    group_partial: int
    members: int
    member_candidates: int
    merges: int
    leaders: int
    shared_pages: int
    group_units: int
    group_tiles: int
    tile_seq: int
    tile_start: int


@dataclass(frozen=True)
class WorkConfig:
    """What the kernels are compiled for.

    Attributes:
        padded: the number of candidates, rounded up to a power of two.
        num_seqs: places for sequences.
        num_lanes: of the decode kernel.
        width: members that share a tile of a group.
        min_pages: a shorter common prefix makes no group.
        lanes, units: where these regions begin.
    """

    padded: int
    num_seqs: int
    num_lanes: int
    width: int
    query_tile_tokens: int
    page_size: int
    min_pages: int
    lanes: int
    units: int
    is_decode: bool
    has_groups: bool
    pdl: bool
    header: int = 0
    kv_tile: int = KV_TILE
    min_members: int = MIN_MEMBERS
    unit_fields: int = UNIT_FIELDS
    merge_fields: int = MERGE_FIELDS
    page_block: int = 256  # pages compared at a time
    tile_block: int = 128  # query tiles written at a time
    columns: int = 32  # candidates compared with all others at a time
    num_units: int = Header.NUM_UNITS
    num_kv_tiles: int = Header.NUM_KV_TILES
    num_group_units: int = Header.NUM_GROUP_UNITS
    num_query_tiles: int = Header.NUM_QUERY_TILES
    num_real: int = Header.NUM_REAL
    merge_token: int = Merge.TOKEN
    own_row: int = Merge.OWN_ROW
    own_count: int = Merge.OWN_COUNT
    group_row: int = Merge.GROUP_ROW
    group_count: int = Merge.GROUP_COUNT


@triton.jit
def _candidates(places: tl.tensor, step: tl.tuple, at: tl.tuple, C: tl.constexpr) -> tl.tuple:
    """Token, row and length (0: not a candidate) of the candidates at `places`."""
    token_rows, positions, seq_rows, seq_lens, starts = step
    inside = places < at.num_candidates
    if C.is_decode:
        valid = inside & (places < tl.load(starts + C.num_seqs))
        token = places
        row = tl.load(token_rows + places, mask=valid, other=0).to(tl.int32)
        length = tl.load(positions + places, mask=valid, other=-1).to(tl.int32) + 1
    else:
        token = tl.load(starts + places, mask=inside, other=0)
        after = tl.load(starts + places + 1, mask=inside, other=0)
        row = tl.load(seq_rows + places, mask=inside, other=0)
        length = tl.load(seq_lens + places, mask=inside, other=0)
        length = tl.where(after - token == 1, length, 0)
    return token, row, length


@triton.jit
def _list_query_tiles(
    me: tl.tensor, starts: tl.tensor, work: tl.tensor, at: tl.tuple, C: tl.constexpr
) -> None:
    """Lists the query tiles of sequence `me`, those that see most KV first."""
    places = tl.arange(0, C.padded)
    begin = tl.load(starts + places, mask=places < at.num_candidates, other=0)
    end = tl.load(starts + places + 1, mask=places < at.num_candidates, other=0)
    size: tl.constexpr = C.query_tile_tokens
    tiles = tl.where(end - begin > 1, (end - begin + size - 1) // size, 0)
    first = tl.sum(tl.where(places < me, tiles, 0), 0)
    count = tl.sum(tl.where(places == me, tiles, 0), 0)
    my_begin = tl.load(starts + me)
    for i in range(0, count, C.tile_block):
        tile = i + tl.arange(0, C.tile_block)
        mask = tile < count
        target = work + first + tile
        tl.store(target + at.tile_seq, tl.zeros_like(tile) + me, mask=mask)
        tl.store(target + at.tile_start, my_begin + (count - 1 - tile) * size, mask=mask)
    if me == 0:
        tl.store(work + C.header + C.num_query_tiles, tl.sum(tiles, 0))


@triton.jit
def _count_shared(
    mine: tl.tensor, his: tl.tensor, limit: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Number of leading entries below `limit` that are equal in two rows of the block table."""
    at = tl.arange(0, BLOCK)
    shared = limit * 0
    going = limit > 0
    while going:
        place = shared + at
        inside = place < limit
        my_page = tl.load(mine + place, mask=inside, other=0)
        his_page = tl.load(his + place, mask=inside, other=0)
        ends = (my_page != his_page) | (place >= limit)
        equal = tl.min(tl.where(ends, at, BLOCK), 0)
        shared += equal
        going = (equal == BLOCK) & (shared < limit)
    return shared


@triton.jit
def _find_leader(
    me: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    step: tl.tuple,
    at: tl.tuple,
    C: tl.constexpr,
) -> tl.tuple:
    """First candidate with the first page of `me` (or -1), and leading pages in common with it."""
    places = tl.arange(0, C.padded)
    _, row, length = _candidates(places, step, at, C)
    has_page = length >= C.page_size
    first_page = tl.load(block_table + row.to(tl.int64) * table_stride, mask=has_page, other=-1)
    is_me = places == me
    my_length = tl.sum(tl.where(is_me, length, 0), 0)
    my_row = tl.sum(tl.where(is_me, row, 0), 0)
    my_page = tl.sum(tl.where(is_me, first_page, 0), 0)
    same = (first_page == my_page) & has_page
    leader = my_length * 0 - 1
    shared = my_length * 0
    if (my_length >= C.page_size) & (tl.sum(same.to(tl.int32), 0) >= C.min_members):
        leader = tl.min(tl.where(same, places, C.padded), 0)
        is_leader = places == leader
        his_length = tl.sum(tl.where(is_leader, length, 0), 0)
        his_row = tl.sum(tl.where(is_leader, row, 0), 0)
        mine = block_table + my_row.to(tl.int64) * table_stride
        his = block_table + his_row.to(tl.int64) * table_stride
        limit = tl.minimum(my_length, his_length) // C.page_size
        shared = _count_shared(mine, his, limit, C.page_block)
    return leader, shared


@triton.jit
def scan_kernel(
    block_table: tl.tensor,
    table_stride: tl.tensor,
    token_rows: tl.tensor,
    positions: tl.tensor,
    seq_rows: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Grid: one program a candidate. Writes its leader and shared pages, and its query tiles."""
    wait_for_previous(C.pdl)
    me = tl.program_id(0)
    if not C.is_decode:
        _list_query_tiles(me, starts, work, at, C)
    if C.has_groups:
        step = (token_rows, positions, seq_rows, seq_lens, starts)
        leader, shared = _find_leader(me, block_table, table_stride, step, at, C)
        tl.store(work + at.leaders + me, leader)
        tl.store(work + at.shared_pages + me, shared)


@triton.jit
def _find_groups(places: tl.tensor, work: tl.tensor, at: tl.tuple, C: tl.constexpr) -> tl.tuple:
    """Leader, members, place among them, shared positions; members is 0 outside of groups."""
    inside = places < at.num_candidates
    leader = tl.load(work + at.leaders + places, mask=inside, other=-1)
    pages = tl.load(work + at.shared_pages + places, mask=inside, other=0)
    eligible = pages >= C.min_pages
    members = tl.zeros_like(places)
    rank = tl.zeros_like(places)
    shared = tl.zeros_like(places) + _MANY
    if tl.max(pages, 0) >= C.min_pages:
        for first in range(0, at.num_candidates, C.columns):
            other = first + tl.arange(0, C.columns)
            other_leader = tl.load(
                work + at.leaders + other, mask=other < at.num_candidates, other=-1
            )
            theirs = tl.load(
                work + at.shared_pages + other, mask=other < at.num_candidates, other=0
            )
            same = (leader[:, None] == other_leader[None, :]) & (theirs >= C.min_pages)[None, :]
            members += tl.sum(same.to(tl.int32), 1)
            before = same & (other[None, :] < places[:, None])
            rank += tl.sum(before.to(tl.int32), 1)
            shared = tl.minimum(shared, tl.min(tl.where(same, theirs[None, :], _MANY), 1))
    grouped = eligible & (members >= C.min_members)
    members = tl.where(grouped, members, 0)
    rank = tl.where(grouped, rank, 0)
    return leader, members, rank, tl.where(grouped, shared, 0) * C.page_size


@triton.jit
def _exclusive_sum(values: tl.tensor) -> tl.tensor:
    return tl.cumsum(values, 0) - values


@triton.jit
def _place_groups(
    places: tl.tensor, groups: tl.tuple, work: tl.tensor, at: tl.tuple, C: tl.constexpr
) -> tl.tuple:
    """First unit and first tile of every candidate's group, and how many of both there are."""
    leader, members, rank, shared = groups
    grouped = members > 0
    leads = grouped & (rank == 0)
    units = tl.where(leads, (members + C.width - 1) // C.width, 0)
    tiles = units * ((shared + C.kv_tile - 1) // C.kv_tile)
    tl.store(work + at.group_units + places, _exclusive_sum(units), mask=leads)
    tl.store(work + at.group_tiles + places, _exclusive_sum(tiles), mask=leads)
    tl.debug_barrier()  # other threads read the leaders' values
    unit = tl.load(work + at.group_units + leader, mask=grouped, other=0)
    tile = tl.load(work + at.group_tiles + leader, mask=grouped, other=0)
    return unit, tile, tl.sum(units, 0), tl.sum(tiles, 0)


@triton.jit
def _lane_of(tile: tl.tensor, num_tiles: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Lane that takes a tile."""
    share, extra = num_tiles // LANES, num_tiles % LANES
    longer = extra * (share + 1)
    later = extra + (tile - longer) // tl.maximum(share, 1)
    return tl.where(tile < longer, tile // (share + 1), later)


@triton.jit
def _segments(
    tile: tl.tensor, count: tl.tensor, num_tiles: tl.tensor, LANES: tl.constexpr
) -> tl.tuple:
    """First lane and number of lanes of units."""
    first = _lane_of(tile, num_tiles, LANES)
    return first, _lane_of(tile + count - 1, num_tiles, LANES) - first + 1


@triton.jit
def _write_units(
    wanted: tl.tensor,
    fields: tl.tuple,
    num_tiles: tl.tensor,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Writes units, and each into the lanes that begin in it.

    `fields` are the unit, then its fields in order.
    """
    unit = fields[0]
    record = work + C.units + unit * C.unit_fields
    for i in tl.static_range(9):
        tl.store(record + i, fields[i + 1], mask=wanted)
    tile, count = fields[1], fields[2]
    first, num_segments = _segments(tile, count, num_tiles, C.num_lanes)
    share, extra = num_tiles // C.num_lanes, num_tiles % C.num_lanes
    # a lane that began in an earlier unit is not this one's
    skipped = (first * share + tl.minimum(first, extra) < tile).to(tl.int32)
    for i in range(0, tl.max(tl.where(wanted, num_segments, 0), 0)):
        begins = wanted & (i >= skipped) & (i < num_segments)
        tl.store(work + C.lanes + first + i, unit, mask=begins)


@triton.jit
def _write_groups(
    candidates: tl.tuple,
    groups: tl.tuple,
    placed: tl.tuple,
    num_tiles: tl.tensor,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Writes the tiles of groups, their members, and where their results are merged."""
    places, token, row = candidates
    _, members, rank, shared = groups
    first_unit, first_tile = placed
    grouped = members > 0
    place = rank % C.width
    unit = first_unit + rank // C.width
    member = unit * C.width + place
    tl.store(work + at.members + member, token, mask=grouped)
    tl.store(work + at.member_candidates + member, places, mask=grouped)
    count = (shared + C.kv_tile - 1) // C.kv_tile
    tile = first_tile + rank // C.width * count
    size = tl.minimum(members - (rank - place), C.width)
    partial = at.group_partial + unit * C.width
    first = unit * C.width
    fields = (unit, tile, count, token * 0, shared, row, first, size, partial, token * 0)
    _write_units(grouped & (place == 0), fields, num_tiles, work, at, C)
    lane, num_segments = _segments(tile, count, num_tiles, C.num_lanes)
    merge = work + at.merges + places * C.merge_fields
    tl.store(merge + C.group_row, partial + lane * C.width + place, mask=grouped)
    tl.store(merge + C.group_count, num_segments, mask=grouped)


@triton.jit
def _write_own(
    candidates: tl.tuple,
    length: tl.tensor,
    start: tl.tensor,
    grouped: tl.tensor,
    before: tl.tuple,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> tl.tensor:
    """Writes what candidates read alone, from `start` on; returns the number of all tiles."""
    places, token, row = candidates
    units_before, tiles_before = before
    count = (tl.where(length > 0, length - start, 0) + C.kv_tile - 1) // C.kv_tile
    num_tiles = tiles_before + tl.sum(count, 0)
    own = count > 0
    index = _exclusive_sum(own.to(tl.int32))
    tile = tiles_before + _exclusive_sum(count)
    lane, num_segments = _segments(tile, count, num_tiles, C.num_lanes)
    is_final = own & (num_segments == 1) & ~grouped  # its one segment is the result
    partial = tl.where(is_final, -1, index)
    unit = units_before + index
    fields = (unit, tile, count, start, length, row, token, token * 0, partial, places)
    _write_units(own, fields, num_tiles, work, at, C)
    merge = work + at.merges + places * C.merge_fields
    listed = (length > 0) & ~is_final
    tl.store(merge + C.merge_token, tl.where(listed, token, -1), mask=places < at.num_candidates)
    tl.store(merge + C.own_row, index + lane, mask=listed & own)
    tl.store(merge + C.own_count, num_segments, mask=listed & own)
    tl.store(work + C.header + C.num_units, units_before + tl.sum(own.to(tl.int32), 0))
    return num_tiles


@triton.jit
def plan_kernel(
    token_rows: tl.tensor,
    positions: tl.tensor,
    seq_rows: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Grid: one program. See the module docstring."""
    wait_for_previous(C.pdl)
    places = tl.arange(0, C.padded)
    step = (token_rows, positions, seq_rows, seq_lens, starts)
    token, row, length = _candidates(places, step, at, C)
    candidates = (places, token, row)
    zeros = tl.zeros_like(places)
    if C.has_groups:
        groups = _find_groups(places, work, at, C)
        grouped = groups[1] > 0
        shared = groups[3]
        unit, tile, num_units, num_tiles = zeros, zeros, tl.sum(zeros, 0), tl.sum(zeros, 0)
        if tl.max(shared, 0) > 0:
            unit, tile, num_units, num_tiles = _place_groups(places, groups, work, at, C)
        before = (num_units, num_tiles)
        num_tiles = _write_own(candidates, length, shared, grouped, before, work, at, C)
        if num_units > 0:
            _write_groups(candidates, groups, (unit, tile), num_tiles, work, at, C)
        tl.store(work + C.header + C.num_group_units, num_units)
    else:
        none = tl.sum(zeros, 0)
        num_tiles = _write_own(candidates, length, zeros, zeros > 0, (none, none), work, at, C)
    tl.store(work + C.header + C.num_kv_tiles, num_tiles)
    tl.store(work + C.header + C.num_real, tl.load(starts + C.num_seqs))


def launch_work(
    work: Tensor, shape: WorkShape, step: StepIndices, page_size: int, *, is_decode: bool
) -> None:
    """Fills a zeroed work list in place.

    Raises:
        ValueError: more candidates than one program handles.
    """
    count = shape.num_candidates
    if count > MAX_CANDIDATES:
        raise ValueError(f"{count} tokens or sequences decode at once; at most {MAX_CANDIDATES}")
    if count == 0:
        return
    starts = shape.starts
    config = WorkConfig(
        padded=max(4, triton.next_power_of_2(count)),
        num_seqs=step.seq_rows.shape[0],
        num_lanes=shape.num_lanes,
        width=shape.members_per_tile,
        query_tile_tokens=shape.query_tile_tokens,
        page_size=page_size,
        min_pages=-(-MIN_SHARED_POSITIONS // page_size),
        lanes=starts["lanes"],
        units=starts["units"],
        is_decode=is_decode,
        has_groups=count >= MIN_MEMBERS,
        pdl=has_pdl(work.device),
    )
    sizes = {"num_candidates": count, "group_partial": shape.group_partial_start, **starts}
    at = Places(*(sizes[name] for name in Places._fields))
    table, *indices = step
    options = {"launch_pdl": True} if config.pdl else {}
    if config.has_groups or not is_decode:
        stride = table.stride(0)
        scan_kernel[(count,)](table, stride, *indices, work, at, config, num_warps=2, **options)
    warps = 4 if count <= 64 else 8
    plan_kernel[(1,)](*indices, work, at, config, num_warps=warps, **options)


def attention_work_cuda(
    block_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    seq_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    is_decode: bool,
) -> Tensor:
    """The work list made by the kernels; arguments and result as `reference_work`.

    Raises:
        ValueError: more candidates than one program handles.
    """
    step = StepIndices(block_table, token_rows, positions, seq_rows, seq_lens, query_start_loc)
    shape = work_shape(
        num_lanes(block_table.device, num_kv_heads),
        Heads(num_heads, num_kv_heads),
        token_rows.shape[0],
        seq_rows.shape[0],
        is_decode=is_decode,
    )
    step = StepIndices(*(tensor.contiguous() for tensor in step))
    work = block_table.new_zeros(shape.total_size)
    launch_work(work, shape, step, page_size, is_decode=is_decode)
    return work
