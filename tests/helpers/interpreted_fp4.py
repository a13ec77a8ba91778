"""The Triton kernels of 4-bit activations in Triton's CPU interpreter against their references.

Run as a program of its own with TRITON_INTERPRET=1 (`run_interpreted` of `interpreted.py`).
"""

from __future__ import annotations

import sys
import warnings

import torch

from compiled_engine.custom_ops import quant_fp4, quant_fp4_triton, reference, reference_quant
from compiled_engine.custom_ops.norm_triton import Config
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.reference_fp4 import untile_scales
from tests.helpers.fp4_product import plain_product
from tests.helpers.interpreted import readable_loop_bounds
from tests.helpers.tolerances import assert_close

FP32, FP16 = torch.float32, torch.float16
EPS = 1e-6


def check_quantize() -> None:
    """With and without a static scale, odd sizes, more rows than a tile: bit for bit."""
    for num_rows, size, dtype, rows in (
        (1, 64, FP32, 1),
        (5, 33, FP32, 4),
        (130, 300, FP16, 2),
        (2, 257, FP16, 1),
    ):
        x = (3 * torch.randn(num_rows, size + 3)).to(dtype)[:, :size]
        for static in (None, torch.tensor([0.004])):
            got = quant_fp4_triton.quantize(x, None, 0.0, static, config=Config(rows, 1))
            for mine, right in zip(got, reference_quant.quantize_nvfp4(x, static), strict=True):
                assert mine.dtype == right.dtype
                assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8)), (size, static)
    zeros = quant_fp4_triton.quantize(torch.zeros(2, 40), None, 0.0, None)
    assert not (zeros[0] & 0x77).any()
    empty = quant_fp4_triton.quantize(torch.zeros(0, 40), None, 0.0, None)
    assert [t.shape for t in empty] == [(0, 32), (0, 4), (0, 1)]


def check_norm() -> None:
    """Behind a norm, whose sum may be added up in another order: nearly all bits."""
    x, weight = torch.randn(5, 300), torch.randn(300)
    got = quant_fp4_triton.quantize(x, weight, EPS, None, config=Config(2, 1))
    right = reference_quant.quantize_nvfp4(reference.rms_norm(x, weight, EPS), None)
    assert (got[0] != right[0]).float().mean() <= 0.01
    assert (got[1].view(torch.uint8) != right[1].view(torch.uint8)).float().mean() <= 0.01
    assert_close("token scale", got[2], right[2])


def check_not_a_number() -> None:
    """One value that is none spoils its own row and no other."""
    x = torch.randn(3, 64)
    x[1, 20] = float("nan")
    q, scale, token_scale = quant_fp4_triton.quantize(x, None, 0.0, None)
    values = reference_quant.dequantize(q, scale, None, token_scale, "nvfp4_tiles", 64, FP32)
    assert values.isnan().any(1).tolist() == [False, True, False]
    assert untile_scales(scale, 3, 4).float().isnan().any(1).tolist() == [False, True, False]


def check_layer() -> None:
    """Norm, quantiser, product by a plain one, scales and bias: the whole layer."""
    quant_fp4.fp4_product = plain_product  # type: ignore[assignment]
    for num_tokens, rows, size, static, dtype in (
        (1, 48, 64, None, FP32),
        (17, 144, 272, torch.tensor([0.004]), FP32),
        (3, 16, 200, None, FP16),
    ):
        packed = quantize_weight((torch.randn(rows, size) * 0.1).to(dtype), "nvfp4_tiles")
        activation_format = "nvfp4_token" if static is None else "nvfp4_tensor"
        operands = QuantOperands(
            torch.randn(num_tokens, size).to(dtype), packed.weight, packed.scale, None,
            packed.global_scale, static, torch.randn(rows).to(dtype), "nvfp4_tiles",
            activation_format, None, 0.0, None, False,
        )  # fmt: skip
        with readable_loop_bounds():
            got = quant_fp4.fp4_linear(operands)
        right = reference_quant.quantized_linear(*operands)
        assert_close(f"{rows} x {size}", got, right, factor=16)


CHECKS = {
    "quantize": check_quantize,
    "norm": check_norm,
    "nan": check_not_a_number,
    "layer": check_layer,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.manual_seed(0)
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
