"""Linear layers with quantised weights, in quantise/dequantise form.

`linear(dequantize(quantize(x)), dequantize(weight))` is the mathematics; passes lower it to one
kernel. `quantize_layers` puts such layers in the place of a model's `nn.Linear`, as a `QuantPlan`
says, before anything has storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import dequantize, quantize
from compiled_engine.custom_ops.quant_pack import MXFP4_GROUP, PackedWeight, stored_columns
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP, tile_places, tiled_shape
from compiled_engine.custom_ops.reference_quant import (
    BLOCK,
    FP4_ACTIVATIONS,
    PACKED_FORMATS,
    TILED,
    activation_layout,
)
from compiled_engine.models.quant_plan import LinearScheme, QuantPlan

# Formats of 4-bit floats with two scales, and activations whose scale is a parameter.
_TWO_SCALES = ("nvfp4", TILED)
_STATIC = ("fp8_tensor", "nvfp4_tensor")
_WEIGHT_DTYPES = {"int8_channel": torch.int8} | dict.fromkeys(PACKED_FORMATS, torch.uint8)


class QuantLinear(nn.Module):
    """`nn.Linear` over a quantised weight.

    Args:
        in_features: columns k of the weight.
        part_rows: rows of each checkpoint layer that the weight holds, in order.
        scheme: how it is quantised.
        has_bias: whether there is a bias [n].

    Attributes:
        weight: stored values [n, ...].
        scale: scales, as the format says.
        zero, global_scale: further numbers of some formats, or None.
        input_scale: fp32 [1], scale of the input where it is a static one, or None.
        input_order: int64 [k], the column of the input that each column of the weight takes, where
            groups are not of neighbours; else None.
        fixed_dtypes: names of the parameters whose dtype does not follow the model's.
    """

    fixed_dtypes = frozenset(
        {"weight", "scale", "zero", "global_scale", "input_scale", "input_order"}
    )

    def __init__(
        self, in_features: int, part_rows: tuple[int, ...], scheme: LinearScheme, has_bias: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = num_rows = sum(part_rows)
        self.part_rows = part_rows
        self.scheme = scheme = _fit(scheme, part_rows)
        self.format = scheme.format
        self.activation_format = scheme.activation_format
        self.group_size = group = _group_size(scheme, in_features)
        columns = stored_columns(scheme.format, in_features, group or 1)
        is_packed = scheme.format in PACKED_FORMATS
        dtype = _WEIGHT_DTYPES.get(scheme.format, torch.float8_e4m3fn)
        self.weight = _frozen(num_rows, columns // 2 if is_packed else columns, dtype=dtype)
        num_groups = columns // group if group else 1
        shape = _scale_shape(scheme, num_rows, in_features, num_groups)
        self.scale = _frozen(*shape, dtype=_scale_dtype(scheme))
        zeros = _scale_dtype(scheme) if scheme.has_offset else torch.uint8
        self.zero = _frozen(num_rows, num_groups, dtype=zeros) if scheme.has_zero else None
        self.global_scale = _frozen(num_rows, 1) if scheme.format in _TWO_SCALES else None
        self.input_scale = _frozen(1) if scheme.activation_format in _STATIC else None
        has_order = scheme.has_order
        self.input_order = _frozen(in_features, dtype=torch.int64) if has_order else None
        self.bias = nn.Parameter(torch.empty(num_rows)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] to [T, out_features] in the dtype of `x`."""
        size, dtype = self.in_features, x.dtype
        if self.input_order is not None:
            x = x.index_select(1, self.input_order)
        if self.activation_format:
            q, scale, *more = quantize(x, self.activation_format, self.input_scale)
            layout = activation_layout(self.activation_format)
            x = dequantize(q, scale, None, more[0] if more else None, layout, size, dtype)
        return nn.functional.linear(x, self.dequantized(dtype), self.bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [n, k] in `dtype`, its columns in the order in which they are stored."""
        parts = self.weight, self.scale, self.zero, self.global_scale
        return dequantize(*parts, self.format, self.in_features, dtype)

    @torch.no_grad()
    def fill(self, packed: PackedWeight, start: int, num_rows: int) -> None:
        """Copies a quantised matrix into rows from `start` on; scales come by rows."""
        rows = slice(start, start + num_rows)
        self.weight[rows].copy_(packed.weight)
        if self.format == TILED:
            self._fill_tiles(packed.scale, start)
        else:
            self.scale[scale_rows(self.format, start, packed)].copy_(packed.scale)
        for mine, given in ((self.zero, packed.zero), (self.global_scale, packed.global_scale)):
            assert (mine is None) == (given is None), self.scheme
            if mine is not None and given is not None:
                mine[rows].copy_(given)

    def _fill_tiles(self, scale: Tensor, start: int) -> None:
        """Scales e4m3 [rows, groups] to their tiles, zeros to what fills up the last ones."""
        missing = self.scale.shape[1] - scale.shape[1]
        is_last = start + scale.shape[0] == self.out_features
        below = self.scale.shape[0] - self.out_features if is_last else 0
        values = nn.functional.pad(scale.view(torch.uint8), (0, missing, 0, below))
        num_rows, num_groups = values.shape
        places = tile_places(start, num_rows, num_groups, self.scale.device)
        self.scale.view(torch.uint8).view(-1)[places] = values.to(self.scale.device)

    def extra_repr(self) -> str:
        """The format behind the sizes, as `nn.Linear` prints its own."""
        activations = self.activation_format or "as they are"
        return f"{self.in_features}, {self.out_features}, {self.format}, activations {activations}"


def scale_rows(format: str, start: int, packed: PackedWeight) -> slice:
    """Where the scales of a matrix go whose rows begin at `start`."""
    first = {"fp8_block": start // BLOCK, "fp8_tensor": 0}.get(format, start)
    return slice(first, first + packed.scale.shape[0])


def _fit(scheme: LinearScheme, part_rows: tuple[int, ...]) -> LinearScheme:
    """The scheme in a format that can hold the parts one below the other.

    Parts have a scale each, or blocks that begin with them.
    """
    if scheme.activation_format in FP4_ACTIVATIONS:
        return replace(scheme, format=TILED)
    if scheme.format == "fp8_tensor" and len(part_rows) > 1:
        return replace(scheme, format="fp8_channel")
    if scheme.format == "fp8_block" and any(rows % BLOCK for rows in part_rows[:-1]):
        return replace(scheme, format="fp8_token_block")
    return scheme


def _group_size(scheme: LinearScheme, size: int) -> int:
    """Columns that share a scale; 0 where the format has no groups."""
    if scheme.format == "int4_group":
        return scheme.group_size or stored_columns(scheme.format, size)
    if scheme.format in _TWO_SCALES:
        return NVFP4_GROUP
    return MXFP4_GROUP if scheme.format == "mxfp4" else 0


def _scale_shape(
    scheme: LinearScheme, num_rows: int, size: int, num_groups: int
) -> tuple[int, ...]:
    num_blocks = -(-size // BLOCK)
    return {
        "fp8_tensor": (1,),
        "fp8_block": (-(-num_rows // BLOCK), num_blocks),
        "fp8_token_block": (num_rows, num_blocks),
        TILED: tiled_shape(num_rows, num_groups),
    }.get(scheme.format, (num_rows, num_groups))


def _scale_dtype(scheme: LinearScheme) -> torch.dtype:
    if scheme.format == "int4_group":
        return getattr(torch, scheme.scale_dtype)
    if scheme.format in _TWO_SCALES:
        return torch.float8_e4m3fn
    return torch.uint8 if scheme.format == "mxfp4" else torch.float32


def _frozen(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def quantize_layers(
    model: nn.Module, plan: QuantPlan, parts_of: Callable[[str, int], dict[str, int]]
) -> None:
    """Replaces the linear layers of a model that has no storage yet, in place.

    Args:
        model: of meta tensors.
        plan: which layers, and how.
        parts_of: name and rows of a layer -> name and rows of each checkpoint layer it holds.

    Raises:
        ConfigError: parts of one layer have different schemes.
    """
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:  # a router is one, and more
            continue
        parts = parts_of(name, module.out_features)
        scheme = plan.scheme_of(list(parts))
        if scheme is None:
            continue
        rows = tuple(parts.values())
        with torch.device("meta"):
            layer = QuantLinear(module.in_features, rows, scheme, module.bias is not None)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
