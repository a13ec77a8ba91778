"""The work list of one step's attention on a GPU: what it says and how it lies in memory.

`attention_work` cuts the KV that a step's one-token queries read into pieces of nearly equal cost,
finds groups of rows with a common prefix, and lists the query tiles of longer queries. It runs once
a step, on the device; every layer's attention reads its result. Needs torch only: the plain
spelling is in `attention_work_spec`, the kernels are in `attention_work_triton`.

A *candidate* is what the decode kernel may serve: every token (`is_decode`), or every sequence with
one query token. A *unit* is KV of one candidate, or the shared prefix of up to `members_per_tile`
candidates. Units, cut into tiles of `KV_TILE` positions (of a prefix: `GROUP_TILE`), stand in one
line, those of prefixes first. A tile costs `OWN_COST` (of a prefix: `GROUP_COST`), and `UNIT_COST`
stands between two units: what a lane's first unit costs, whole or not, all lanes pay. Of the sum c
of all costs *lane* l of the L lanes in use takes `c // L` (the first `c % L` lanes one more), and
the tiles that begin in it; so a unit may be cut by lanes into segments, each of which leaves one
partial result, and a lane may have none. Fewer lanes are in use where each would get less than a
unit, and less than `MIN_LANE_TILES`.

A member of a prefix always has a position of its own: its own last one, which this step wrote.
Pages of a prefix, and positions before a row's first token of the step, hold what earlier steps
wrote (the scheduler shares a page only after the step that filled it), which `EARLY_END` tells the
kernels: they may read that much before they wait for the kernel that writes this step's KV.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_tiles import tile_tokens
from compiled_engine.custom_ops.registry import MAX_DECISIONS

# KV positions of a tile
KV_TILE = 32
# those of a tile of a shared prefix: with up to 64 query rows a position takes about twice as long
# there as where one token reads it
GROUP_TILE = 16
# what lanes get equal shares of. A unit takes some time whatever its length: its record, its pages,
# its queries and its first positions are waited for, and its result is stored and merged. Neither
# cost of a tile is more than twice the other, so that no lane is left out within a unit
UNIT_COST = 20
GROUP_COST = 5
OWN_COST = 4
# lanes are used while each gets this many: 2 chunks of 16 positions for each of its 4 warps; with
# less to read a lane, combining the lanes' results costs more than reading in parallel saves
MIN_LANE_TILES = 4
# query rows of a tile of a shared prefix
GROUP_ROWS = 64
# rows with the same first page that make a group
MIN_MEMBERS = 4
# a shorter common prefix costs more in merging than it saves in reading
MIN_SHARED_POSITIONS = 128
# persistent programs of the decode kernel a multiprocessor
PROGRAMS_PER_SM = 2
MAX_CANDIDATES = 1024

HEADER_SIZE = 16
LANE_FIELDS = 32
# pages in a lane's record
LANE_PAGES = 12
UNIT_FIELDS = 16
MERGE_FIELDS = 8
# numbers of a head's partial result in the slot of a lane: the largest head and the sum of weights
SLOT_SIZE = 128 + 4
_ALIGNMENT = 32


class Header:
    """Places in the header."""

    NUM_UNITS = 0
    NUM_KV_TILES = 1
    NUM_GROUP_UNITS = 2
    NUM_QUERY_TILES = 3
    NUM_REAL = 4  # tokens that are not padding


class Lane:
    """Fields of a lane's record: all that it needs to begin, in one place."""

    UNIT = 0  # its first one
    TILE = 1  # its tiles in the line: first one, and end; both 0 if there are none
    STOP = 2
    NUM_REAL = 3  # as in the header
    RECORD = 4  # copy of the unit
    PAGES = 20  # of the unit's row, from that of the lane's first position on; 0 past the unit


class Unit:
    """Fields of a unit."""

    TILE_START = 0  # in the line of all tiles
    NUM_TILES = 1
    KV_START = 2  # positions
    KV_END = 3
    ROW = 4  # of the block table
    TOKEN = 5  # the token; of a group: its first entry in `members`
    NUM_MEMBERS = 6  # 0: a single token
    PARTIAL = 7  # partial row of lane l: this + l (group: + l * members_per_tile); -1: final
    EARLY_END = 8  # KV of positions before this one was written by earlier steps
    FIRST_LANE = 9  # that has a segment of it
    # of a single token whose prefix a group reads; else 0
    GROUP_ROW = 10  # as in `Merge`
    GROUP_COUNT = 11
    GROUP_UNIT = 12
    GROUP_SIZE = 13  # members of that unit


NUM_UNIT_FIELDS = 14


class Merge:
    """Fields of a merge: the partial rows whose combination is a token's result."""

    TOKEN = 0  # -1: nothing to merge
    OWN_ROW = 1  # first of `OWN_COUNT` consecutive rows
    OWN_COUNT = 2
    GROUP_ROW = 3  # first of `GROUP_COUNT` rows, `members_per_tile` apart
    GROUP_COUNT = 4


@dataclass(frozen=True)
class WorkShape:
    """Static sizes of a work list. Counts of tokens may be symbolic.

    Attributes:
        num_candidates: tokens, or places for sequences.
        num_heads: of the queries.
        num_kv_heads: of the KV cache.
        num_lanes: of the decode kernel.
        members_per_tile: candidates whose heads of one KV head share a tile of a common prefix.
        max_query_tiles: places for tiles of longer queries; 0 where every token is a candidate.
        query_tile_tokens: query tokens of a full tile.
    """

    num_candidates: int
    num_heads: int
    num_kv_heads: int
    num_lanes: int
    members_per_tile: int
    max_query_tiles: int
    query_tile_tokens: int

    @property
    def max_group_units(self) -> int:
        """Groups have 4 members at least, and each may leave one tile partly filled."""
        count = self.num_candidates
        return count // MIN_MEMBERS + count // self.members_per_tile

    @property
    def max_units(self) -> int:
        """Most units a list can hold."""
        return self.num_candidates + self.max_group_units

    @property
    def group_partial_start(self) -> int:
        """Partial rows before this one belong to single tokens."""
        return self.num_candidates + self.num_lanes

    @property
    def num_partial_rows(self) -> int:
        """Rows of partial results, each of all heads."""
        grouped = (self.max_group_units + self.num_lanes) * self.members_per_tile
        return self.group_partial_start + grouped

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Length of each region, in the order in which they stand."""
        count = self.num_candidates
        return {
            "header": HEADER_SIZE,
            "lanes": self.num_lanes * LANE_FIELDS,
            "units": self.max_units * UNIT_FIELDS,
            "members": self.max_group_units * self.members_per_tile,  # tokens
            "merges": count * MERGE_FIELDS,
            "leaders": count,  # scratch: first candidate with the same first page, or -1
            "shared_pages": count,  # scratch: leading pages equal to the leader's
            "group_units": count,  # scratch: first unit of the group that a candidate leads
            "group_tiles": count,  # scratch: first tile of that group
            "tile_seq": self.max_query_tiles,
            "tile_start": self.max_query_tiles,
            # The rest is 0 between calls. Of each prefix's unit and KV head: segments that are
            # done, and in the upper half members that have been merged.
            "counters": self.max_group_units * self.num_kv_heads,
            # of each lane and head: the partial result of a unit that goes on in the next lane
            "slots": self.num_lanes * self.num_heads * SLOT_SIZE,
        }

    @functools.cached_property
    def total_size(self) -> int:
        """Numbers in the whole list."""
        return sum(_aligned(size) for size in self.sizes.values())

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Where each region begins."""
        starts, start = {}, 0
        for name, size in self.sizes.items():
            starts[name] = start
            start += _aligned(size)
        return starts

    def split(self, work: Tensor) -> dict[str, Tensor]:
        """Views of the regions of `work` [total_size]."""
        self.check(work)
        return {name: self.region(work, name) for name in self.sizes}

    def check(self, work: Tensor) -> None:
        """Asserts that a work list is of these sizes."""
        assert work.shape[0] == self.total_size, f"work has {work.shape[0]}, not {self.total_size}"

    def region(self, work: Tensor, name: str) -> Tensor:
        """View of one region of `work`."""
        start = self.starts[name]
        return work[start : start + self.sizes[name]]


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


class Heads(NamedTuple):
    """Query heads and KV heads of a layer."""

    num_heads: int
    num_kv_heads: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_lanes(device: torch.device, num_kv_heads: int) -> int:
    """Lanes of the decode kernel: a lane has one program for each KV head."""
    return max(1, _num_sms(device) * PROGRAMS_PER_SM // num_kv_heads)


def lanes_in_use(num_lanes: int, num_tiles: int, num_units: int) -> int:
    """Lanes that share the tiles; at least 1."""
    return min(num_lanes, max(1, num_units, -(-num_tiles // MIN_LANE_TILES)))


def work_shape(
    lanes: int, heads: Heads, num_tokens: int, num_seqs: int, *, is_decode: bool
) -> WorkShape:
    """Sizes of the work list of a step of `num_tokens` tokens and `num_seqs` sequence places."""
    query_tile = tile_tokens(heads.num_heads, heads.num_kv_heads, 0)
    return WorkShape(
        num_candidates=num_tokens if is_decode else num_seqs,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        num_lanes=lanes,
        members_per_tile=max(1, GROUP_ROWS // heads.group),
        max_query_tiles=0 if is_decode else num_tokens // query_tile + num_seqs,
        query_tile_tokens=query_tile,
    )


# The same for every layer of a step; for sizes that are numbers.
known_work_shape = functools.lru_cache(maxsize=MAX_DECISIONS)(work_shape)


class StepIndices(NamedTuple):
    """Index tensors of one step, as in `PagedContext`."""

    block_table: Tensor
    token_rows: Tensor
    positions: Tensor
    seq_rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
