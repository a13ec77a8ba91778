"""The library's product of 4-bit floats, spelled out, for machines that have none."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_engine.custom_ops.reference_quant import dequantize


def plain_product(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `quant_fp4.fp4_product`, summed in float64."""
    size = 2 * q.shape[1]

    def values(q: Tensor, scale: Tensor) -> Tensor:
        return dequantize(q, scale, None, None, "nvfp4_tiles", size, torch.float32).double()

    return (values(q, scale) @ values(weight, weight_scale).T).to(dtype)
