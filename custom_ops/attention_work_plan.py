"""The Triton kernel that plans a step's decode attention, and what both kernels of it are made for.

`plan_kernel`, one program, forms groups, lays all units in a line of tiles, cuts it by lanes, and
writes what each lane needs to begin. `attention_work_spec` says the same in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from compiled_engine.custom_ops.attention_work import (
    GROUP_COST,
    GROUP_TILE,
    KV_TILE,
    LANE_FIELDS,
    LANE_PAGES,
    MERGE_FIELDS,
    MIN_LANE_TILES,
    MIN_MEMBERS,
    NUM_UNIT_FIELDS,
    OWN_COST,
    UNIT_COST,
    UNIT_FIELDS,
    Header,
    Lane,
    Merge,
    Unit,
)
from compiled_engine.custom_ops.triton_common import wait_for_previous

_MANY = tl.constexpr(1 << 30)
_NUM_FIELDS = tl.constexpr(NUM_UNIT_FIELDS)


class Places(NamedTuple):
    """Sizes and places that follow the size of the step: given when a kernel is launched."""

    num_candidates: int
    group_partial: int
    members: int
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
        padded_lanes: rounded up to a power of two.
        width: members that share a tile of a group.
        min_pages: a shorter common prefix makes no group.
        lanes, units: where these regions begin.
    """

    padded: int
    num_seqs: int
    num_lanes: int
    padded_lanes: int
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
    group_tile: int = GROUP_TILE
    unit_cost: int = UNIT_COST
    group_cost: int = GROUP_COST
    own_cost: int = OWN_COST
    min_members: int = MIN_MEMBERS
    min_lane_tiles: int = MIN_LANE_TILES
    lane_fields: int = LANE_FIELDS
    num_pages: int = LANE_PAGES
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
    lane_unit: int = Lane.UNIT
    lane_tile: int = Lane.TILE
    lane_stop: int = Lane.STOP
    lane_real: int = Lane.NUM_REAL
    lane_record: int = Lane.RECORD
    lane_pages: int = Lane.PAGES
    tile_start: int = Unit.TILE_START
    kv_start: int = Unit.KV_START
    kv_end: int = Unit.KV_END
    row: int = Unit.ROW
    num_members: int = Unit.NUM_MEMBERS


@triton.jit
def candidates_at(places: tl.tensor, step: tl.tuple, at: tl.tuple, C: tl.constexpr) -> tl.tuple:
    """Token, row, length (0: not a candidate) and end of early KV of the candidates at `places`."""
    token_rows, positions, seq_rows, seq_lens, starts = step
    inside = places < at.num_candidates
    if C.is_decode:
        valid = inside & (places < tl.load(starts + C.num_seqs))
        token = places
        row = tl.load(token_rows + places, mask=valid, other=0).to(tl.int32)
        before = tl.load(token_rows + places - 1, mask=valid & (places > 0), other=-1).to(tl.int32)
        length = tl.load(positions + places, mask=valid, other=-1).to(tl.int32) + 1
        # a row's later tokens may read what its first ones wrote in this step
        early_end = tl.where(row != before, length - 1, 0)
    else:
        token = tl.load(starts + places, mask=inside, other=0)
        after = tl.load(starts + places + 1, mask=inside, other=0)
        row = tl.load(seq_rows + places, mask=inside, other=0)
        length = tl.load(seq_lens + places, mask=inside, other=0)
        length = tl.where(after - token == 1, length, 0)
        early_end = length - 1
    return token, row, length, early_end


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
    tiles = units * ((shared + C.group_tile - 1) // C.group_tile)
    tl.store(work + at.group_units + places, _exclusive_sum(units), mask=leads)
    tl.store(work + at.group_tiles + places, _exclusive_sum(tiles), mask=leads)
    tl.debug_barrier()  # other threads read the leaders' values
    unit = tl.load(work + at.group_units + leader, mask=grouped, other=0)
    tile = tl.load(work + at.group_tiles + leader, mask=grouped, other=0)
    return unit, tile, tl.sum(units, 0), tl.sum(tiles, 0)


class Line(NamedTuple):
    """All tiles, and of them those of prefixes; all units."""

    num_tiles: tl.tensor
    num_shared: tl.tensor
    num_units: tl.tensor


@triton.jit
def _cost_before(tile: tl.tensor, unit: tl.tensor, line: tl.tuple, C: tl.constexpr) -> tl.tensor:
    """Of all that stands before a tile of a unit."""
    shared = tl.minimum(tile, line.num_shared)
    return unit * C.unit_cost + shared * C.group_cost + (tile - shared) * C.own_cost


@triton.jit
def _shares(line: tl.tuple, C: tl.constexpr) -> tl.tuple:
    """Cost of each lane in use, and how many of them take one more."""
    wanted = (line.num_tiles + C.min_lane_tiles - 1) // C.min_lane_tiles
    wanted = tl.maximum(tl.maximum(wanted, line.num_units), 1)
    lanes = tl.minimum(wanted, C.num_lanes)
    cost = _cost_before(line.num_tiles, tl.maximum(line.num_units - 1, 0), line, C)
    return cost // lanes, cost % lanes


@triton.jit
def _lane_of(tile: tl.tensor, unit: tl.tensor, line: tl.tuple, C: tl.constexpr) -> tl.tensor:
    """Lane that takes a tile of a unit."""
    share, extra = _shares(line, C)
    cost = _cost_before(tile, unit, line, C)
    longer = extra * (share + 1)
    later = extra + (cost - longer) // tl.maximum(share, 1)
    return tl.where(cost < longer, cost // (share + 1), later)


@triton.jit
def _segments(
    unit: tl.tensor, tile: tl.tensor, count: tl.tensor, line: tl.tuple, C: tl.constexpr
) -> tl.tuple:
    """First lane and number of lanes of units."""
    first = _lane_of(tile, unit, line, C)
    return first, _lane_of(tile + count - 1, unit, line, C) - first + 1


@triton.jit
def _write_units(
    wanted: tl.tensor,
    fields: tl.tuple,
    line: tl.tuple,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Writes units, and each into the lanes that begin or end in it.

    `fields` are the unit, then its fields in order.
    """
    unit = fields[0]
    record = work + C.units + unit * C.unit_fields
    for i in tl.static_range(_NUM_FIELDS):
        tl.store(record + i, fields[i + 1], mask=wanted)
    tile, count = fields[1], fields[2]
    first, num_segments = _segments(unit, tile, count, line, C)
    last = first + num_segments - 1
    # where a lane begins or ends in the unit before or after, that one says so
    began = (unit > 0) & (_lane_of(tile - 1, unit - 1, line, C) == first)
    goes_on = unit + 1 < line.num_units
    goes_on &= _lane_of(tile + count, unit + 1, line, C) == last
    before = _cost_before(tile, unit, line, C)
    cost = tl.where(tile < line.num_shared, C.group_cost, C.own_cost)
    share, extra = _shares(line, C)
    for i in range(0, tl.max(tl.where(wanted, num_segments, 0), 0)):
        lane = first + i
        record = work + C.lanes + lane * C.lane_fields
        inside = wanted & (lane <= last)
        begins = inside & ((i > 0) | ~began)
        start = lane * share + tl.minimum(lane, extra)
        stop = start + share + (lane < extra).to(tl.int32)
        tl.store(record + C.lane_unit, unit, mask=begins)
        skipped = (tl.maximum(start - before, 0) + cost - 1) // cost
        tl.store(record + C.lane_tile, tile + skipped, mask=begins)
        taken = tl.minimum((tl.maximum(stop - before, 0) + cost - 1) // cost, count)
        tl.store(record + C.lane_stop, tile + taken, mask=inside & ((lane < last) | ~goes_on))


@triton.jit
def _group_places(
    groups: tl.tuple, placed: tl.tuple, line: tl.tuple, at: tl.tuple, C: tl.constexpr
) -> tl.tuple:
    """Where each member's prefix is read: unit, its first tile and tiles, the member's place in it,
    its partial row, segments and members; all 0 outside of groups."""
    _, members, rank, shared = groups
    grouped = members > 0
    place = rank % C.width
    unit = placed[0] + rank // C.width
    count = (shared + C.group_tile - 1) // C.group_tile
    tile = placed[1] + rank // C.width * count
    size = tl.minimum(members - (rank - place), C.width)
    lane, num_segments = _segments(unit, tile, count, line, C)
    row = at.group_partial + (unit + lane) * C.width + place
    row = tl.where(grouped, row, 0)
    num_segments = tl.where(grouped, num_segments, 0)
    return unit, tile, count, place, row, num_segments, tl.where(grouped, size, 0), lane


@triton.jit
def _write_groups(
    candidates: tl.tuple,
    groups: tl.tuple,
    group_places: tl.tuple,
    line: tl.tuple,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Writes the tiles of groups and their members."""
    _, token, row, _ = candidates
    _, members, _, shared = groups
    unit, tile, count, place, _, _, size, lane = group_places
    grouped = members > 0
    first = unit * C.width
    tl.store(work + at.members + first + place, token, mask=grouped)
    partial = at.group_partial + first
    zero = token * 0
    fields = (
        unit, tile, count, zero, shared, row, first, size, partial, shared, lane,
        zero, zero, zero, zero,
    )  # fmt: skip
    _write_units(grouped & (place == 0), fields, line, work, at, C)


@triton.jit
def _write_own(
    candidates: tl.tuple,
    own: tl.tuple,
    group_places: tl.tuple,
    line: tl.tuple,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Writes what candidates read alone, and where all their partial results are."""
    places, token, row, early_end = candidates
    start, length, index, num_units, tile, count = own
    group_unit, _, _, _, group_row, group_count, group_size, _ = group_places
    grouped = group_count > 0
    wanted = count > 0
    unit = num_units + index
    lane, num_segments = _segments(unit, tile, count, line, C)
    is_final = wanted & (num_segments == 1) & ~grouped  # its one segment is the result
    partial = tl.where(is_final, -1, index)
    zero = token * 0
    group_unit = tl.where(grouped, group_unit, 0)
    fields = (
        unit, tile, count, start, length, row, token, zero, partial, early_end, lane,
        group_row, group_count, group_unit, group_size,
    )  # fmt: skip
    _write_units(wanted, fields, line, work, at, C)
    merge = work + at.merges + places * C.merge_fields
    listed = wanted & ~is_final
    tl.store(merge + C.merge_token, tl.where(listed, token, -1), mask=places < at.num_candidates)
    tl.store(merge + C.own_row, index + lane, mask=listed)
    tl.store(merge + C.own_count, num_segments, mask=listed)
    tl.store(merge + C.group_row, group_row, mask=grouped)
    tl.store(merge + C.group_count, group_count, mask=grouped)


@triton.jit
def _write_lanes(
    block_table: tl.tensor,
    table_stride: tl.tensor,
    num_real: tl.tensor,
    work: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Completes the lanes' records."""
    lane = tl.arange(0, C.padded_lanes)
    is_lane = lane < C.num_lanes
    record = work + C.lanes + lane * C.lane_fields
    tl.store(record + C.lane_real, num_real + lane * 0, mask=is_lane)
    tl.debug_barrier()  # other threads wrote the units
    tile = tl.load(record + C.lane_tile, mask=is_lane, other=0)
    busy = tl.load(record + C.lane_stop, mask=is_lane, other=0) > tile
    unit = tl.load(record + C.lane_unit, mask=busy, other=0)
    source = work + C.units + unit * C.unit_fields
    for i in tl.static_range(_NUM_FIELDS):
        field = tl.load(source + i, mask=busy, other=0)
        tl.store(record + C.lane_record + i, field, mask=busy)
    before = tile - tl.load(source + C.tile_start, mask=busy, other=0)
    is_prefix = tl.load(source + C.num_members, mask=busy, other=0) > 0
    before *= tl.where(is_prefix, C.group_tile, C.kv_tile)
    begin = tl.load(source + C.kv_start, mask=busy, other=0) + before
    end = tl.load(source + C.kv_end, mask=busy, other=0)
    row = tl.load(source + C.row, mask=busy, other=0)
    i = tl.arange(0, 16)
    page = begin[:, None] // C.page_size + i[None, :]
    wanted = busy[:, None] & (i < C.num_pages)[None, :] & (page * C.page_size < end[:, None])
    entries = block_table + row.to(tl.int64)[:, None] * table_stride + page
    pages = tl.load(entries, mask=wanted, other=0)
    tl.store(record[:, None] + C.lane_pages + i[None, :], pages, mask=wanted)


@triton.jit
def plan_kernel(
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
    """Grid: one program. See the module docstring."""
    wait_for_previous(C.pdl)
    places = tl.arange(0, C.padded)
    step = (token_rows, positions, seq_rows, seq_lens, starts)
    token, row, length, early_end = candidates_at(places, step, at, C)
    candidates = (places, token, row, early_end)
    zeros = tl.zeros_like(places)
    none = tl.sum(zeros, 0)
    groups = (zeros, zeros, zeros, zeros)
    unit, tile, num_units, num_tiles = zeros, zeros, none, none
    if C.has_groups:
        groups = _find_groups(places, work, at, C)
        if tl.max(groups[3], 0) > 0:
            unit, tile, num_units, num_tiles = _place_groups(places, groups, work, at, C)
        tl.store(work + C.header + C.num_group_units, num_units)
    placed, start = (unit, tile), groups[3]
    count = (tl.where(length > 0, length - start, 0) + C.kv_tile - 1) // C.kv_tile
    index = _exclusive_sum((count > 0).to(tl.int32))
    own = (start, length, index, num_units, num_tiles + _exclusive_sum(count), count)
    line = Line(
        num_tiles + tl.sum(count, 0), num_tiles, num_units + tl.sum((count > 0).to(tl.int32), 0)
    )
    group_places = _group_places(groups, placed, line, at, C)
    _write_own(candidates, own, group_places, line, work, at, C)
    if num_units > 0:
        _write_groups(candidates, groups, group_places, line, work, at, C)
    tl.store(work + C.header + C.num_units, line.num_units)
    tl.store(work + C.header + C.num_kv_tiles, line.num_tiles)
    num_real = tl.load(starts + C.num_seqs)
    tl.store(work + C.header + C.num_real, num_real)
    _write_lanes(block_table, table_stride, num_real, work, C)
