"""The kernel that measures read bandwidth. Imported only where there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_tiles(x_ptr, out_ptr, TILE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """out[i] = sum of the i-th tile of x, in fp32; the number of elements is a multiple of TILE."""
    tile = tl.program_id(0).to(tl.int64)
    values = tl.load(x_ptr + tile * TILE + tl.arange(0, TILE))
    tl.store(out_ptr + tile, tl.sum(values.to(tl.float32), axis=0))
