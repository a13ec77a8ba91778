"""The work list of decode attention, in its plain spelling."""

from __future__ import annotations

from itertools import pairwise

import pytest

from compiled_engine.custom_ops.attention_work import (
    GROUP_COST,
    GROUP_TILE,
    KV_TILE,
    LANE_FIELDS,
    MERGE_FIELDS,
    OWN_COST,
    UNIT_COST,
    UNIT_FIELDS,
    Header,
    Lane,
    Merge,
    Unit,
    lanes_in_use,
)
from compiled_engine.custom_ops.attention_work_spec import reference_work
from tests.helpers.attention_steps import SHARED, STEPS, lists_of
from tests.helpers.paged_case import CaseShape, Row, make_case


def tile_size(unit: list[int]) -> int:
    return GROUP_TILE if unit[Unit.NUM_MEMBERS] else KV_TILE


def records(values: list[int], size: int, count: int) -> list[list[int]]:
    return [values[i * size : (i + 1) * size] for i in range(count)]


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("lanes", [1, 7, 50])
@pytest.mark.parametrize("step", STEPS)
def test_units_cover_what_each_token_sees_exactly_once(step, lanes, is_decode):
    case = make_case(STEPS[step], CaseShape())
    shape, work = lists_of(case, lanes, is_decode=is_decode)
    units = records(work["units"], UNIT_FIELDS, work["header"][Header.NUM_UNITS])
    seen: dict[int, list[tuple[int, int]]] = {}
    tile = 0
    for unit in units:
        assert unit[Unit.TILE_START] == tile, "units stand in one line without gaps"
        length = unit[Unit.KV_END] - unit[Unit.KV_START]
        assert unit[Unit.NUM_TILES] == -(-length // tile_size(unit)) > 0
        tile += unit[Unit.NUM_TILES]
        first, count = unit[Unit.TOKEN], unit[Unit.NUM_MEMBERS]
        tokens = work["members"][first : first + count] if count else [first]
        assert count <= shape.members_per_tile
        for token in tokens:
            span = (unit[Unit.KV_START], unit[Unit.KV_END])
            seen.setdefault(token, []).append(span)
    assert work["header"][Header.NUM_KV_TILES] == tile
    starts = case.step.query_start_loc.tolist()
    alone = [s for s in range(len(starts) - 1) if starts[s + 1] - starts[s] == 1]
    expected = range(case.num_real) if is_decode else [starts[s] for s in alone]
    assert sorted(seen) == list(expected)
    for token, spans in seen.items():
        spans.sort()
        assert spans[0][0] == 0
        assert spans[-1][1] == int(case.step.positions[token]) + 1
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_a_lane_takes_fewer_positions_of_a_prefix_than_of_single_tokens():
    rows = [Row(1, 4096 + 2048, 0, 256) for _ in range(4)]
    _, work = lists_of(make_case(rows, CaseShape(4, 1, 64, 16)), 8, is_decode=True)
    units = records(work["units"], UNIT_FIELDS, work["header"][Header.NUM_UNITS])
    assert [u[Unit.NUM_TILES] for u in units] == [4096 // GROUP_TILE, *[2048 // KV_TILE] * 4]
    taken = [
        (r[Lane.STOP] - r[Lane.TILE]) * tile_size(r[Lane.RECORD :])
        for r in records(work["lanes"], LANE_FIELDS, 8)
    ]
    assert max(taken[:3]) < 0.6 * min(taken[-3:])


def test_short_rows_have_a_lane_each_and_long_ones_lanes_without_them():
    rows = [*[Row(1, 20)] * 12, Row(1, 8000)]
    _, work = lists_of(make_case(rows, CaseShape(4, 1, 64, 16)), 33, is_decode=True)
    lanes = [r for r in records(work["lanes"], LANE_FIELDS, 33) if r[Lane.STOP] > r[Lane.TILE]]
    units = records(work["units"], UNIT_FIELDS, work["header"][Header.NUM_UNITS])
    tiles = sum(u[Unit.NUM_TILES] for u in units)
    mean = (tiles * OWN_COST + UNIT_COST * len(units)) / 33
    counts = [sum(begins_in(u, r) for u in units) for r in lanes]
    assert max(counts) <= mean / (UNIT_COST + OWN_COST) + 1
    _, work = lists_of(make_case(rows[:12], CaseShape(4, 1, 64, 16)), 33, is_decode=True)
    lanes = records(work["lanes"], LANE_FIELDS, 33)
    assert [r[Lane.STOP] - r[Lane.TILE] for r in lanes] == [1] * 12 + [0] * 21


def begins_in(unit: list[int], lane: list[int]) -> bool:
    return lane[Lane.TILE] <= unit[Unit.TILE_START] < lane[Lane.STOP]


@pytest.mark.parametrize("lanes", [1, 7, 50])
def test_partial_rows_belong_to_one_segment_and_one_token(lanes):
    case = make_case(STEPS["both"], CaseShape())
    shape, work = lists_of(case, lanes, is_decode=True)
    used: list[int] = []
    for merge in records(work["merges"], MERGE_FIELDS, shape.num_candidates):
        if merge[Merge.TOKEN] < 0:
            continue
        used += range(merge[Merge.OWN_ROW], merge[Merge.OWN_ROW] + merge[Merge.OWN_COUNT])
        group = range(merge[Merge.GROUP_COUNT])
        used += [merge[Merge.GROUP_ROW] + i * shape.members_per_tile for i in group]
    assert len(used) == len(set(used))
    assert all(0 <= row < shape.num_partial_rows for row in used)


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("lanes", [1, 7, 50])
@pytest.mark.parametrize("step", STEPS)
def test_lanes_have_records_of_all_they_need_to_begin(step, lanes, is_decode):
    case = make_case(STEPS[step], CaseShape())
    shape, work = lists_of(case, lanes, is_decode=is_decode)
    units = records(work["units"], UNIT_FIELDS, work["header"][Header.NUM_UNITS])
    end, size, lane_records = 0, case.shape.page_size, []
    for record in records(work["lanes"], LANE_FIELDS, shape.num_lanes):
        lane_records.append(record)
        assert record[Lane.NUM_REAL] == case.num_real
        tile, stop = record[Lane.TILE], record[Lane.STOP]
        if tile == stop:
            continue
        assert tile == end
        end, unit = stop, units[record[Lane.UNIT]]
        assert record[Lane.RECORD : Lane.RECORD + UNIT_FIELDS] == unit
        before = tile - unit[Unit.TILE_START]
        assert 0 <= before < unit[Unit.NUM_TILES]
        first = (unit[Unit.KV_START] + before * tile_size(unit)) // size
        pages = case.step.block_table[unit[Unit.ROW], first : -(-unit[Unit.KV_END] // size)]
        expected = pages[: LANE_FIELDS - Lane.PAGES].tolist()
        assert record[Lane.PAGES :][: len(expected)] == expected
    assert end == work["header"][Header.NUM_KV_TILES]
    assert_balanced(units, lane_records)


def assert_balanced(units: list[list[int]], lanes: list[list[int]]) -> None:
    """No lane takes more than its share and what cannot be cut; units have lanes side by side."""
    costs = [GROUP_COST if u[Unit.NUM_MEMBERS] else OWN_COST for u in units]
    taken = [0] * len(lanes)
    for unit, cost in zip(units, costs, strict=True):
        start, stop = unit[Unit.TILE_START], unit[Unit.TILE_START] + unit[Unit.NUM_TILES]
        used = []
        for i, lane in enumerate(lanes):
            tiles = min(stop, lane[Lane.STOP]) - max(start, lane[Lane.TILE])
            if tiles > 0:
                used.append(i)
                taken[i] += tiles * cost + UNIT_COST * begins_in(unit, lane)
        assert used == list(range(unit[Unit.FIRST_LANE], unit[Unit.FIRST_LANE] + len(used)))
    num_tiles = sum(unit[Unit.NUM_TILES] for unit in units)
    in_use = lanes_in_use(len(lanes), num_tiles, len(units))
    assert not any(taken[in_use:])
    most = -(-sum(taken) // in_use) + UNIT_COST + max(GROUP_COST, OWN_COST) - 1
    assert max(taken) <= most


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("step", STEPS)
def test_early_kv_is_of_earlier_steps(step, is_decode):
    case = make_case(STEPS[step], CaseShape())
    _, work = lists_of(case, 7, is_decode=is_decode)
    rows, positions = (t[: case.num_real].tolist() for t in case.step[1:3])
    firsts: dict[int, int] = {}
    for row, position in zip(rows, positions, strict=True):
        firsts.setdefault(row, position)
    for unit in records(work["units"], UNIT_FIELDS, work["header"][Header.NUM_UNITS]):
        assert unit[Unit.EARLY_END] in (0, firsts[unit[Unit.ROW]], unit[Unit.KV_END])
        assert unit[Unit.EARLY_END] <= firsts[unit[Unit.ROW]]
        is_first = unit[Unit.NUM_MEMBERS] == 0 and unit[Unit.KV_END] == firsts[unit[Unit.ROW]] + 1
        assert not is_first or unit[Unit.EARLY_END] == firsts[unit[Unit.ROW]]


def test_groups_are_found_and_read_once():
    case = make_case(STEPS["both"], CaseShape())
    _, work = lists_of(case, 5, is_decode=True)
    count = work["header"][Header.NUM_GROUP_UNITS]
    groups = records(work["units"], UNIT_FIELDS, count)
    found = sorted((unit[Unit.KV_END], unit[Unit.NUM_MEMBERS]) for unit in groups)
    assert found == [(9 * 16, 4), (16 * 16, 9)]


def test_three_rows_or_a_short_prefix_make_no_group():
    for rows in (SHARED[:3], [Row(1, 300 + i, 0, 7) for i in range(8)]):
        _, work = lists_of(make_case(rows, CaseShape()), 5, is_decode=True)
        assert work["header"][Header.NUM_GROUP_UNITS] == 0


def test_query_tiles_list_longer_queries_heaviest_first():
    case = make_case([Row(1, 9), Row(150, 200), Row(2, 5)], CaseShape(32, 8))
    shape, work = lists_of(case, 5, is_decode=False)
    count, size = work["header"][Header.NUM_QUERY_TILES], shape.query_tile_tokens
    tiles = list(zip(work["tile_seq"], work["tile_start"], strict=True))[:count]
    first = [(1, start) for start in reversed(range(1, 151, size))]
    assert tiles == [*first, (2, 151)]


def test_work_list_is_empty_on_the_cpu():
    case = make_case(STEPS["own"], CaseShape())
    assert reference_work(*case.work_arguments(is_decode=True)).shape == (0,)
