"""Which kernel serves a quantised linear layer, the reasons against others, and sizes.

`quantized_linear` for few tokens is one kernel that reads the weight as it is stored, to registers
("packed") or through shared memory ("ring"). For many, quantised activations go to a product of
bytes ("scaled"), and weights of which only the weight is quantised become 16-bit floats for the
library ("dequantized"). Weights and activations of 4 bits go to the library's product of such
("fp4") where the device has one. `scaled_linear` is the product of bytes by itself. Sizes and
limits were measured on an H200 with the weights of Qwen3-8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_engine.custom_ops.quant import FP4_PAIRS, SCALED_PAIRS
from compiled_engine.custom_ops.quant_fp4 import FP4_ARCH, fp4_rejects
from compiled_engine.custom_ops.quant_packed import (
    MOST_SHARED_ARCH,
    PackedConfig,
    QuantOperands,
    packed_rejects,
)
from compiled_engine.custom_ops.quant_scaled import int_mm_rejects, scaled_mm_rejects
from compiled_engine.custom_ops.reference_quant import PACKED_FORMATS, TILED, WEIGHT_FORMATS
from compiled_engine.custom_ops.registry import Candidate, Priority, Target, Traits
from compiled_engine.custom_ops.toolchain import has_nvrtc

DTYPES = (torch.bfloat16, torch.float16)
MAX_SIZE = 32768  # columns that a program of the quantising kernels holds
_MIN_GROUP = 32


class Before(NamedTuple):
    """What stands before the quantisation: nothing, a norm, a residual and a norm, or a gate.

    `activation`, "" for no gate, `alpha` and `limit` are those of `reference.gated_activation`.
    """

    norm_weight: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    activation: str = ""
    alpha: float = 0.0
    limit: float = 0.0

    def size_of(self, x: Tensor) -> int:
        """Columns that are quantised."""
        return x.shape[1] // (2 if self.activation else 1)


def quantized_linear_traits(operands: QuantOperands) -> dict[str, int]:
    """The traits of arguments of `quantized_linear` that candidates look at; all are numbers."""
    x, format = operands.x, operands.format
    others = [t for t in (operands.bias, operands.norm_weight, operands.residual) if t is not None]
    stored = [t for t in operands[1:5] if t is not None]
    is_int4, is_packed = format == "int4_group", format in PACKED_FORMATS
    columns = operands.weight.shape[1] * (2 if is_packed else 1)
    group = columns // max(1, operands.scale.shape[-1]) if is_int4 else _MIN_GROUP
    scale_dtype = x.dtype if is_int4 else torch.float32
    has_own_scales = format in ("nvfp4", "mxfp4", TILED)
    is_alone = x.shape[0] == 1
    return {
        "num_tokens": x.shape[0],
        "rows": operands.weight.shape[0],
        "size": x.shape[1],
        "format": WEIGHT_FORMATS.index(format),
        "is_gated": operands.is_gated,
        "is_packed": is_packed,
        "is_tiled": format == TILED,
        "is_fp4_pair": (format, operands.activation_format) in FP4_PAIRS,
        "fits_a_program": operands.x.shape[1] <= MAX_SIZE,
        "has_heavy_scales": format in ("fp8_block", "fp8_token_block", "int4_group"),
        "has_activation_format": bool(operands.activation_format),
        "is_scaled_pair": (format, operands.activation_format) in SCALED_PAIRS,
        # several tokens come as bytes
        "x_multiple": 16 if operands.activation_format and not is_alone else 8,
        "has_one_dtype": all(t.dtype == x.dtype for t in others),
        "has_fine_scales": has_own_scales
        or all(t.dtype == scale_dtype for t in operands.scales_of_values),
        "has_whole_groups": group >= _MIN_GROUP and group & (group - 1) == 0,
        "is_weight_contiguous": all(t.is_contiguous() for t in stored),
        "is_last_dim_contiguous": all(
            t.stride(1) == 1 for t in (x, operands.residual) if t is not None
        ),
        "is_aligned": _is_aligned(operands),
        "has_scale_words": all(
            t.storage_offset() * t.element_size() % 4 == t.numel() * t.element_size() % 4 == 0
            for t in (operands.scale, operands.zero)
            if t is not None
        ),
        "weight_bytes": operands.weight.shape[0] * operands.row_bytes,
        "has_nvrtc": has_nvrtc(),
    }


def _is_aligned(operands: QuantOperands) -> bool:
    """Whether rows of x and the weight start at multiples of 16 bytes; storage itself does."""
    x = operands.x
    norm_weight = operands.norm_weight
    return (
        (x.shape[0] == 1 or x.stride(0) % 8 == 0)
        and x.storage_offset() % 8 == 0
        and operands.row_bytes % 16 == 0
        and operands.weight.storage_offset() * operands.weight.element_size() % 16 == 0
        and (norm_weight is None or norm_weight.storage_offset() % 8 == 0)
    )


def scaled_linear_traits(
    q: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    format: str,
    activation_format: str,
    target: Target | None = None,
) -> dict[str, int]:
    """The traits of arguments of `scaled_linear` that candidates look at; all are numbers."""
    return {
        "num_tokens": q.shape[0],
        "rows": weight.shape[0],
        "size": q.shape[1],
        "stored": weight.shape[1],
        "is_fp8": q.dtype == torch.float8_e4m3fn,
        "is_int8": format == "int8_channel" and q.dtype == torch.int8,
        "in_blocks": activation_format == "fp8_block",
        "has_token_blocks": format == "fp8_token_block",
        "has_one_scale": format == "fp8_tensor" and activation_format == "fp8_tensor",
        "is_scaled_pair": (format, activation_format) in SCALED_PAIRS,
        "is_weight_contiguous": all(t.is_contiguous() for t in (q, weight, weight_scale)),
        "arch": (target or Target.of(q.device)).arch,
    }


_Table = TypeVar("_Table")


def _ring(sixteens: int, warps: int, ahead: int, resident: int, blocks: int = 0) -> PackedConfig:
    return PackedConfig(sixteens, warps, ahead, resident, blocks, is_ring=True)


# Sizes of "packed" by the bits of a weight's values and whether its rows are long: for one token,
# and for more, up to so many.
_ONE = {
    (8, False): PackedConfig(1, 8, 2, 2),
    (8, True): PackedConfig(1, 8, 4, 2),
    (4, False): PackedConfig(1, 8, 2, 3, 3),
    (4, True): PackedConfig(1, 16, 1, 2),
}
_MORE = {
    8: {
        (8, False): PackedConfig(2, 8, 1, 2),
        (8, True): PackedConfig(1, 8, 4, 2),
        (4, False): PackedConfig(4, 8, 1, 1),
        (4, True): PackedConfig(4, 8, 1, 1),
    },
    32: {
        (8, False): PackedConfig(4, 8, 1, 1),
        (8, True): PackedConfig(2, 8, 2, 1),
        (4, False): PackedConfig(2, 8, 1, 1),
        (4, True): PackedConfig(2, 8, 1, 1),
    },
}
# The same where scales take registers that these leave too few of.
_HEAVY_ONE = PackedConfig(1, 8, 2, 2)
_HEAVY_MORE = PackedConfig(2, 8, 1, 1)
_LONG_SIZE = 8192


# Sizes of "ring" for up to so many tokens, by `_shape_of` the weight. What was not measured with
# integers takes those of 8-bit floats.
_RING_8 = {
    1: (_ring(1, 8, 6, 2, 2), _ring(1, 4, 6, 4, 2), _ring(1, 8, 6, 2, 2), _ring(1, 8, 4, 2)),
    8: (_ring(2, 8, 2, 2, 2),) * 3 + (_ring(2, 8, 4, 1, 1),),
    16: (
        _ring(4, 8, 2, 1, 1),
        _ring(2, 8, 2, 1, 1),
        _ring(4, 4, 2, 2, 2),
        _ring(2, 8, 3, 1, 1),
    ),
    32: (_ring(4, 4, 3, 1, 1), _ring(2, 8, 2, 1, 1)) * 2,
}
_RING_INTEGERS = _RING_8 | {
    1: (_ring(1, 16, 3, 1, 1), _ring(1, 8, 3, 2, 2), *(_ring(1, 16, 3, 1, 1),) * 2),
    8: (_ring(2, 8, 2, 2, 2),) * 3 + (_ring(1, 8, 3, 2, 2),),
}
_RING_4 = {
    1: (_ring(1, 8, 2, 3, 3), _ring(1, 8, 2, 2, 2), _ring(1, 4, 4, 4, 4), _ring(1, 4, 5, 4, 2)),
    8: (_ring(4, 8, 2, 1, 1), _ring(2, 8, 2, 2, 2)) * 2,
    16: (_ring(4, 8, 2, 1, 1),) * 4,
    32: (_ring(4, 4, 2, 1, 1),) * 4,
}
_FEW_ROWS, _MANY_ROWS = 5120, 16384


def _shape_of(traits: Traits) -> int:
    """Of a weight: 0 some rows, 1 few, 2 many; 3 long ones."""
    if traits["size"] > _LONG_SIZE:
        return 3
    return 1 if traits["rows"] <= _FEW_ROWS else 2 if traits["rows"] > _MANY_ROWS else 0


def pick_ring(traits: Traits) -> PackedConfig:
    """Sizes of the kernel "ring"; they can be made for every product it takes."""
    tables = _RING_4 if traits["is_packed"] else _RING_8
    if WEIGHT_FORMATS[traits["format"]] == "int8_channel":
        tables = _RING_INTEGERS
    return _up_to(traits["num_tokens"], tables)[_shape_of(traits)]


def pick_config(traits: Traits) -> PackedConfig:
    """Sizes of the kernel "packed"; they can be made for every product it takes."""
    kind = (4 if traits["is_packed"] else 8, traits["size"] > _LONG_SIZE)
    if traits["has_heavy_scales"] and traits["num_tokens"] != 1:
        return _HEAVY_MORE
    if traits["num_tokens"] == 1:
        return _HEAVY_ONE if traits["has_heavy_scales"] else _ONE[kind]
    return _up_to(traits["num_tokens"], _MORE)[kind]


def _up_to(num_tokens: int, tables: Mapping[int, _Table]) -> _Table:
    """The table of the lowest limit that is not below."""
    return next(table for limit, table in tables.items() if num_tokens <= limit)


def _rejects_packed(traits: Traits) -> str | None:
    if not traits["has_nvrtc"]:
        return "needs the cuda-bindings package"
    return packed_rejects(traits)


def _rejects_ring(traits: Traits) -> str | None:
    if not traits["has_scale_words"]:
        return "needs scales at multiples of 4 bytes, and as many"
    return _rejects_packed(traits)


def _why_ring_is_slower(traits: Traits) -> str | None:
    format = WEIGHT_FORMATS[traits["format"]]
    if format in ("fp8_tensor", "fp8_channel", "int8_channel"):
        return None
    if format != "nvfp4":
        return "was not faster with scales of blocks or groups than weights that go to registers"
    if 1 < traits["num_tokens"] <= 8:
        return "was slower with nvfp4 and 2 to 8 tokens than weights that go to registers"
    return None


def _rejects_scaled(traits: Traits) -> str | None:
    rules = (
        (traits["num_tokens"] > 0, "needs a token"),
        (traits["is_scaled_pair"], "needs weights and activations of bytes with scales that match"),
        (traits["has_one_dtype"], "needs the same dtype for x, bias, norm and residual"),
        (traits["is_weight_contiguous"], "needs contiguous weights and scales"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _rejects_dequantized(traits: Traits) -> str | None:
    rules = (
        (traits["has_one_dtype"], "needs the same dtype for x, bias, norm and residual"),
        (traits["is_weight_contiguous"], "needs contiguous weights and scales"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _rejects_triton(traits: Traits) -> str | None:
    rules = (
        (traits["is_scaled_pair"], "needs weights and activations with scales that match"),
        (traits["is_weight_contiguous"], "needs contiguous operands"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _linear(name: str, priority: Priority, min_arch: int, tag: str, **rules: object) -> Candidate:
    return Candidate(
        family="quantized_linear",
        mode="few",
        name=name,
        priority=priority,
        device_type="cuda",
        min_arch=min_arch,
        dtypes=DTYPES,
        tags=(tag,),
        **rules,  # type: ignore[arg-type]
    )


# Of two of one band the first is taken. Dtype of candidates of `scaled_linear`: that of the result.
CANDIDATES = (
    _linear(
        "ring",
        Priority.SPECIALIZED,
        90,
        "1 to 32 tokens, weights through shared memory",
        max_arch=MOST_SHARED_ARCH,
        rejects=_rejects_ring,
        slower=_why_ring_is_slower,
    ),
    _linear(
        "packed",
        Priority.SPECIALIZED,
        89,
        "1 to 32 tokens, weights to registers",
        rejects=_rejects_packed,
    ),
    _linear(
        "fp4",
        Priority.SPECIALIZED,
        FP4_ARCH,
        "activations become 4 bits first, then the library",
        rejects=fp4_rejects,
        # zeros of the tiles, quantiser, product, scales, gate
        num_kernels=lambda traits: 4 + traits["is_gated"],
    ),
    _linear(
        "scaled",
        Priority.TUNED,
        89,
        "activations are quantised first",
        rejects=_rejects_scaled,
    ),
    _linear(
        "dequantized",
        Priority.PORTABLE,
        89,
        "a kernel that writes the weight as 16-bit floats first",
        rejects=_rejects_dequantized,
    ),
    Candidate(
        family="quantized_linear",
        mode="few",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
    Candidate(
        family="scaled_linear",
        mode="product",
        name="scaled_mm",
        priority=Priority.SPECIALIZED,
        device_type="cuda",
        min_arch=89,
        dtypes=DTYPES,
        rejects=scaled_mm_rejects,
        tags=("the library",),
    ),
    Candidate(
        family="scaled_linear",
        mode="product",
        name="int_mm",
        priority=Priority.SPECIALIZED,
        device_type="cuda",
        min_arch=80,
        dtypes=DTYPES,
        rejects=int_mm_rejects,
        tags=("the library's sums of integers, then a kernel that scales them",),
    ),
    Candidate(
        family="scaled_linear",
        mode="product",
        name="triton",
        priority=Priority.TUNED,
        device_type="cuda",
        min_arch=89,
        dtypes=DTYPES,
        rejects=_rejects_triton,
    ),
    Candidate(
        family="scaled_linear",
        mode="product",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
)
