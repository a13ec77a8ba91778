"""How the Hopper tile kernel cuts the keys of its items where there are fewer items than programs.

A tile of few tokens behind a long context is few items with many blocks of keys each. They are cut
into parts of at most `length` blocks, one length for all, so longer items have more parts. Parts
of one head group stand in one line, in the tiles' order; the lines of the groups follow each
other. Owns which part a number means and which blocks it has: plain arithmetic of one warp, the
loading one, on scalars and on tensors with a value for each tile. What parts leave, and their sum,
is in `attention_tiles_hopper_merge`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_TILES = gl.constexpr(128)  # longer lists are not cut
MAX_PARTS = gl.constexpr(32)  # of an item; a power of two
PARTS_A_PROGRAM = gl.constexpr(3)  # in all; scratch is made for so many
MIN_LENGTH = gl.constexpr(8)  # blocks; halves of one more block are the shortest parts
# Costs in the time of one block: to begin and to end a part, and to add one up.
PART_COST = gl.constexpr(2)
PARTS_ADDED_A_BLOCK = gl.constexpr(2)
NO_COST = gl.constexpr(1 << 20)  # of what is not possible: above any cost
FIELD = gl.constexpr(64)  # values of a field of a share
WHOLE = gl.constexpr(1)  # the share of an item that is not cut: one part

# of tensors with a value for each tile, and for each number of parts
TILES = gl.constexpr(gl.BlockedLayout([MAX_TILES.value // 32], [32], [1], [0]))
_CHOICES = gl.constexpr(gl.BlockedLayout([MAX_PARTS.value // 32], [32], [1], [0]))


def most_parts(num_programs: int) -> int:
    """Parts of all items at most, those of items that are not cut included."""
    return num_programs * int(PARTS_A_PROGRAM.value)


@gluon.jit
def choose_length(
    blocks: gl.tensor, num_tiles: gl.tensor, groups: gl.constexpr, programs: gl.tensor
) -> gl.tensor:
    """Blocks of a part at most; 0 if nothing is to be cut.

    The choices are the longest tile in 1 to `MAX_PARTS` parts. What takes the least time is
    estimated: rounds of the programs times the length, and the sum of the longest tile's parts.

    Args:
        blocks: [MAX_TILES], key blocks of each tile; 0 where there is none.
        num_tiles: tiles that there are.
        groups: items of a tile.
        programs: that take parts.
    """
    longest = gl.max(blocks, 0)
    length = 0
    if longest > MIN_LENGTH:
        wanted = gl.arange(0, MAX_PARTS, layout=_CHOICES) + 1
        lengths = gl.maximum((longest + wanted - 1) // wanted, MIN_LENGTH)
        tile = gl.arange(0, MAX_TILES, layout=TILES)
        parts = gl.zeros_like(wanted)
        for i in range(num_tiles):
            parts += (gl.sum(gl.where(tile == i, blocks, 0), 0) + lengths - 1) // lengths
        units = parts * groups
        rounds = (units + programs - 1) // programs
        most = (longest + lengths - 1) // lengths
        added = gl.where(most > 1, most // PARTS_ADDED_A_BLOCK + 1, 0)
        cost = rounds * (lengths + PART_COST) + added
        cost = gl.where(units <= programs * PARTS_A_PROGRAM, cost, NO_COST)
        best = gl.min(cost * FIELD + wanted, 0) % FIELD
        length = gl.maximum((longest + best - 1) // best, MIN_LENGTH)
        length = gl.where(length < longest, length, 0)
    return length


@gluon.jit
def _add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def part_ends(blocks: gl.tensor, length: gl.tensor) -> gl.tensor:
    """[MAX_TILES], parts of a tile and of all before it, in one head group."""
    return gl.associative_scan((blocks + length - 1) // length, 0, _add)


@gluon.jit
def find_part(ends: gl.tensor, number: gl.tensor) -> gl.tensor:
    """Tile of part `number` of a head group, the tile's first part and its number of parts."""
    tile = gl.sum(gl.where(ends <= number, 1, 0), 0)
    first = gl.max(gl.where(ends <= number, ends, 0), 0)
    end = gl.min(gl.where(ends > number, ends, NO_COST), 0)
    return tile, first, end - first


@gluon.jit
def part_range(low: gl.tensor, high: gl.tensor, part: gl.tensor, parts: gl.tensor) -> gl.tensor:
    """First and last block of a part of the blocks `low` to `high`; parts differ by one at most."""
    blocks = high - low + 1
    return low + part * blocks // parts, low + (part + 1) * blocks // parts - 1


@gluon.jit
def pack_share(first: gl.tensor, part: gl.tensor, parts: gl.tensor) -> gl.tensor:
    """One word: the number of the item's first part, which part of it this is, and of how many."""
    return (first * FIELD + part) * FIELD + parts


@gluon.jit
def unpack_share(share: gl.tensor) -> gl.tensor:
    """What `pack_share` was given."""
    return share // (FIELD * FIELD), share // FIELD % FIELD, share % FIELD
