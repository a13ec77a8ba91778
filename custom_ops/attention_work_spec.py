"""Plain spelling of a step's work list: the body of `attention_work`, and the kernels' oracle."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_work import (
    KV_TILE,
    MERGE_FIELDS,
    MIN_MEMBERS,
    MIN_SHARED_POSITIONS,
    UNIT_FIELDS,
    Header,
    Heads,
    Merge,
    StepIndices,
    Unit,
    WorkShape,
    num_lanes,
    work_shape,
)


def reference_work(
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
    """The work list, int32 [WorkShape.total_size]; empty on the CPU, whose attention reads none.

    Args:
        block_table: [rows, max_pages_per_row] int32.
        token_rows: [T] row of each token.
        positions: [T] position of each token.
        seq_rows: [S] int32.
        seq_lens: [S] int32.
        query_start_loc: [S + 1] int32; its last value is the number of tokens.
        page_size: of the KV cache.
        num_heads: of the queries.
        num_kv_heads: of the KV cache.
        is_decode: whether every token counts as its own sequence.
    """
    if block_table.device.type != "cuda":
        return block_table.new_empty(0)
    heads = Heads(num_heads, num_kv_heads)
    lanes = num_lanes(block_table.device, num_kv_heads)
    counts = (token_rows.shape[0], seq_rows.shape[0])
    shape = work_shape(lanes, heads, *counts, is_decode=is_decode)
    step = StepIndices(block_table, token_rows, positions, seq_rows, seq_lens, query_start_loc)
    return work_list_spec(shape, step, page_size, is_decode=is_decode)


class _Candidate(NamedTuple):
    token: int
    row: int
    length: int


def _candidates(step: StepIndices, *, is_decode: bool) -> list[_Candidate | None]:
    starts = step.query_start_loc.tolist()
    if is_decode:
        listed = zip(step.token_rows.tolist(), step.positions.tolist(), strict=True)
        return [
            _Candidate(token, row, position + 1) if token < starts[-1] else None
            for token, (row, position) in enumerate(listed)
        ]
    listed = zip(step.seq_rows.tolist(), step.seq_lens.tolist(), strict=True)
    return [
        _Candidate(starts[s], row, length)
        if starts[s + 1] - starts[s] == 1 and length > 0
        else None
        for s, (row, length) in enumerate(listed)
    ]


def _find_leaders(
    candidates: list[_Candidate | None], table: list[list[int]], page_size: int
) -> tuple[list[int], list[int]]:
    """Leader (or -1) and leading full pages in common with it, of every candidate."""
    first_pages = [
        table[c.row][0] if c is not None and c.length >= page_size else -1 for c in candidates
    ]
    leaders, shared = [-1] * len(candidates), [0] * len(candidates)
    for i, candidate in enumerate(candidates):
        if candidate is None or first_pages[i] < 0:
            continue
        if first_pages.count(first_pages[i]) < MIN_MEMBERS:
            continue
        leaders[i] = first_pages.index(first_pages[i])
        leader = candidates[leaders[i]]
        assert leader is not None
        limit = min(candidate.length, leader.length) // page_size
        pages = zip(table[candidate.row][:limit], table[leader.row][:limit], strict=True)
        shared[i] = next((n for n, (mine, his) in enumerate(pages) if mine != his), limit)
    return leaders, shared


class _Lanes:
    """Which lane takes which of `num_tiles` tiles."""

    def __init__(self, num_lanes: int, num_tiles: int) -> None:
        self.share, self.extra = divmod(num_tiles, num_lanes)

    def start(self, lane: int) -> int:
        return lane * self.share + min(lane, self.extra)

    def of(self, tile: int) -> int:
        """Lane of a tile."""
        longer = self.extra * (self.share + 1)
        if tile < longer:
            return tile // (self.share + 1)
        return self.extra + (tile - longer) // max(self.share, 1)


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


class _UnitList:
    """Builds units and merges: first the tiles of every group, then every candidate's own KV."""

    def __init__(self, shape: WorkShape, candidates: list[_Candidate | None]) -> None:
        self.shape = shape
        self.candidates = candidates
        self.units: list[list[int]] = []
        self.num_tiles = 0
        self.num_group_units = 0
        self.own: dict[int, int] = {}  # candidate -> its unit
        self.grouped: dict[int, tuple[int, int]] = {}  # candidate -> unit, place among its members
        self.members = [0] * (shape.max_group_units * shape.members_per_tile)
        self.member_candidates = list(self.members)

    def _append(self, start: int, end: int, row: int, *last: int) -> None:
        count = _ceil_div(end - start, KV_TILE)
        record = [self.num_tiles, count, start, end, row, *last]
        self.units.append(record + [0] * (UNIT_FIELDS - len(record)))
        self.num_tiles += count

    def add_group(self, members: list[int], shared: int) -> None:
        """Tiles of the members' first `shared` positions."""
        width = self.shape.members_per_tile
        for first in range(0, len(members), width):
            part = [(i, self.candidates[i]) for i in members[first : first + width]]
            unit = len(self.units)
            for place, (i, candidate) in enumerate(part):
                assert candidate is not None
                self.grouped[i] = (unit, place)
                self.members[unit * width + place] = candidate.token
                self.member_candidates[unit * width + place] = i
            first_member = part[0][1]
            assert first_member is not None
            partial = self.shape.group_partial_start + unit * width
            self._append(0, shared, first_member.row, unit * width, len(part), partial)
        self.num_group_units = len(self.units)

    def add_own(self, i: int, start: int) -> None:
        """What candidate `i` reads alone, if anything."""
        candidate = self.candidates[i]
        if candidate is None or candidate.length <= start:
            return
        self.own[i] = len(self.units)
        partial = len(self.units) - self.num_group_units
        last = (candidate.token, 0, partial, i)
        self._append(start, candidate.length, candidate.row, *last)

    def _lane_of(self, tile: int) -> int:
        share, extra = divmod(self.num_tiles, self.shape.num_lanes)
        longer = extra * (share + 1)
        if tile < longer:
            return tile // (share + 1)
        return extra + (tile - longer) // max(share, 1)

    def _segments(self, unit: int) -> tuple[int, int]:
        """First lane and number of lanes of a unit."""
        start, count = self.units[unit][: Unit.NUM_TILES + 1]
        first = self._lane_of(start)
        return first, self._lane_of(start + count - 1) - first + 1

    def merges(self) -> list[int]:
        """All merges; marks the units whose one segment is a token's result already."""
        width, made = self.shape.members_per_tile, []
        for i, candidate in enumerate(self.candidates):
            record = [0] * MERGE_FIELDS
            record[Merge.TOKEN] = -1 if candidate is None else candidate.token
            if i in self.own:
                first, record[Merge.OWN_COUNT] = self._segments(self.own[i])
                record[Merge.OWN_ROW] = self.own[i] - self.num_group_units + first
            if i in self.grouped:
                unit, place = self.grouped[i]
                first, record[Merge.GROUP_COUNT] = self._segments(unit)
                row = self.shape.group_partial_start + (unit + first) * width
                record[Merge.GROUP_ROW] = row + place
            elif record[Merge.OWN_COUNT] == 1:
                record = [-1] + [0] * (MERGE_FIELDS - 1)
                self.units[self.own[i]][Unit.PARTIAL] = -1
            made += record
        return made

    def lanes(self) -> list[int]:
        """First unit of every lane; 0 for lanes without tiles."""
        firsts, unit = [0] * self.shape.num_lanes, 0
        for tile in range(self.num_tiles):
            if tile >= sum(self.units[unit][: Unit.NUM_TILES + 1]):
                unit += 1
            lane = self._lane_of(tile)
            if tile == 0 or lane != self._lane_of(tile - 1):
                firsts[lane] = unit
        return firsts


def work_list_spec(
    shape: WorkShape, step: StepIndices, page_size: int, *, is_decode: bool
) -> Tensor:
    """The work list in plain Python: what the kernels must produce, bit for bit."""
    candidates = _candidates(step, is_decode=is_decode)
    count = shape.num_candidates
    leaders, shared_pages = [0] * count, [0] * count
    if count >= MIN_MEMBERS:
        leaders, shared_pages = _find_leaders(candidates, step.block_table.tolist(), page_size)
    listed = _UnitList(shape, candidates)
    group_units, group_tiles, shared = [0] * count, [0] * count, [0] * count
    for leader, members in _groups(leaders, shared_pages, page_size).items():
        group_units[leader], group_tiles[leader] = len(listed.units), listed.num_tiles
        prefix = min(shared_pages[i] for i in members) * page_size
        for i in members:
            shared[i] = prefix
        listed.add_group(members, prefix)
    for i in range(count):
        listed.add_own(i, shared[i])
    starts = step.query_start_loc.tolist()
    tile_seq, tile_start = ([], []) if is_decode else _query_tiles(shape, starts)
    merges = listed.merges()
    header = {
        Header.NUM_UNITS: len(listed.units),
        Header.NUM_KV_TILES: listed.num_tiles,
        Header.NUM_GROUP_UNITS: listed.num_group_units,
        Header.NUM_QUERY_TILES: len(tile_seq),
        Header.NUM_REAL: starts[-1],
    }
    regions = {
        "header": [header[i] for i in range(len(header))],
        "lanes": listed.lanes(),
        "units": [field for unit in listed.units for field in unit],
        "members": listed.members,
        "member_candidates": listed.member_candidates,
        "merges": merges,
        "leaders": leaders,
        "shared_pages": shared_pages,
        "group_units": group_units,
        "group_tiles": group_tiles,
        "tile_seq": tile_seq,
        "tile_start": tile_start,
        "counters": [],
    }
    work = step.block_table.new_zeros(shape.total_size)
    for name, view in shape.split(work).items():
        values = torch.tensor(regions[name], dtype=torch.int32)
        view[: len(values)].copy_(values)
    return work


def _groups(leaders: list[int], shared_pages: list[int], page_size: int) -> dict[int, list[int]]:
    """Members of every group by their leader: those who share enough with it, if there are 4."""
    least = _ceil_div(MIN_SHARED_POSITIONS, page_size)
    found: dict[int, list[int]] = {}
    for i, (leader, pages) in enumerate(zip(leaders, shared_pages, strict=True)):
        if pages >= least:
            found.setdefault(leader, []).append(i)
    return {
        leader: members for leader, members in sorted(found.items()) if len(members) >= MIN_MEMBERS
    }


def _query_tiles(shape: WorkShape, starts: list[int]) -> tuple[list[int], list[int]]:
    """Sequence and first token of every query tile; the last ones of a sequence, which see most
    KV, go first."""
    tile_seq: list[int] = []
    tile_start: list[int] = []
    for s in range(len(starts) - 1):
        begin, end = starts[s], starts[s + 1]
        if end - begin <= 1:
            continue
        firsts = range(begin, end, shape.query_tile_tokens)
        tile_start += reversed(firsts)
        tile_seq += [s] * len(firsts)
    return tile_seq, tile_start
