"""How published checkpoints spell a quantised matrix, and how that becomes ours.

One `Layout` a spelling: which tensors a layer has (names behind the layer's own, shapes, dtypes),
and the function that makes them a `PackedWeight`. Nothing is rounded here: every value is the one
that the checkpoint's own rule gives.

Source: DeepSeek-V3's and Qwen3's FP8 checkpoints, the compressed-tensors, AutoAWQ, GPTQModel,
ModelOpt and torchao projects' documentation of their formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.quant_pack import PackedWeight, quantize_weight, row_format
from compiled_engine.custom_ops.reference_fp4 import pack_codes
from compiled_engine.custom_ops.reference_quant import BLOCK
from compiled_engine.errors import ConfigError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn
SCALAR = ((), (1,))
# The order in which AWQ puts eight neighbours into an int32, low nibble first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_INT32 = 8


class Sizes(NamedTuple):
    """What the tensors of one checkpoint layer must be measured against.

    Attributes:
        rows, columns: of the matrix.
        format: of ours that it becomes.
        group: columns that share a scale; 0 where the format has no groups.
        stored: columns ours is stored with.
        has_zero: int4: it has codes that mean 0.
        is_static: the input's scale is a part of it.
        has_order: the group of each column is a part of it.
    """

    rows: int
    columns: int
    format: str
    group: int
    stored: int
    has_zero: bool
    is_static: bool
    has_order: bool

    @property
    def groups(self) -> int:
        """Groups that the checkpoint has."""
        return -(-self.columns // self.group) if self.group else 1

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of 128 x 128."""
        return -(-self.rows // BLOCK), -(-self.columns // BLOCK)


@dataclass(frozen=True)
class Expected:
    """One tensor of a checkpoint layer: shapes and dtypes it may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_optional: bool = False


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """A spelling.

    Attributes:
        expected: sizes -> the tensors of a layer by suffix.
        packed: sizes and those tensors -> ours.
        unused: suffixes of tensors it may have and that are not needed.
    """

    expected: Callable[[Sizes], dict[str, Expected]]
    packed: Callable[[Sizes, Tensors], PackedWeight]
    unused: tuple[str, ...] = ()


def _plain_expected(sizes: Sizes) -> dict[str, Expected]:
    return {"weight": Expected(((sizes.rows, sizes.columns),), (*FLOATS, torch.float64))}


def _plain_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    if sizes.format != "fp8_token_block":
        return quantize_weight(tensors["weight"], row_format(sizes.format))
    packed = quantize_weight(tensors["weight"], "fp8_block")
    return packed._replace(scale=_scales_of_rows(packed.scale, sizes.rows))


def _input_scale(sizes: Sizes, name: str = "input_scale") -> dict[str, Expected]:
    return {name: Expected(SCALAR, FLOATS)} if sizes.is_static else {}


def _fp8_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k = sizes.rows, sizes.columns
    return {
        "weight": Expected(((n, k),), (E4M3,)),
        "weight_scale": Expected((*SCALAR, (n, 1), (n,)), FLOATS),
        **_input_scale(sizes),
    }


def _int8_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k = sizes.rows, sizes.columns
    return {
        "weight": Expected(((n, k),), (torch.int8,)),
        "weight_scale": Expected((*SCALAR, (n, 1), (n,)), FLOATS),
    }


def _scaled_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    """One scale for the matrix or a row."""
    scale = tensors["weight_scale"].float().reshape(-1, 1)
    if sizes.format == "fp8_tensor":
        scale = scale.reshape(1)
    else:
        scale = scale.expand(sizes.rows, 1)
    return PackedWeight(_widened(tensors["weight"], sizes.stored), scale)


def _torchao_expected(dtype: torch.dtype) -> Callable[[Sizes], dict[str, Expected]]:
    def expected(sizes: Sizes) -> dict[str, Expected]:
        n, k = sizes.rows, sizes.columns
        scales = ((n, 1), (n,), (1, 1), *SCALAR)
        return {
            "_weight_qdata": Expected(((n, k),), (dtype,)),
            "_weight_scale": Expected(scales, FLOATS),
            "_weight_zero_point": Expected(scales, (torch.int8, torch.int32), is_optional=True),
        }

    return expected


def _torchao_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    zero = tensors.get("_weight_zero_point")
    if zero is not None and bool(zero.any()):
        raise ConfigError(
            "its zero points are not 0: only symmetric weights are supported",
            param="quantization_config",
        )
    renamed = {"weight": tensors["_weight_qdata"], "weight_scale": tensors["_weight_scale"]}
    return _scaled_packed(sizes, renamed)


def _torchao_int4_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k, groups = sizes.rows, sizes.columns, sizes.groups
    return {
        "_weight_qdata": Expected(((n, k // 2),), (torch.int8, torch.uint8)),
        "_weight_scale": Expected(((groups, n),), FLOATS),
        "_weight_zero_point": Expected(((groups, n),), FLOATS),
    }


def _torchao_int4_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    """Signed nibbles, low first, and what 0 of them means."""
    q, scale, zero = (tensors[f"_weight_{name}"] for name in ("qdata", "scale", "zero_point"))
    if zero.dtype != scale.dtype:
        raise ConfigError(
            f"its zero points are {zero.dtype} and its scales {scale.dtype}; they must be alike",
            param="quantization_config",
        )
    num_groups = sizes.stored // sizes.group
    codes = _widened(q.view(torch.uint8) ^ 0x88, sizes.stored // 2)
    scale, zero = _widened(scale.T, num_groups), _widened(zero.T, num_groups)
    return PackedWeight(codes, scale, zero)


def _blocks_expected(name: str) -> Callable[[Sizes], dict[str, Expected]]:
    def expected(sizes: Sizes) -> dict[str, Expected]:
        return {
            "weight": Expected(((sizes.rows, sizes.columns),), (E4M3,)),
            name: Expected((sizes.blocks,), FLOATS),
        }

    return expected


def _blocks_packed(name: str) -> Callable[[Sizes, Tensors], PackedWeight]:
    def packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
        scale = tensors[name].float()
        if sizes.format == "fp8_token_block":
            scale = _scales_of_rows(scale, sizes.rows)
        return PackedWeight(_widened(tensors["weight"], sizes.stored), scale)

    return packed


def _scales_of_rows(scale: Tensor, num_rows: int) -> Tensor:
    """Scales of blocks of 128 rows, for each row."""
    return scale.repeat_interleave(BLOCK, 0)[:num_rows]


def _fp4_expected(
    values: str, scalar: str = "", static: str = ""
) -> Callable[[Sizes], dict[str, Expected]]:
    """Names of the values, of the scale of all, and of that of the input where it is static."""

    def expected(sizes: Sizes) -> dict[str, Expected]:
        dtype = torch.uint8 if sizes.format == "mxfp4" else E4M3
        return {
            values: Expected(((sizes.rows, sizes.columns // 2),), (torch.uint8,)),
            "weight_scale": Expected(((sizes.rows, sizes.groups),), (dtype,)),
            **({scalar: Expected(SCALAR, FLOATS)} if scalar else {}),
            **_input_scale(sizes, static),
        }

    return expected


def _fp4_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    values = tensors.get("weight_packed", tensors.get("weight"))
    assert values is not None
    global_scale = None
    if sizes.format != "mxfp4":
        if "weight_scale_2" in tensors:
            global_scale = tensors["weight_scale_2"].float()
        else:  # compressed-tensors divides by it
            global_scale = 1.0 / tensors["weight_global_scale"].float()
        global_scale = global_scale.reshape(1, 1).expand(sizes.rows, 1)
    scale = _widened(tensors["weight_scale"], sizes.stored // sizes.group)
    return PackedWeight(_widened(values, sizes.stored // 2), scale, None, global_scale)


def _int32_columns_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k = sizes.rows, sizes.columns
    found = {
        "weight_packed": Expected(((n, -(-k // _PER_INT32)),), (torch.int32,)),
        "weight_scale": Expected(((n, sizes.groups),), FLOATS),
        "weight_shape": Expected(((2,),), (torch.int64, torch.int32), is_optional=True),
    }
    if sizes.has_order:
        found["weight_g_idx"] = Expected(((k,),), (torch.int32, torch.int64))
    if sizes.has_zero:
        zeros = (-(-n // _PER_INT32), sizes.groups)
        found["weight_zero_point"] = Expected((zeros,), (torch.int32,))
    return found


def _int32_columns_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != [sizes.rows, sizes.columns]:
        raise ConfigError(
            f"weight_shape is {shape.tolist()}, not {[sizes.rows, sizes.columns]}", param="model"
        )
    codes = _in_order(_nibbles(tensors["weight_packed"])[:, : sizes.columns], sizes, tensors)
    zero = None
    if sizes.has_zero:  # packed along the rows
        zero = _nibbles(tensors["weight_zero_point"].T).T[: sizes.rows]
    return _int4(sizes, codes, tensors["weight_scale"], zero)


def _gptq_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k, groups = sizes.rows, sizes.columns, sizes.groups
    return {
        "qweight": Expected(((k // _PER_INT32, n),), (torch.int32,)),
        "qzeros": Expected(((groups, n // _PER_INT32),), (torch.int32,)),
        "scales": Expected(((groups, n),), FLOATS),
        "g_idx": Expected(((k,),), (torch.int32,), is_optional=not sizes.has_order),
    }


def column_order(sizes: Sizes, tensors: Tensors) -> Tensor | None:
    """Columns sorted by their groups, int64 [k]; None where groups are of neighbours.

    Raises:
        ConfigError: the groups are not of the size that the config says.
    """
    if not sizes.has_order:
        return None
    index = tensors["g_idx" if "g_idx" in tensors else "weight_g_idx"].long()
    order = index.argsort(stable=True)
    if not torch.equal(index[order], _neighbours(sizes, index.device)):
        raise ConfigError(
            f"g_idx does not give every group {sizes.group} columns", param="quantization_config"
        )
    return order


def _neighbours(sizes: Sizes, device: torch.device) -> Tensor:
    """The group of each column where groups are of neighbours."""
    return torch.arange(sizes.columns, device=device) // sizes.group


def _in_order(codes: Tensor, sizes: Sizes, tensors: Tensors) -> Tensor:
    order = column_order(sizes, tensors)
    return codes if order is None else codes[:, order]


def _gptq_packed(offset: int) -> Callable[[Sizes, Tensors], PackedWeight]:
    """`offset` is added to stored zeros: the first version of the layout keeps them less one."""

    def packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
        index = tensors.get("g_idx")
        is_plain = index is None or torch.equal(index.long(), _neighbours(sizes, index.device))
        if not is_plain and not sizes.has_order:
            raise ConfigError(
                "g_idx sorts the columns by activation order; the config says it does not "
                "(desc_act)",
                param="quantization_config",
            )
        codes = _in_order(_nibbles(tensors["qweight"].T), sizes, tensors)
        # A zero of 0, less one, is stored as 15.
        zero = (_nibbles(tensors["qzeros"]).T + offset) & 15
        if not sizes.has_zero and not bool((zero == 8).all()):
            raise ConfigError(
                "the checkpoint says it is symmetric (sym) and its qzeros are not",
                param="quantization_config",
            )
        return _int4(sizes, codes, tensors["scales"].T, zero if sizes.has_zero else None)

    return packed


def _awq_expected(sizes: Sizes) -> dict[str, Expected]:
    n, k, groups = sizes.rows, sizes.columns, sizes.groups
    return {
        "qweight": Expected(((k, n // _PER_INT32),), (torch.int32,)),
        "qzeros": Expected(((groups, n // _PER_INT32),), (torch.int32,)),
        "scales": Expected(((groups, n),), FLOATS),
    }


def _awq_packed(sizes: Sizes, tensors: Tensors) -> PackedWeight:
    codes, zeros = (_awq_nibbles(tensors[name]).T for name in ("qweight", "qzeros"))
    return _int4(sizes, codes, tensors["scales"].T, zeros)


def _nibbles(words: Tensor) -> Tensor:
    """Int32 [r, c] to codes uint8 [r, 8 c], low nibble first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def _awq_nibbles(words: Tensor) -> Tensor:
    """Int32 [r, c] to codes [r, 8 c] in the order of columns."""
    codes = _nibbles(words).unflatten(1, (-1, _PER_INT32))
    ordered = torch.empty_like(codes)
    ordered[..., list(_AWQ_ORDER)] = codes
    return ordered.flatten(1)


def _int4(sizes: Sizes, codes: Tensor, scale: Tensor, zero: Tensor | None) -> PackedWeight:
    num_groups = sizes.stored // sizes.group
    if zero is not None:
        zero = _widened(zero, num_groups)
    packed = pack_codes(_widened(codes, sizes.stored))
    return PackedWeight(packed, _widened(scale, num_groups), zero)


def _widened(values: Tensor, columns: int) -> Tensor:
    """With zeros behind the last column."""
    missing = columns - values.shape[1]
    if missing == 0:
        return values
    return torch.cat((values, values.new_zeros(values.shape[0], missing)), 1)


LAYOUTS: dict[str, Layout] = {
    "plain": Layout(_plain_expected, _plain_packed),
    "fp8": Layout(_fp8_expected, _scaled_packed),
    "fp8_block_inv": Layout(
        _blocks_expected("weight_scale_inv"), _blocks_packed("weight_scale_inv")
    ),
    "fp8_block": Layout(_blocks_expected("weight_scale"), _blocks_packed("weight_scale")),
    "int8": Layout(_int8_expected, _scaled_packed),
    "int4_rows": Layout(_int32_columns_expected, _int32_columns_packed),
    "nvfp4_packed": Layout(
        _fp4_expected("weight_packed", "weight_global_scale", "input_global_scale"),
        _fp4_packed,
        ("input_global_scale",),
    ),
    "nvfp4": Layout(
        _fp4_expected("weight", "weight_scale_2", "input_scale"), _fp4_packed, ("input_scale",)
    ),
    "mxfp4_packed": Layout(_fp4_expected("weight_packed"), _fp4_packed),
    "gptq": Layout(_gptq_expected, _gptq_packed(1)),
    "gptq_v2": Layout(_gptq_expected, _gptq_packed(0)),
    "torchao_int8": Layout(_torchao_expected(torch.int8), _torchao_packed),
    "torchao_fp8": Layout(_torchao_expected(E4M3), _torchao_packed),
    "torchao_int4": Layout(_torchao_int4_expected, _torchao_int4_packed),
    "awq": Layout(_awq_expected, _awq_packed),
}
