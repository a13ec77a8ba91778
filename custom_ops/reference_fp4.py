"""4-bit floats: their codes, and the order in which a library wants scales of 16 columns.

Scales [n, groups] lie in tiles of 128 rows and 4 groups, one tile behind the other along a row of
tiles. In a tile, rows 0, 32, 64 and 96 stand next to each other, four scales each, then rows 1, 33,
65, 97, and so on: the scale of (r, g) in a tile is at `r % 32 * 16 + r // 32 * 4 + g`. Rows and
groups that fill up the last tiles are 0.

Source: cuBLAS's documentation of block scales, PyTorch's `SwizzleType.SWIZZLE_32_4_4`.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
NVFP4_GROUP = 16
MIN_SCALE = 2.0**-9  # the smallest e4m3 above 0
TILE_ROWS, TILE_GROUPS = 128, 4
_LANES = 32


def tiled_shape(num_rows: int, num_groups: int) -> tuple[int, int]:
    """Rows and groups with those that fill up the last tiles."""
    return num_rows + -num_rows % TILE_ROWS, num_groups + -num_groups % TILE_GROUPS


def tile_scales(scale: Tensor) -> Tensor:
    """e4m3 [n, groups] in tiles: their bytes in order, as a matrix of `tiled_shape`."""
    num_rows, num_groups = scale.shape
    rows, groups = tiled_shape(num_rows, num_groups)
    # bytes: nothing is padded in 8-bit floats
    missing = (0, groups - num_groups, 0, rows - num_rows)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), missing)
    shape = (rows // TILE_ROWS, TILE_ROWS // _LANES, _LANES, groups // TILE_GROUPS, TILE_GROUPS)
    ordered = padded.reshape(shape).permute(0, 3, 2, 1, 4)
    return ordered.reshape(rows, groups).view(torch.float8_e4m3fn)


def untile_scales(tiled: Tensor, num_rows: int, num_groups: int) -> Tensor:
    """The scales [n, groups] that `tile_scales` put in tiles."""
    rows, groups = tiled.shape
    shape = (rows // TILE_ROWS, groups // TILE_GROUPS, _LANES, TILE_ROWS // _LANES, TILE_GROUPS)
    ordered = tiled.view(torch.uint8).reshape(shape).permute(0, 3, 2, 1, 4)
    plain = ordered.reshape(rows, groups)[:num_rows, :num_groups]
    return plain.contiguous().view(torch.float8_e4m3fn)


def tile_places(first_row: int, num_rows: int, num_groups: int, device: torch.device) -> Tensor:
    """Where scales of some rows lie among the bytes of the tiles: int64 [num_rows, groups].

    Args:
        first_row: of the rows.
        num_rows: how many.
        num_groups: with those that fill up the last tile.
        device: of the result.
    """
    row = torch.arange(first_row, first_row + num_rows, device=device).unsqueeze(1)
    group = torch.arange(num_groups, device=device)
    tile = row // TILE_ROWS * (num_groups // TILE_GROUPS) + group // TILE_GROUPS
    in_row = row % _LANES * (TILE_ROWS // _LANES) + row % TILE_ROWS // _LANES
    return tile * (TILE_ROWS * TILE_GROUPS) + in_row * TILE_GROUPS + group % TILE_GROUPS


def to_e2m1(x: Tensor) -> Tensor:
    """The nearest 4-bit codes, ties to the even mantissa; beyond 6 it is 6."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    # Half-way points between the magnitudes; at a tie the even code wins.
    for code, limit in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        codes += (magnitude >= limit if code % 2 else magnitude > limit).to(torch.uint8)
    return codes | (x.signbit().to(torch.uint8) << 3)


def pack_codes(codes: Tensor) -> Tensor:
    """Codes uint8 [n, ...] two in a byte: [n, columns / 2]."""
    flat = codes.flatten(1)
    return flat[:, 0::2] | (flat[:, 1::2] << 4)
