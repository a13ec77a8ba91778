"""`quantized_linear` of 4-bit weights and activations, by the library's product of such numbers.

    out[t, n] = sum_k q[t, k] s[t, k / 16] w[n, k] r[n, k / 16] * token_scale[t] * row_scale[n]

The library multiplies with the e4m3 scales of groups; it takes one fp32 factor for the whole
product, while fused matrices have one a part and tokens one each, so that an answer does not depend
on its company. So the sums come unscaled (in bf16, whose range holds them, or fp32 for fp16), and
a kernel multiplies by both scales and adds the bias.

Source: PyTorch's `torch.nn.functional.scaled_mm` with `ScalingType.BlockWise1x16`, which takes e2m1
two in a byte with the columns next to each other, and scales of both operands in tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.quant_scaled import ScaledOperands
from compiled_engine.custom_ops.registry import Traits

FP4_ARCH = 100  # that multiplies 4-bit floats


def fp4_product(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`q @ weight.T` [T, n] in `dtype`: e2m1 two in a byte, both with e4m3 scales in tiles."""
    from torch.nn.functional import ScalingType, SwizzleType

    recipe, order = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4
    return torch.nn.functional.scaled_mm(
        q.view(torch.float4_e2m1fn_x2),
        weight.view(torch.float4_e2m1fn_x2).T,
        scale,
        recipe,
        weight_scale,
        recipe,
        order,
        order,
        output_dtype=dtype,
    )


def fp4_linear(operands: QuantOperands) -> Tensor:
    """Norm and quantisation, product, scales and bias: a kernel each. Without gate and residual."""
    from compiled_engine.custom_ops import quant_fp4_triton
    from compiled_engine.custom_ops.quant_scaled_triton import scale_sums

    x, weight, global_scale = operands.x, operands.weight, operands.global_scale
    assert global_scale is not None, operands.format
    norm = operands.norm_weight, operands.eps
    q, scale, token_scale = quant_fp4_triton.quantize(x, *norm, operands.input_scale)
    sum_dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    sums = fp4_product(q, scale, weight, operands.scale, sum_dtype)
    formats = operands.format, operands.activation_format
    scaled = ScaledOperands(q, token_scale, weight, global_scale, operands.bias, *formats, x.dtype)
    return scale_sums(sums, scaled)


def fp4_rejects(traits: Traits) -> str | None:
    """What `fp4_linear` cannot take; traits: those of `quant_choice.quantized_linear_traits`."""
    rules = (
        (traits["is_fp4_pair"], "needs nvfp4 weights in tiles and nvfp4 activations"),
        (traits["num_tokens"] > 0, "needs a token"),
        (traits["rows"] % 16 == 0, f"needs a multiple of 16 outputs, not {traits['rows']}"),
        (traits["has_one_dtype"], "needs the same dtype for x, bias, norm and residual"),
        (traits["is_weight_contiguous"], "needs contiguous weights and scales"),
        (traits["is_last_dim_contiguous"], "needs a contiguous last dim of x and residual"),
        (traits["is_aligned"], "needs rows of x and weights at multiples of 16 bytes"),
        (traits["fits_a_program"], "has more columns than a program of the quantiser holds"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)
