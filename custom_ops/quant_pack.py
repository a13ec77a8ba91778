"""Weights to quantised ones: what online quantisation and `compiled-engine quantize` run.

Layouts are those of `reference_quant`. Every function takes a matrix [n, k] of any float dtype and
gives a `PackedWeight` on its device. Scales that are stored with fewer bits are rounded before the
values are, so that values are the nearest ones for the scale that is really used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.reference_fp4 import (
    E2M1_MAX,
    MIN_SCALE,
    NVFP4_GROUP,
    pack_codes,
    tile_scales,
    to_e2m1,
)
from compiled_engine.custom_ops.reference_quant import (
    BLOCK,
    FP8_MAX,
    MIN_AMAX,
    PACKED_FORMATS,
    TILED,
    dequantize,
    quantize_fp8,
    quantize_int8,
    stored_multiple,
)

MXFP4_GROUP = 32
INT4_GROUP = 128
# Shares of a group's range that int4 scales are tried with: a clipped outlier can be worth it.
_INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


class PackedWeight(NamedTuple):
    """A quantised matrix; fields as the arguments of `dequantize`."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None
    global_scale: Tensor | None = None


def group_size(format: str) -> int:
    """Columns that share a scale in a packed format that is made here."""
    groups = {"mxfp4": MXFP4_GROUP, "int4_group": INT4_GROUP}
    return groups.get(format, NVFP4_GROUP)


def row_format(format: str) -> str:
    """The format in which the rows of a matrix are packed one by one, before scales are tiled."""
    return "nvfp4" if format == TILED else format


def stored_columns(format: str, size: int, group: int = 1) -> int:
    """Columns that a weight of `size` columns is stored with: whole groups, rows of 16 bytes."""
    multiple = math.lcm(stored_multiple(format), group)
    return -(-size // multiple) * multiple


def quantize_weight(weight: Tensor, format: str, group: int = 0) -> PackedWeight:
    """The matrix [n, k] in a format; int4_group has another group than 128 if `group` says so."""
    size = weight.shape[1]
    group = group or (group_size(format) if format in PACKED_FORMATS else 1)
    padding = stored_columns(format, size, group) - size
    w32 = torch.nn.functional.pad(weight.float(), (0, padding))
    if format == "int8_channel":
        return PackedWeight(*quantize_int8(w32))
    if format in ("fp8_tensor", "fp8_channel", "fp8_token_block"):
        kind = {"fp8_tensor": "tensor", "fp8_channel": "token"}.get(format, "block")
        q, scale = quantize_fp8(w32, kind, None)
        return PackedWeight(q, scale[:, : -(-size // BLOCK)] if kind == "block" else scale)
    if format == "fp8_block":
        return _fp8_block(w32, -(-size // BLOCK))
    if format == "int4_group":
        return _int4(w32, group, weight.dtype)
    if format == "mxfp4":
        return _mxfp4(w32)
    packed = _nvfp4(w32)
    return packed._replace(scale=tile_scales(packed.scale)) if format == TILED else packed


def _fp8_block(w32: Tensor, num_blocks: int) -> PackedWeight:
    num_rows, size = w32.shape
    padded = torch.nn.functional.pad(w32, (0, -size % BLOCK, 0, -num_rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rb, 128, cb, 128]
    scale = tiles.abs().amax((1, 3)).clamp_min(MIN_AMAX) / FP8_MAX
    q = (tiles * (1.0 / scale)[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).flatten(2).flatten(0, 1)
    q = q[:num_rows, :size].to(torch.float8_e4m3fn).contiguous()
    return PackedWeight(q, scale[:, :num_blocks].contiguous())


def _nvfp4(w32: Tensor) -> PackedWeight:
    groups = w32.unflatten(1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1)
    overall = amax.amax().clamp_min(MIN_AMAX) / (E2M1_MAX * FP8_MAX)
    scale = (amax / (E2M1_MAX * overall)).clamp(MIN_SCALE, FP8_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    q = to_e2m1(groups / (scale.float() * overall).unsqueeze(-1))
    return PackedWeight(pack_codes(q), scale, None, overall.expand(w32.shape[0], 1).contiguous())


def _mxfp4(w32: Tensor) -> PackedWeight:
    """Each group takes the better of two exponents: the one that clips nothing, and one less."""
    groups = w32.unflatten(1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(-1).clamp_min(MIN_AMAX)
    above = torch.ceil(torch.log2(amax / E2M1_MAX)).int()
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for exponent in (above, above - 1):
        exponent = exponent.clamp(-126, 127)
        scale = torch.ldexp(torch.ones_like(amax), exponent).unsqueeze(-1)
        codes = to_e2m1(groups / scale)
        found = ((exponent + 127).to(torch.uint8), codes, _error(groups, codes, scale))
        best = found if best is None else _better(best, found)
    assert best is not None
    return PackedWeight(pack_codes(best[1]), best[0])


def _int4(w32: Tensor, group: int, dtype: torch.dtype) -> PackedWeight:
    """Symmetric, codes 0 to 15 around 8, the scale of the model's own dtype."""
    groups = w32.unflatten(1, (-1, group))
    amax = groups.abs().amax(-1).clamp_min(MIN_AMAX)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for share in _INT4_SHARES:
        scale = (amax * (share / 7.5)).to(dtype)
        step = scale.float().clamp_min(MIN_AMAX).unsqueeze(-1)
        codes = (groups / step).round().clamp(-8, 7)
        error = (codes * step - groups).square().sum(-1)
        found = (scale, (codes + 8).to(torch.uint8), error)
        best = found if best is None else _better(best, found)
    assert best is not None
    return PackedWeight(pack_codes(best[1]), best[0])


def _better(
    first: tuple[Tensor, Tensor, Tensor], second: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Group by group the one with the smaller error: (scale, codes, error)."""
    is_second = second[2] < first[2]
    return (
        torch.where(is_second, second[0], first[0]),
        torch.where(is_second.unsqueeze(-1), second[1], first[1]),
        torch.minimum(first[2], second[2]),
    )


def _error(groups: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Squared error of each group."""
    table = torch.tensor(
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device=groups.device
    )
    values = table[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    return (values * scale - groups).square().sum(-1)


def unpacked_weight(packed: PackedWeight, format: str, size: int, dtype: torch.dtype) -> Tensor:
    """`dequantize` of a packed weight: [n, size]."""
    weight, scale, zero, global_scale = packed
    return dequantize(weight, scale, zero, global_scale, format, size, dtype)
