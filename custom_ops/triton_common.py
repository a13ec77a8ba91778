"""What our Triton kernels share: programmatic launch, exact rounding, rows of a strided tensor.

Imports Triton, so only kernel modules may import it. A kernel launched with `pdl` on lets the next
one be placed on the device at once and waits before it touches anything an earlier kernel wrote.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def let_next_start(PDL: tl.constexpr) -> None:
    """Lets the next kernel's programs be placed once all of this one's have been."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Returns when everything that earlier kernels wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def rounded_to_e4m3(values: tl.tensor) -> tl.tensor:
    """The nearest values of e4m3, in fp32: the interpreter's own cast forgets a carry."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    rounded = bits.to(tl.float32, bitcast=True)
    small = (values + 24576.0) - 24576.0  # multiples of 2^-9
    return tl.where(tl.abs(values) < 0.015625, small, rounded)


@triton.jit
def scaled_to_e4m3(
    values: tl.tensor, scale: tl.tensor, DTYPE: tl.constexpr, ROUND_FIRST: tl.constexpr
) -> tl.tensor:
    """fp32 values, rounded to `DTYPE`, over the one number at `scale`, in the range of e4m3.

    Still in fp32, and not yet rounded to e4m3 unless by `ROUND_FIRST`, for the interpreter.
    """
    scaled = values.to(DTYPE).to(tl.float32) * tl.div_rn(1.0, tl.load(scale))
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return rounded_to_e4m3(scaled) if ROUND_FIRST else scaled


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def has_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` may use programmatic dependent launch: NVIDIA, 9.0 and later."""
    if device.type != "cuda" or torch.version.hip or is_interpreted():
        return False
    return _capability(device.index or 0) >= (9, 0)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Rows(NamedTuple):
    """A tensor seen as rows: row r starts at `r // inner * outer_stride + r % inner * stride`."""

    num_rows: int
    inner: int
    outer_stride: int
    stride: int


def rows_of(x: Tensor) -> Rows | None:
    """The last dim of `x` as rows, None if two strides cannot describe them or values are apart.

    With two dims or one, or where the leading dims are packed, `inner` is 1.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    if x.dim() == 2:  # the usual case, at once
        num_rows, size = x.shape
        return Rows(num_rows, 1, size if num_rows == 1 else x.stride(0), 0)
    sizes, strides = list(x.shape[:-1]), list(x.stride()[:-1])
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    count = 1
    for size in sizes:
        count *= size
    if len(merged) == 2:
        return Rows(count, merged[1][0], merged[0][1], merged[1][1])
    return Rows(count, 1, merged[0][1] if merged else x.shape[-1], 0)
