"""Scales of keys and values of a checkpoint: folded into the weights around the cache.

A cache of 8-bit floats holds keys divided by `k_scale` and values divided by `v_scale`. Both are
rounded up to a power of two, which costs a float no digit, and then the division and its
counterpart are moved into what makes keys, values and queries, and into what reads the result: no
kernel knows of them, and what the model computes stays the same to the last bit.

    k / s          rows of k in qkv_proj (or the weight of the norm behind it) / s
    (q . k / s) s  rows of q in qkv_proj (or the weight of its norm) * s
    v / s          rows of v in qkv_proj / s
    out * s        o_proj * s, and the static scale of its input / s
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops.reference_quant import BLOCK
from compiled_engine.errors import ConfigError
from compiled_engine.models.quant_linear import QuantLinear

# As compressed-tensors and ModelOpt name them.
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")


def kv_scale_names(names: Iterable[str]) -> dict[tuple[int, str], str]:
    """(layer, "k" or "v") -> the tensor that holds the scale."""
    found = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            found[int(match[1]), match[2]] = name
    return found


@torch.no_grad()
def fold_kv_scales(model: nn.Module, scales: Mapping[tuple[int, str], float]) -> None:
    """Folds the scales of all layers into the model's weights, in place.

    Raises:
        ConfigError: a scale is not a number above 0, or attention is not of the kind that has them.
    """
    for (index, kind), scale in scales.items():
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(
                f"the {kind}_scale of layer {index} is {scale}; it must be above 0", param="model"
            )
        factor = 2.0 ** math.ceil(math.log2(scale))
        attention = model.get_submodule(f"model.layers.{index}.self_attn")
        if not hasattr(attention, "qkv_proj"):
            raise ConfigError(
                f"the checkpoint has a {kind}_scale for attention that holds no keys of its own",
                param="model",
            )
        if kind == "v":
            _fold_value(attention, factor)
        else:
            _fold_key(attention, factor)


def _fold_key(attention: Any, factor: float) -> None:
    norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if norms[0] is not None and norms[1] is not None:
        norms[0].weight.mul_(factor)
        norms[1].weight.mul_(1 / factor)
        return
    q_rows, k_rows, _ = _row_ranges(attention)
    scale_rows(attention.qkv_proj, q_rows, factor)
    scale_rows(attention.qkv_proj, k_rows, 1 / factor)


def _fold_value(attention: Any, factor: float) -> None:
    scale_rows(attention.qkv_proj, _row_ranges(attention)[2], 1 / factor)
    layer = attention.o_proj
    bias = layer.bias
    kept = None if bias is None else bias.clone()
    scale_rows(layer, range(layer.out_features), factor)
    if bias is not None and kept is not None:
        bias.copy_(kept)
    if isinstance(layer, QuantLinear) and layer.input_scale is not None:
        layer.input_scale.mul_(1 / factor)


def _row_ranges(attention: Any) -> tuple[range, range, range]:
    """Rows of q, k and v in the fused projection."""
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    return range(q), range(q, q + kv), range(q + kv, q + 2 * kv)


def scale_rows(layer: nn.Linear | QuantLinear, rows: range, factor: float) -> None:
    """Multiplies rows of a weight, and of its bias, by a power of two."""
    at = slice(rows.start, rows.stop)
    if layer.bias is not None:
        layer.bias[at].mul_(factor)
    if not isinstance(layer, QuantLinear):
        layer.weight[at].mul_(factor)
    elif layer.format == "mxfp4":
        exponents = layer.scale[at].int() + round(math.log2(factor))
        layer.scale[at].copy_(exponents.clamp(0, 254).to(torch.uint8))
    else:
        _scales_of(layer, rows).mul_(factor)
        if layer.zero is not None and layer.zero.is_floating_point():  # a value, not a code
            layer.zero[at].mul_(factor)


def _scales_of(layer: QuantLinear, rows: range) -> Tensor:
    """The floats that scale just these rows."""
    if layer.global_scale is not None:
        return layer.global_scale[rows.start : rows.stop]
    if layer.format == "fp8_tensor":
        assert len(rows) == layer.out_features, "one scale for all rows"
        return layer.scale
    if layer.format == "fp8_block":
        return layer.scale[rows.start // BLOCK : -(-rows.stop // BLOCK)]
    return layer.scale[rows.start : rows.stop]
