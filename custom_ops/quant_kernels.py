"""The quantisation ops on a GPU: which kernel runs, and how several make up one op.

Importing this module registers them; what the kernels cannot take runs the plain body.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_engine.custom_ops import gemm
from compiled_engine.custom_ops import reference_quant as reference
from compiled_engine.custom_ops.library import LIBRARY, note_plain_body
from compiled_engine.custom_ops.quant import QUANT_OPS as QUANT_OPS
from compiled_engine.custom_ops.quant_choice import (
    CANDIDATES,
    Before,
    pick_config,
    pick_ring,
    quantized_linear_traits,
    scaled_linear_traits,
)
from compiled_engine.custom_ops.quant_fp4 import fp4_linear
from compiled_engine.custom_ops.quant_packed import QuantOperands, launch_packed
from compiled_engine.custom_ops.quant_scaled import ScaledOperands, int_mm, scaled_mm
from compiled_engine.custom_ops.registry import Target, Traits, best_of, by_tokens

MIN_ARCH = 89  # that converts 8-bit floats


def select_kernel(
    family: str, kernel: str, target: Target, dtype: torch.dtype, traits: Traits
) -> str:
    """`kernel` if it can serve, or the best candidate's name if that is empty.

    `kernel` may be a list by tokens, see `by_tokens`.

    Raises:
        ValueError: `kernel` is unknown or cannot serve; says why.
    """
    kernel = by_tokens(kernel, traits["num_tokens"])
    candidates = [c for c in CANDIDATES if c.family == family]
    reasons = {c.name: c.rejection(target, dtype, traits) for c in candidates}
    if kernel not in ("", *reasons):
        raise ValueError(f"{family} has no kernel {kernel}; there are {', '.join(reasons)}")
    if kernel and reasons[kernel] is not None:
        raise ValueError(f"{family}: kernel {kernel} {reasons[kernel]}")
    return kernel or best_of([c for c in candidates if reasons[c.name] is None], traits).name


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return Target.of(device).arch >= MIN_ARCH


def _quantize(
    x: Tensor, before: Before, activation_format: str, static_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, scale and sum by the kernel, or None if it cannot."""
    from compiled_engine.custom_ops import quant_triton

    reason = quant_triton.unsupported_reason(x, before)
    if not _has_kernels(x.device):
        reason = f"a GPU below sm_{MIN_ARCH}"
    if reason is not None:
        note_plain_body(f"quantisation to {activation_format}", reason)
        return None
    return quant_triton.quantize_any(x, before, activation_format, static_scale)


def quantize_fp8_cuda(x: Tensor, kind: str, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `reference_quant.quantize_fp8`."""
    found = _quantize(x, Before(), f"fp8_{kind}", static_scale)
    if found is None:
        return reference.quantize_fp8(x, kind, static_scale)
    q, scale, _ = found
    return q, scale.clone() if scale is static_scale else scale


def quantize_int8_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_quant.quantize_int8`."""
    found = _quantize(x, Before(), "int8_token", None)
    return reference.quantize_int8(x) if found is None else found[:2]


def quantize_nvfp4_cuda(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference_quant.quantize_nvfp4`."""
    from compiled_engine.custom_ops import quant_fp4_triton, quant_triton

    reason = quant_triton.unsupported_reason(x, Before())
    if not _has_kernels(x.device):
        reason = f"a GPU below sm_{MIN_ARCH}"
    if reason is not None:
        note_plain_body("quantisation to nvfp4", reason)
        return reference.quantize_nvfp4(x, static_scale)
    return quant_fp4_triton.quantize(x, None, 0.0, static_scale)


def rms_norm_quant_cuda(
    x: Tensor, weight: Tensor, eps: float, activation_format: str, static_scale: Tensor | None
) -> tuple[Tensor, ...]:
    """As `reference_quant.rms_norm_quant`."""
    found = _quantize(x, Before(weight, eps), activation_format, static_scale)
    if found is None:
        return reference.rms_norm_quant(x, weight, eps, activation_format, static_scale)
    return _with_own_scale(found[:2], static_scale)


def add_rms_norm_quant_cuda(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    activation_format: str,
    static_scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """As `reference_quant.add_rms_norm_quant`."""
    found = _quantize(x, Before(weight, eps, residual), activation_format, static_scale)
    if found is None:
        return reference.add_rms_norm_quant(
            x, residual, weight, eps, activation_format, static_scale
        )
    return _with_own_scale(found, static_scale)


def gated_activation_quant_cuda(
    x: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    activation_format: str,
    static_scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """As `reference_quant.gated_activation_quant`."""
    before = Before(activation=activation, alpha=alpha, limit=limit)
    found = _quantize(x, before, activation_format, static_scale)
    if found is None:
        return reference.gated_activation_quant(
            x, activation, alpha, limit, activation_format, static_scale
        )
    return _with_own_scale(found[:2], static_scale)


def _with_own_scale(found: Sequence[Tensor], static_scale: Tensor | None) -> tuple[Tensor, ...]:
    """A result of an op may not be one of its arguments."""
    return tuple(t.clone() if t is static_scale else t for t in found)


def dequantize_cuda(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference_quant.dequantize`."""
    from compiled_engine.custom_ops import quant_dequantize_triton

    tensors = [t for t in (q, scale, zero, global_scale) if t is not None]
    is_dense = all(t.is_contiguous() for t in tensors)
    if not _has_kernels(q.device) or not is_dense:
        reason = f"a GPU below sm_{MIN_ARCH}" if is_dense else "a strided tensor"
        note_plain_body("dequantize", reason)
        return reference.dequantize(q, scale, zero, global_scale, format, size, dtype)
    return quant_dequantize_triton.dequantize(q, scale, zero, global_scale, format, size, dtype)


def scaled_linear_cuda(
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
    """Runs `impl`, or the best one if that is empty; as `reference_quant.scaled_linear`.

    Raises:
        ValueError: as `select_kernel`.
    """
    operands = ScaledOperands(
        q, q_scale, weight, weight_scale, bias, format, activation_format, dtype
    )
    traits = scaled_linear_traits(q, weight, weight_scale, format, activation_format)
    kernel = select_kernel("scaled_linear", impl, Target.of(q.device), dtype, traits)
    if kernel == "scaled_mm":
        return scaled_mm(operands)
    if kernel == "int_mm":
        return int_mm(operands)
    if kernel == "triton":
        from compiled_engine.custom_ops import quant_scaled_triton

        return quant_scaled_triton.scaled_linear(operands)
    return reference.scaled_linear(*operands)


def _finish(y: Tensor, operands: QuantOperands) -> Tensor:
    """Gate and residual behind a product."""
    from compiled_engine.custom_ops.activation_triton import silu_and_mul

    if operands.is_gated:
        y = silu_and_mul(y)
    return y if operands.residual is None else y.add_(operands.residual)


def _scaled(operands: QuantOperands) -> Tensor:
    """Norm and quantisation, product of bytes, gate and residual: a kernel each."""
    from compiled_engine.custom_ops.quant_triton import norm_and_quantize

    q, q_scale = norm_and_quantize(operands)
    y = scaled_linear_cuda(
        q,
        q_scale,
        operands.weight,
        operands.scale,
        operands.bias,
        operands.format,
        operands.activation_format,
        operands.x.dtype,
    )
    return _finish(y, operands)


def _rounded(operands: QuantOperands) -> Tensor:
    """x behind its norm, quantised and dequantised."""
    x, activation_format = operands.x, operands.activation_format
    token_scale = None
    if activation_format in reference.FP4_ACTIVATIONS:
        from compiled_engine.custom_ops import quant_fp4_triton

        norm = operands.norm_weight, operands.eps
        q, q_scale, token_scale = quant_fp4_triton.quantize(x, *norm, operands.input_scale)
    else:
        from compiled_engine.custom_ops.quant_triton import norm_and_quantize

        q, q_scale = norm_and_quantize(operands)
    layout = reference.activation_layout(activation_format)
    return dequantize_cuda(q, q_scale, None, token_scale, layout, x.shape[1], x.dtype)


def _dequantized(operands: QuantOperands) -> Tensor:
    """The weight as 16-bit floats, then what plain linear layers run."""
    x, size = operands.x, operands.x.shape[1]
    norm_weight = operands.norm_weight
    if operands.activation_format:
        x, norm_weight = _rounded(operands), None
    weight = dequantize_cuda(*operands[1:5], operands.format, size, x.dtype)
    return gemm.fused_linear_cuda(
        x,
        weight,
        operands.bias,
        norm_weight,
        operands.eps,
        operands.residual,
        operands.is_gated,
        "library",
    )


def quantized_linear_cuda(
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
    """Runs `impl`, or the best one if that is empty; as `reference_quant.quantized_linear`.

    Raises:
        ValueError: as `select_kernel`.
    """
    operands = QuantOperands(
        x, weight, scale, zero, global_scale, input_scale, bias, format, activation_format,
        norm_weight, eps, residual, is_gated,
    )  # fmt: skip
    traits = quantized_linear_traits(operands)
    kernel = select_kernel("quantized_linear", impl, Target.of(x.device), x.dtype, traits)
    if kernel == "ring":
        return launch_packed(operands, pick_ring(traits))
    if kernel == "packed":
        return launch_packed(operands, pick_config(traits))
    if kernel == "fp4":
        return _finish(fp4_linear(operands), operands)
    if kernel == "scaled":
        return _scaled(operands)
    if kernel == "dequantized":
        return _dequantized(operands)
    return reference.quantized_linear(*operands)


_FUNCTIONS = (
    ("quantize_fp8", quantize_fp8_cuda),
    ("quantize_int8", quantize_int8_cuda),
    ("quantize_nvfp4", quantize_nvfp4_cuda),
    ("dequantize", dequantize_cuda),
    ("quantized_linear", quantized_linear_cuda),
    ("scaled_linear", scaled_linear_cuda),
    ("rms_norm_quant", rms_norm_quant_cuda),
    ("add_rms_norm_quant", add_rms_norm_quant_cuda),
    ("gated_activation_quant", gated_activation_quant_cuda),
)
assert {op.name for op in QUANT_OPS} == {name for name, _ in _FUNCTIONS}
for _name, _function in _FUNCTIONS:
    LIBRARY.impl(_name, _function, "CUDA")
