"""Plain spelling of a step's work list: the body of `attention_work`, and the kernels' oracle."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_work import (
    GROUP_COST,
    GROUP_TILE,
    KV_TILE,
    LANE_FIELDS,
    LANE_PAGES,
    MERGE_FIELDS,
    MIN_MEMBERS,
    MIN_SHARED_POSITIONS,
    OWN_COST,
    UNIT_COST,
    UNIT_FIELDS,
    Header,
    Heads,
    Lane,
    Merge,
    StepIndices,
    Unit,
    WorkShape,
    lanes_in_use,
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
    early_end: int


def _candidates(step: StepIndices, *, is_decode: bool) -> list[_Candidate | None]:
    starts = step.query_start_loc.tolist()
    if is_decode:
        rows = step.token_rows.tolist()
        # a row's later tokens may read what its first ones wrote in this step
        firsts = [t == 0 or rows[t - 1] != row for t, row in enumerate(rows)]
        return [
            _Candidate(token, rows[token], position + 1, position * firsts[token])
            if token < starts[-1]
            else None
            for token, position in enumerate(step.positions.tolist())
        ]
    listed = zip(step.seq_rows.tolist(), step.seq_lens.tolist(), strict=True)
    return [
        _Candidate(starts[s], row, length, length - 1)
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
        limit = (min(candidate.length, leader.length) - 1) // page_size
        pages = zip(table[candidate.row][:limit], table[leader.row][:limit], strict=True)
        shared[i] = next((n for n, (mine, his) in enumerate(pages) if mine != his), limit)
    return leaders, shared


class _Lanes:
    """Which lane takes which tile; the first `num_shared` are of prefixes."""

    def __init__(self, num_lanes: int, num_tiles: int, num_shared: int, num_units: int) -> None:
        self.num_shared = num_shared
        count = lanes_in_use(num_lanes, num_tiles, num_units)
        cost = self._cost_before(num_tiles, max(num_units - 1, 0))
        self.share, self.extra = divmod(cost, count)

    def _cost_before(self, tile: int, unit: int) -> int:
        """Of all that stands before a tile of a unit."""
        shared = min(tile, self.num_shared)
        return unit * UNIT_COST + shared * GROUP_COST + (tile - shared) * OWN_COST

    def of(self, tile: int, unit: int) -> int:
        """Lane of a tile of a unit."""
        cost, longer = self._cost_before(tile, unit), self.extra * (self.share + 1)
        if cost < longer:
            return cost // (self.share + 1)
        return self.extra + (cost - longer) // max(self.share, 1)


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _tile_size(unit: list[int]) -> int:
    """Positions of a tile."""
    return GROUP_TILE if unit[Unit.NUM_MEMBERS] else KV_TILE


class _UnitList:
    """Builds units and merges: first the tiles of every group, then every candidate's own KV."""

    def __init__(self, shape: WorkShape, candidates: list[_Candidate | None]) -> None:
        self.shape = shape
        self.candidates = candidates
        self.units: list[list[int]] = []
        self.num_tiles = 0
        self.num_group_units = 0
        self.num_group_tiles = 0
        self.own: dict[int, int] = {}  # candidate -> its unit
        self.grouped: dict[int, tuple[int, int]] = {}  # candidate -> unit, place among its members
        self.members = [0] * (shape.max_group_units * shape.members_per_tile)

    @property
    def lanes(self) -> _Lanes:
        """Who takes the tiles, once all are there."""
        sizes = (self.num_tiles, self.num_group_tiles, len(self.units))
        return _Lanes(self.shape.num_lanes, *sizes)

    def _append(self, start: int, end: int, row: int, *last: int) -> None:
        record = [self.num_tiles, 0, start, end, row, *last]
        count = record[Unit.NUM_TILES] = _ceil_div(end - start, _tile_size(record))
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
            first_member = part[0][1]
            assert first_member is not None
            partial = self.shape.group_partial_start + unit * width
            self._append(0, shared, first_member.row, unit * width, len(part), partial, shared)
        self.num_group_units, self.num_group_tiles = len(self.units), self.num_tiles

    def add_own(self, i: int, start: int) -> None:
        """What candidate `i` reads alone, if anything."""
        candidate = self.candidates[i]
        if candidate is None or candidate.length <= start:
            return
        self.own[i] = len(self.units)
        partial = len(self.units) - self.num_group_units
        last = (candidate.token, 0, partial, candidate.early_end)
        self._append(start, candidate.length, candidate.row, *last)

    def _segments(self, unit: int) -> tuple[int, int]:
        """First lane and number of lanes of a unit."""
        start, count = self.units[unit][: Unit.NUM_TILES + 1]
        first = self.lanes.of(start, unit)
        return first, self.lanes.of(start + count - 1, unit) - first + 1

    def merges(self) -> list[int]:
        """All merges; completes the units of those who are merged or in a group."""
        made = []
        for i, candidate in enumerate(self.candidates):
            record = [0] * MERGE_FIELDS
            record[Merge.TOKEN] = -1 if candidate is None else candidate.token
            if i in self.own:
                first, record[Merge.OWN_COUNT] = self._segments(self.own[i])
                record[Merge.OWN_ROW] = self.own[i] - self.num_group_units + first
            if i in self.grouped:
                self._join(i, record)
            elif record[Merge.OWN_COUNT] == 1:
                record = [-1] + [0] * (MERGE_FIELDS - 1)
                self.units[self.own[i]][Unit.PARTIAL] = -1
            made += record
        for unit, listed in enumerate(self.units):
            listed[Unit.FIRST_LANE] = self._segments(unit)[0]
        return made

    def _join(self, i: int, record: list[int]) -> None:
        """Writes where the partial results of a member's prefix are."""
        (unit, place), width = self.grouped[i], self.shape.members_per_tile
        first, count = self._segments(unit)
        row = self.shape.group_partial_start + (unit + first) * width + place
        record[Merge.GROUP_ROW], record[Merge.GROUP_COUNT] = row, count
        own = self.units[self.own[i]]
        own[Unit.GROUP_ROW], own[Unit.GROUP_COUNT], own[Unit.GROUP_UNIT] = row, count, unit
        own[Unit.GROUP_SIZE] = self.units[unit][Unit.NUM_MEMBERS]

    def _spans(self) -> dict[int, tuple[int, int, int]]:
        """First unit, first tile and end of the tiles of every lane that has some."""
        spans: dict[int, tuple[int, int, int]] = {}
        lanes = self.lanes
        for unit, (start, count, *_) in enumerate(self.units):
            for tile in range(start, start + count):
                lane = lanes.of(tile, unit)
                first_unit, first, _ = spans.get(lane, (unit, tile, 0))
                spans[lane] = first_unit, first, tile + 1
        return spans

    def lane_records(self, table: list[list[int]], page_size: int, num_real: int) -> list[int]:
        """Records of all lanes."""
        made, spans = [], self._spans()
        for lane in range(self.shape.num_lanes):
            record = [0] * LANE_FIELDS
            record[Lane.NUM_REAL] = num_real
            if lane in spans:
                unit, tile, stop = spans[lane]
                record[Lane.UNIT], record[Lane.TILE], record[Lane.STOP] = unit, tile, stop
                fields = self.units[unit]
                record[Lane.RECORD : Lane.RECORD + UNIT_FIELDS] = fields
                before = (tile - fields[Unit.TILE_START]) * _tile_size(fields)
                begin = fields[Unit.KV_START] + before
                first, end = begin // page_size, _ceil_div(fields[Unit.KV_END], page_size)
                pages = table[fields[Unit.ROW]][first : min(end, first + LANE_PAGES)]
                record[Lane.PAGES : Lane.PAGES + len(pages)] = pages
            made += record
        return made


def work_list_spec(
    shape: WorkShape, step: StepIndices, page_size: int, *, is_decode: bool
) -> Tensor:
    """The work list in plain Python: what the kernels must produce, bit for bit."""
    candidates = _candidates(step, is_decode=is_decode)
    count, table = shape.num_candidates, step.block_table.tolist()
    leaders, shared_pages = [0] * count, [0] * count
    if count >= MIN_MEMBERS:
        leaders, shared_pages = _find_leaders(candidates, table, page_size)
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
        "lanes": listed.lane_records(table, page_size, starts[-1]),
        "units": [field for unit in listed.units for field in unit],
        "members": listed.members,
        "merges": merges,
        "leaders": leaders,
        "shared_pages": shared_pages,
        "group_units": group_units,
        "group_tiles": group_tiles,
        "tile_seq": tile_seq,
        "tile_start": tile_start,
        "counters": [],
        "slots": [],
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
