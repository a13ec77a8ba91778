"""Contracts of the quantisation family.

Models are written with `quantize_fp8`, `quantize_int8`, `quantize_nvfp4` and `dequantize`; passes
put `quantized_linear`, `scaled_linear` and the `*_quant` ops in their place. Formats, layouts and
rounding are those of `reference_quant`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference_quant as reference
from compiled_engine.custom_ops.library import define_op
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP, tiled_shape
from compiled_engine.custom_ops.reference_quant import (
    ACTIVATION_FORMATS,
    BLOCK,
    FP4_ACTIVATIONS,
    TILED,
    WEIGHT_FORMATS,
    stored_multiple,
)

# What activations a weight can be multiplied with as they are, without being dequantised first.
SCALED_PAIRS = (
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_tensor", "fp8_token"),
    ("fp8_channel", "fp8_tensor"),
    ("fp8_channel", "fp8_token"),
    ("fp8_block", "fp8_block"),
    ("fp8_token_block", "fp8_block"),
    ("int8_channel", "int8_token"),
)
# Those of 4 bits, which `quantized_linear` alone multiplies.
FP4_PAIRS = tuple((TILED, activations) for activations in FP4_ACTIVATIONS)
Examples = list[tuple[Any, ...]]


class _Random:
    """Seeded tensors of one dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.to(self.dtype)

    def static_scale(self, activation_format: str) -> Tensor | None:
        is_static = activation_format in ("tensor", "fp8_tensor", "nvfp4_tensor")
        return torch.full((1,), 0.01, device=self.device) if is_static else None

    def zero(self, format: str, scale: Tensor) -> Tensor | None:
        """Zeros of every other int4 weight: codes, or values if it has a multiple of 5 rows."""
        if format != "int4_group" or scale.shape[0] % 2 == 0:
            return None
        if scale.shape[0] % 5 == 0:
            return self.normal(*scale.shape) * 0.01
        numbers = torch.arange(scale.numel(), device=self.device) % 16
        return numbers.to(torch.uint8).view(scale.shape)


def _quantize_fp8_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    found: Examples = []
    for kind in ("tensor", "token", "block"):
        for shape in ((3, 200), (1, 128), (7, 33), (0, 48)):
            found.append((random.normal(*shape), kind, None))
    found.append((random.normal(4, 64), "tensor", random.static_scale("tensor")))
    found.append((torch.zeros(2, 256, dtype=dtype, device=device), "token", None))
    return found


def _quantize_int8_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    return [(random.normal(*shape),) for shape in ((3, 200), (1, 64), (7, 33), (0, 48))]


def _quantize_nvfp4_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    shapes = ((3, 200), (1, 128), (130, 33), (0, 48))
    found: Examples = [(random.normal(*shape), None) for shape in shapes]
    found.append((random.normal(4, 64), random.static_scale("tensor")))
    found.append((torch.zeros(2, 256, dtype=dtype, device=device), None))
    return found


def _dequantize_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    found: Examples = []
    for format in WEIGHT_FORMATS:
        for n, k in ((5, 96), (7, 64), (130, 200)):
            weight, scale, _, global_scale = quantize_weight(random.normal(n, k), format)
            zero = random.zero(format, scale)
            found.append((weight, scale, zero, global_scale, format, k, dtype))
    empty = torch.empty(0, 32, dtype=torch.int8, device=device)
    scale = torch.empty(0, 1, device=device)
    found.append((empty, scale, None, None, "int8_channel", 32, dtype))
    return found


def _quantized_linear_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    by_rows = [(format, "") for format in WEIGHT_FORMATS if format != TILED]
    cases = [*by_rows, *SCALED_PAIRS, (TILED, ""), *FP4_PAIRS]
    found: Examples = []
    # tokens, outputs, size, then: bias, norm, residual, gate
    sizes = (
        (1, 7, 160, True, True, False, False),
        (3, 24, 64, False, False, True, False),
        (9, 33, 200, False, True, False, True),
        (40, 16, 256, True, False, True, True),
        (0, 8, 32, False, True, True, True),
    )
    for index, (format, activation_format) in enumerate(cases):
        chosen = [sizes[index % 5], sizes[(index + 2) % 5]]
        if activation_format in FP4_ACTIVATIONS:  # a norm's last bit can be another code of 16
            chosen = [sizes[1], sizes[3]]
        if format == "int4_group":  # with each kind of zeros
            chosen += [(2, rows, 96, False, False, False, False) for rows in (15, 21)]
        for m, n, k, has_bias, has_norm, has_residual, is_gated in chosen:
            rows = 2 * n if is_gated else n
            weight, scale, _, global_scale = quantize_weight(random.normal(rows, k) * 0.1, format)
            found.append(
                (
                    random.normal(m, k),
                    weight,
                    scale,
                    random.zero(format, scale),
                    global_scale,
                    random.static_scale(activation_format),
                    random.normal(rows) if has_bias else None,
                    format,
                    activation_format,
                    random.normal(k) if has_norm else None,
                    1e-6,
                    random.normal(m, n) if has_residual else None,
                    is_gated,
                    "",
                )
            )
    return found


def _scaled_linear_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    found: Examples = []
    for index, (format, activation_format) in enumerate(SCALED_PAIRS):
        for m, n, k in ((3, 7, 160), (40, 144, 256), (0, 16, 64)):
            static = random.static_scale(activation_format)
            q, q_scale = reference.quantize(random.normal(m, k), activation_format, static)
            packed = quantize_weight(random.normal(n, k) * 0.1, format)
            bias = random.normal(n) if (index + m) % 2 else None
            weight = packed.weight, packed.scale
            found.append((q, q_scale, *weight, bias, format, activation_format, dtype, ""))
    return found


def _norm_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    return [
        (random.normal(m, k), random.normal(k), 1e-5, format, random.static_scale(format))
        for format in ACTIVATION_FORMATS
        for m, k in ((3, 200), (1, 64), (0, 48))
    ]


def _add_norm_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    return [(x, x.flip(0) * 0.5, *rest) for x, *rest in _norm_examples(dtype, device, seed)]


def _gated_examples(dtype: torch.dtype, device: torch.device, seed: int) -> Examples:
    random = _Random(dtype, device, seed)
    activations = (
        ("silu", 0.0, 0.0),
        ("gelu", 0.0, 0.0),
        ("gelu_tanh", 0.0, 0.0),
        ("swiglu_clamped", 1.702, 0.7),
    )
    return [
        (random.normal(m, 2 * k), *activation, format, random.static_scale(format))
        for activation in activations
        for format in ACTIVATION_FORMATS
        for m, k in ((3, 200), (1, 64), (0, 48))
    ]


def _fake_quantized(x: Tensor, activation_format: str) -> tuple[Tensor, Tensor]:
    """Outputs of a quantisation of x [T, k]."""
    num_tokens, size = x.shape
    scales = {
        "fp8_tensor": (1,),
        "fp8_block": (num_tokens, -(-size // BLOCK)),
    }.get(activation_format, (num_tokens, 1))
    dtype = torch.int8 if activation_format == "int8_token" else torch.float8_e4m3fn
    q = x.new_empty((num_tokens, size), dtype=dtype)
    return q, x.new_empty(scales, dtype=torch.float32)


def _fake_quantized_nvfp4(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, ...]:
    num_tokens, size = x.shape
    stored = size + -size % stored_multiple(TILED)
    tiled = tiled_shape(num_tokens, stored // NVFP4_GROUP)
    return (
        x.new_empty((num_tokens, stored // 2), dtype=torch.uint8),
        x.new_empty(tiled, dtype=torch.float8_e4m3fn),
        x.new_empty((num_tokens, 1), dtype=torch.float32),
    )


def _fake_dequantize(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    return q.new_empty((q.shape[0], size), dtype=dtype)


def _fake_quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    format: str,
    activation_format: str,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    is_gated: bool,
    impl: str = "",
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // (2 if is_gated else 1)))


def _fake_scaled_linear(
    q: Tensor,
    q_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    format: str,
    activation_format: str,
    dtype: torch.dtype,
    impl: str = "",
) -> Tensor:
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=dtype)


def _fake_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    activation_format: str,
    static_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_quantized(x, activation_format), torch.empty_like(x)


QUANTIZE_FP8 = define_op(
    "quantize_fp8(Tensor x, str kind, Tensor? static_scale) -> (Tensor, Tensor)",
    reference=reference.quantize_fp8,
    fake=lambda x, kind, static_scale: _fake_quantized(x, f"fp8_{kind}"),
    example_inputs=_quantize_fp8_examples,
)
QUANTIZE_INT8 = define_op(
    "quantize_int8(Tensor x) -> (Tensor, Tensor)",
    reference=reference.quantize_int8,
    fake=lambda x: _fake_quantized(x, "int8_token"),
    example_inputs=_quantize_int8_examples,
)
QUANTIZE_NVFP4 = define_op(
    "quantize_nvfp4(Tensor x, Tensor? static_scale) -> (Tensor, Tensor, Tensor)",
    reference=reference.quantize_nvfp4,
    fake=_fake_quantized_nvfp4,
    example_inputs=_quantize_nvfp4_examples,
)
DEQUANTIZE = define_op(
    "dequantize(Tensor q, Tensor scale, Tensor? zero, Tensor? global_scale, str format, "
    "SymInt size, ScalarType dtype) -> Tensor",
    reference=reference.dequantize,
    fake=_fake_dequantize,
    example_inputs=_dequantize_examples,
)
QUANTIZED_LINEAR = define_op(
    "quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? global_scale, "
    "Tensor? input_scale, Tensor? bias, str format, str activation_format, Tensor? norm_weight, "
    'float eps, Tensor? residual, bool is_gated, str impl="") -> Tensor',
    reference=reference.quantized_linear,
    fake=_fake_quantized_linear,
    example_inputs=_quantized_linear_examples,
)
SCALED_LINEAR = define_op(
    "scaled_linear(Tensor q, Tensor q_scale, Tensor weight, Tensor weight_scale, Tensor? bias, "
    'str format, str activation_format, ScalarType dtype, str impl="") -> Tensor',
    reference=reference.scaled_linear,
    fake=_fake_scaled_linear,
    example_inputs=_scaled_linear_examples,
)
RMS_NORM_QUANT = define_op(
    "rms_norm_quant(Tensor x, Tensor weight, float eps, str activation_format, "
    "Tensor? static_scale) -> (Tensor, Tensor)",
    reference=reference.rms_norm_quant,
    fake=lambda x, weight, eps, activation_format, static_scale: _fake_quantized(
        x, activation_format
    ),
    example_inputs=_norm_examples,
)
ADD_RMS_NORM_QUANT = define_op(
    "add_rms_norm_quant(Tensor x, Tensor residual, Tensor weight, float eps, "
    "str activation_format, Tensor? static_scale) -> (Tensor, Tensor, Tensor)",
    reference=reference.add_rms_norm_quant,
    fake=_fake_add_rms_norm_quant,
    example_inputs=_add_norm_examples,
)
GATED_ACTIVATION_QUANT = define_op(
    "gated_activation_quant(Tensor x, str activation, float alpha, float limit, "
    "str activation_format, Tensor? static_scale) -> (Tensor, Tensor)",
    reference=reference.gated_activation_quant,
    fake=lambda x, activation, alpha, limit, activation_format, static_scale: _fake_quantized(
        x.new_empty((x.shape[0], x.shape[1] // 2)), activation_format
    ),
    example_inputs=_gated_examples,
)
QUANT_OPS = (
    QUANTIZE_FP8,
    QUANTIZE_INT8,
    QUANTIZE_NVFP4,
    DEQUANTIZE,
    QUANTIZED_LINEAR,
    SCALED_LINEAR,
    RMS_NORM_QUANT,
    ADD_RMS_NORM_QUANT,
    GATED_ACTIVATION_QUANT,
)


def quantize(x: Tensor, activation_format: str, static_scale: Tensor | None) -> tuple[Any, ...]:
    """The op that makes an activation format of x [T, k]: see `reference_quant.quantize`."""
    if activation_format in FP4_ACTIVATIONS:
        return torch.ops.ce.quantize_nvfp4.default(x, static_scale)
    if activation_format == "int8_token":
        return torch.ops.ce.quantize_int8.default(x)
    kind = activation_format.removeprefix("fp8_")
    return torch.ops.ce.quantize_fp8.default(x, kind, static_scale)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Values [n, size] of a quantised matrix; see `reference_quant.dequantize`."""
    return torch.ops.ce.dequantize.default(q, scale, zero, global_scale, format, size, dtype)
