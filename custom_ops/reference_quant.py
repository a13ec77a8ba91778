"""Plain PyTorch bodies of the quantisation ops: formats, rounding rules, quantised linear layers.

A format is how a matrix [n, k] lies in memory. `q` may hold more columns than k (`STORED_MULTIPLE`
says of what they are a multiple, so that rows start at 16 bytes); what stands in them is finite
and without effect.

    format           q                      scale                          more
    fp8_tensor       e4m3 [n, k]            fp32 [1]
    fp8_channel      e4m3 [n, k]            fp32 [n, 1]
    fp8_block        e4m3 [n, k]            fp32 [ceil(n/128), ceil(k/128)]
    fp8_token_block  e4m3 [n, k]            fp32 [n, ceil(k/128)]
    int8_channel     int8 [n, k]            fp32 [n, 1]
    nvfp4            uint8 [n, k/2] e2m1    e4m3 [n, k/16]                global_scale: fp32 [n, 1]
    nvfp4_tiles      the same               the same, in tiles (`reference_fp4`)  the same
    mxfp4            uint8 [n, k/2] e2m1    uint8 [n, k/32]: 2^(byte - 127)
    int4_group       uint8 [n, k/2], 0..15  any float [n, k/g]            zero: [n, k/g], or 8

Packed bytes hold column 2j in the low nibble and 2j + 1 in the high one. A value is
`q * scale` (nvfp4: `(q * scale) * global_scale`; int4: `(q - zero) * scale` where zeros are codes,
uint8, or `(q - 8) * scale + zero` where they are values, of the scales' dtype), computed in fp32
and rounded once to the asked dtype.

Activations [T, k] use the same layouts; how they are made is an activation format: "fp8_token"
(fp8_channel), "fp8_tensor", "fp8_block" (fp8_token_block), "int8_token" (int8_channel), and
"nvfp4_token" and "nvfp4_tensor" (nvfp4_tiles), whose fp32 scale is one a token or a static one.

Rounding when quantising, all in fp32: `amax` of the absolute values that share a scale,
`scale = max(amax, MIN_AMAX) / 448` (int8: `/ 127`), `inverse = 1 / scale`, then `x * inverse`
clamped to the format's largest value and rounded to nearest, ties to even. A row of zeros thus has
q = 0 and a tiny scale; no scale is ever 0. A static scale is taken as it is. For nvfp4 see
`quantize_nvfp4`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops.reference import (
    gated_activation,
    linear,
    paged_attention,
    rms_norm,
    silu_and_mul,
)
from compiled_engine.custom_ops.reference_fp4 import (
    E2M1_MAX,
    MIN_SCALE,
    NVFP4_GROUP,
    pack_codes,
    tile_scales,
    to_e2m1,
    untile_scales,
)

FP8_MAX = 448.0
INT8_MAX = 127.0
MIN_AMAX = 2.0**-64
BLOCK = 128
# Of the static scale among the arguments of `paged_attention_quant`.
_SCALE_PLACE = 11

WEIGHT_FORMATS = (
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "fp8_token_block",
    "int8_channel",
    "nvfp4",
    "mxfp4",
    "int4_group",
    "nvfp4_tiles",
)
# How activations are quantised to bytes -> the layout they have then.
ACTIVATION_FORMATS = {
    "fp8_token": "fp8_channel",
    "fp8_tensor": "fp8_tensor",
    "fp8_block": "fp8_token_block",
    "int8_token": "int8_channel",
}
# How they are quantised to 4 bits, always to TILED.
FP4_ACTIVATIONS = ("nvfp4_token", "nvfp4_tensor")
TILED = "nvfp4_tiles"
# Formats whose values are two in a byte.
PACKED_FORMATS = ("nvfp4", "mxfp4", "int4_group", TILED)


def stored_multiple(format: str) -> int:
    """Stored columns of a weight are a multiple of this (and of its groups): 16 bytes."""
    return 32 if format in PACKED_FORMATS else 16


def quantize_fp8(x: Tensor, kind: str, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` as e4m3 with one scale for the tensor, a token, or 128 columns of a token.

    Args:
        x: [T, k] any float dtype.
        kind: "tensor", "token" or "block".
        static_scale: fp32 [1], for "tensor" only; None computes it from `x`.

    Returns:
        q e4m3 [T, k], and fp32 scales [1], [T, 1] or [T, ceil(k / 128)].
    """
    x32 = x.float()
    if static_scale is not None:
        assert kind == "tensor", f"a static scale is one for the tensor, not for a {kind}"
        scales = scale = static_scale
    elif kind == "block":
        scale = _scale_of(_in_blocks(x32).abs().amax(-1), FP8_MAX)  # [T, ceil(k / 128)]
        scales = _spread(scale, 1, x.shape[1], BLOCK)
    else:
        amax = x32.abs().amax(-1, keepdim=True)  # [T, 1]
        if kind == "tensor":  # a zero more, for tensors without tokens
            amax = torch.cat((amax, amax.new_zeros(1, 1))).amax(0)
        scales = scale = _scale_of(amax, FP8_MAX)
    scaled = (x32 * (1.0 / scales)).clamp(-FP8_MAX, FP8_MAX)
    return _dense(scaled.to(torch.float8_e4m3fn)), _dense(scale)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [T, k] as int8 [T, k] in [-127, 127] with fp32 scales [T, 1]."""
    x32 = x.float()
    scale = _scale_of(x32.abs().amax(-1, keepdim=True), INT8_MAX)
    q = (x32 * (1.0 / scale)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return _dense(q), _dense(scale)


def quantize_nvfp4(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`x` as e2m1, an e4m3 scale for 16 columns of a token, and an fp32 scale for each token.

    The fp32 scale is the static one, or `max(amax of the token, MIN_AMAX) / (6 * 448)`. That of a
    group is `amax / (6 * fp32 scale)`, between 2^-9 and 448, rounded to e4m3; values are those
    times the inverse of both scales, rounded to the nearest, ties to the even code.

    Args:
        x: [T, k] any float dtype.
        static_scale: fp32 [1], or None.

    Returns:
        q uint8 [T, ceil(k / 32) * 16], scales e4m3 in tiles, and fp32 [T, 1].
    """
    x32 = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % stored_multiple(TILED)))
    groups = x32.unflatten(1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1)  # [T, groups]
    if static_scale is None:
        overall = _scale_of(amax.amax(-1, keepdim=True), E2M1_MAX * FP8_MAX)
    else:
        overall = static_scale.reshape(1, 1).expand(x.shape[0], 1)
    ratio = (amax / (E2M1_MAX * overall)).clamp(MIN_SCALE, FP8_MAX)
    scale = ratio.to(torch.float8_e4m3fn)
    inverse = 1.0 / (scale.float() * overall)
    codes = to_e2m1(groups * inverse.unsqueeze(-1))
    return _dense(pack_codes(codes)), _dense(tile_scales(scale)), _dense(overall)


def quantize(x: Tensor, activation_format: str, static_scale: Tensor | None) -> tuple[Tensor, ...]:
    """What an activation format makes of x: q and scale, of 4 bits the scale of tokens too."""
    if activation_format in FP4_ACTIVATIONS:
        return quantize_nvfp4(x, static_scale)
    if activation_format == "int8_token":
        return quantize_int8(x)
    return quantize_fp8(x, activation_format.removeprefix("fp8_"), static_scale)


def activation_layout(activation_format: str) -> str:
    """The format that activations have once they are quantised."""
    return ACTIVATION_FORMATS.get(activation_format, TILED)


def _scale_of(amax: Tensor, largest: float) -> Tensor:
    # by a tensor: on a GPU a quotient by a number is a product, with another last bit
    return amax.clamp_min(MIN_AMAX) / torch.full_like(amax, largest)


def _dense(x: Tensor) -> Tensor:
    """A copy in rows, also where `x` is empty: what an op returns has the strides of its fake."""
    return x.clone(memory_format=torch.contiguous_format)


def _in_blocks(x: Tensor) -> Tensor:
    """[T, k] as [T, ceil(k / 128), 128], zeros behind the last column."""
    missing = -x.shape[1] % BLOCK
    return torch.nn.functional.pad(x, (0, missing)).unflatten(1, (-1, BLOCK))


def _spread(scale: Tensor, dim: int, size: int, block: int) -> Tensor:
    """Each entry of `dim` for `block` places, `size` in all."""
    return scale.index_select(dim, torch.arange(size, device=scale.device) // block)


def dequantize(
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    global_scale: Tensor | None,
    format: str,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """The values [n, size] of a quantised matrix; layouts are those of the module's table.

    Args:
        q: stored values.
        scale: as the format says.
        zero: int4_group only: uint8, the code that means 0, or floats, what code 8 means; None is
            the code 8.
        global_scale: nvfp4 and its tiles only: fp32 [n, 1].
        format: one of `WEIGHT_FORMATS`.
        size: columns of the matrix.
        dtype: of the result.
    """
    if format in PACKED_FORMATS:
        codes = torch.stack((q & 15, q >> 4), -1).flatten(1)  # [n, stored columns]
        if format == TILED:
            scale = untile_scales(scale, q.shape[0], codes.shape[1] // NVFP4_GROUP)
        groups = codes.unflatten(1, (scale.shape[1], -1))
        scales = _group_scales(scale, format).unsqueeze(-1)
        if format == "int4_group":
            values = _int4_values(groups, scales, zero)
        else:
            values = _e2m1(groups) * scales
        values = values.flatten(1)[:, :size]
        if global_scale is not None:
            values = values * global_scale
    else:
        scales = scale
        if format == "fp8_block":
            scales = _spread(scales, 0, q.shape[0], BLOCK)
        if format in ("fp8_block", "fp8_token_block"):
            scales = _spread(scales, 1, size, BLOCK)
        values = q[:, :size].float() * scales
    return _dense(values.to(dtype))


def _int4_values(codes: Tensor, scales: Tensor, zero: Tensor | None) -> Tensor:
    """Codes [n, groups, g] with scales [n, groups, 1] fp32, and zeros [n, groups]."""
    if zero is not None and zero.is_floating_point():
        return (codes.float() - 8.0) * scales + zero.float().unsqueeze(-1)
    zeros = 8.0 if zero is None else zero.float().unsqueeze(-1)
    return (codes.float() - zeros) * scales


def _group_scales(scale: Tensor, format: str) -> Tensor:
    if format != "mxfp4":
        return scale.float()
    # The exponent's bits are the byte; byte 0 is 2^-127, half of the smallest normal number.
    powers = (scale.int().clamp_min(1) << 23).view(torch.float32)
    return torch.where(scale == 0, powers * 0.5, powers)


def _e2m1(codes: Tensor) -> Tensor:
    """Values of 4-bit codes: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = ((codes >> 1) & 3).int(), (codes & 1).float()
    powers = (1 << exponent).float() * 0.5
    magnitude = torch.where(exponent == 0, mantissa * 0.5, powers * (1.0 + 0.5 * mantissa))
    return torch.where(codes >= 8, -magnitude, magnitude)


def rounded(
    x: Tensor, activation_format: str, static_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x` [T, k], quantised and dequantised."""
    q, scale, *more = quantize(x, activation_format, static_scale)
    token_scale = more[0] if more else None
    layout = activation_layout(activation_format)
    return dequantize(q, scale, None, token_scale, layout, x.shape[1], dtype)


def quantized_linear(
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
    """`reference.fused_linear` over a quantised weight, and with quantised activations.

    `x` behind the norm is quantised and dequantised as `activation_format` says, the product is
    that with the dequantised weight; then gate and residual.

    Args:
        x: [T, k].
        weight: [n, ...] stored as `format` says; gated: the n / 2 rows of the gate, then the rest.
        scale: of the weight.
        zero: of the weight, see `dequantize`.
        global_scale: of the weight, see `dequantize`.
        input_scale: fp32 [1], the static scale of "fp8_tensor" (None computes it) and
            "nvfp4_tensor".
        bias: [n] or None.
        format: of the weight.
        activation_format: "" leaves activations as they are.
        norm_weight: [k] or None.
        eps: of the norm; read only with a norm weight.
        residual: [T, n_out] or None.
        is_gated: whether `weight` holds a gate.
        impl: which kernel computes it; not a part of the mathematics.

    Returns:
        [T, n_out] in the dtype of `x`.
    """
    size, dtype = x.shape[1], x.dtype
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps).to(dtype)
    if activation_format:
        x = rounded(x, activation_format, input_scale, dtype)
    y = linear(x, dequantize(weight, scale, zero, global_scale, format, size, dtype), bias)
    if is_gated:
        y = silu_and_mul(y)
    return y if residual is None else y + residual


def scaled_linear(
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
    """The product of quantised activations with a quantised weight.

    Args:
        q: [T, k] e4m3 or int8.
        q_scale: fp32, as `activation_format` says.
        weight: [n, k] of the dtype of `q`, stored as `format` says.
        weight_scale: of the weight.
        bias: [n] of `dtype`, or None.
        format: an 8-bit one.
        activation_format: how `q` was made.
        dtype: of the result.
        impl: which kernel computes it; not a part of the mathematics.

    Returns:
        [T, n].
    """
    size, layout = q.shape[1], ACTIVATION_FORMATS[activation_format]
    x = dequantize(q, q_scale, None, None, layout, size, dtype)
    return linear(x, dequantize(weight, weight_scale, None, None, format, size, dtype), bias)


def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, activation_format: str, static_scale: Tensor | None
) -> tuple[Tensor, ...]:
    """`quantize(rms_norm(x, weight, eps), activation_format, static_scale)`, x [T, k]."""
    return quantize(rms_norm(x, weight, eps), activation_format, static_scale)


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    activation_format: str,
    static_scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """`r = residual + x`; returns `rms_norm_quant(r, ...)`'s q and scale, and r [T, k]."""
    total = residual + x
    return *rms_norm_quant(total, weight, eps, activation_format, static_scale), total


def gated_activation_quant(
    x: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    activation_format: str,
    static_scale: Tensor | None,
) -> tuple[Tensor, ...]:
    """`quantize(gated_activation(x, ...), activation_format, static_scale)`, x [T, 2k]."""
    activated = gated_activation(x, activation, alpha, limit)
    return quantize(activated, activation_format, static_scale)


def paged_attention_quant(*arguments: Any, **options: Any) -> Tensor:
    """`reference.paged_attention` as e4m3 [T, H * D], quantised with a static scale.

    Arguments are those of `paged_attention`, with the scale, fp32 [1], behind the factor of scores.
    """
    attended, static_scale = split_attention_quant(arguments)
    out = paged_attention(*attended, **options)
    return quantize_fp8(out.flatten(1), "tensor", static_scale)[0]


def split_attention_quant(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of `paged_attention_quant`: those of `paged_attention`, and the scale."""
    return (*arguments[:_SCALE_PLACE], *arguments[_SCALE_PLACE + 1 :]), arguments[_SCALE_PLACE]
