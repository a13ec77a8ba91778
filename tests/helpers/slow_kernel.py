"""A slow kernel in the protocol of ours: the next one may start at once, what it writes comes late.

Beside it a reader that may leave out its wait, as a race would. Imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.triton_common import has_pdl, let_next_start, wait_for_previous

NUM_TURNS = 20_000  # some 100 µs
_LIBRARY = torch.library.Library("ce_tests", "DEF")


@triton.jit
def slow_double_kernel(
    x: tl.tensor, out: tl.tensor, num_turns: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`out = 2 * x`, by a sum that takes its time. Grid: rows."""
    let_next_start(PDL)
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0) * SIZE + column
    mask = column < SIZE
    wait_for_previous(PDL)
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    total = values
    for _ in range(num_turns):
        total = total * 0.5 + values
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def copy_kernel(
    x: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`out = x`; reads before the kernel in front has ended unless it `WAITS`. Grid: rows."""
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0) * SIZE + column
    mask = column < SIZE
    if WAITS:
        wait_for_previous(PDL)
    values = tl.load(x + place, mask=mask, other=0.0)
    if not WAITS:
        wait_for_previous(PDL)
    tl.store(out + place, values, mask=mask)


def _slow_double(x: Tensor) -> Tensor:
    x = x.contiguous()
    out, size, is_pdl = torch.empty_like(x), x.shape[-1], has_pdl(x.device)
    slow_double_kernel[(x.shape[0],)](
        x,
        out,
        NUM_TURNS,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=is_pdl,
        launch_pdl=is_pdl,
    )
    return out


def copied(x: Tensor, *, waits: bool) -> Tensor:
    """A copy of x [T, size] on a GPU, read too early unless it `waits`."""
    out, size, is_pdl = torch.empty_like(x), x.shape[-1], has_pdl(x.device)
    copy_kernel[(x.shape[0],)](
        x,
        out,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        WAITS=waits,
        PDL=is_pdl,
        launch_pdl=is_pdl,
    )
    return out


_LIBRARY.define("slow_double(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("slow_double", lambda x: x * 2, "CPU")
_LIBRARY.impl("slow_double", _slow_double, "CUDA")
torch.library.register_fake("ce_tests::slow_double", torch.empty_like, lib=_LIBRARY)


def slow_double(x: Tensor) -> Tensor:
    """`2 * x`, contiguous, for x [T, size]."""
    return torch.ops.ce_tests.slow_double.default(x)
