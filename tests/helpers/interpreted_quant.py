"""The Triton kernels of quantisation in Triton's CPU interpreter against their references.

Run as a program of its own with TRITON_INTERPRET=1 (`run_interpreted` of `interpreted.py`). The
interpreter cuts bf16 off where a device rounds, so values are fp32 or fp16.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from compiled_engine.custom_ops import (
    quant_dequantize_triton,
    quant_scaled_triton,
    quant_triton,
    reference_quant,
)
from compiled_engine.custom_ops.norm_triton import Config
from compiled_engine.custom_ops.quant_choice import Before
from compiled_engine.custom_ops.quant_pack import quantize_weight
from compiled_engine.custom_ops.quant_scaled import ScaledOperands
from tests.helpers.interpreted import readable_loop_bounds
from tests.helpers.tolerances import assert_close

FP32, FP16 = torch.float32, torch.float16
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped")
FORMATS = ("fp8_token", "fp8_tensor", "fp8_block", "int8_token")


def check_quantize() -> None:
    """Every activation format behind nothing, norm, residual and norm, and gates; odd sizes."""
    for num_rows, size, dtype, rows in (
        (1, 64, FP32, 1),
        (5, 33, FP32, 4),
        (17, 300, FP16, 2),
        (2, 257, FP16, 1),
    ):
        x, residual = (torch.randn(num_rows, size + 3).to(dtype)[:, :size] for _ in range(2))
        weight = torch.randn(size).to(dtype)
        pair = torch.randn(num_rows, 2 * size).to(dtype)
        for name in FORMATS:
            static = torch.tensor([0.02]) if name == "fp8_tensor" else None
            config = Config(rows, 1)

            def run(x: Tensor, before: Before) -> tuple[Tensor, Tensor, Tensor]:
                return quant_triton.quantize(x, before, name, static, config=config)  # noqa: B023

            assert_quantized(name, run(x, Before()), reference_quant.quantize(x, name, static))
            normed = run(x, Before(weight, 1e-6))
            expected = reference_quant.rms_norm_quant(x, weight, 1e-6, name, static)
            assert_quantized(name, normed, expected)
            added = run(x, Before(weight, 1e-6, residual))
            *expected, total = reference_quant.add_rms_norm_quant(
                x, residual, weight, 1e-6, name, static
            )
            assert_quantized(name, added, expected)
            assert_close("total", added[2], total)
            for activation in ACTIVATIONS:
                given = run(pair, Before(activation=activation, alpha=1.702, limit=0.7))
                expected = reference_quant.gated_activation_quant(
                    pair, activation, 1.702, 0.7, name, static
                )
                assert_quantized(f"{name} {activation}", given, expected)
    zeros = quant_triton.quantize(torch.zeros(2, 40), Before(), "fp8_token", None)
    assert not zeros[0].float().any()
    assert (zeros[1] > 0).all()
    for name in FORMATS:
        empty = quant_triton.quantize_any(torch.zeros(0, 40), Before(), name, None)
        expected = reference_quant.quantize(torch.zeros(0, 40), name, None)
        assert [t.shape for t in empty[:2]] == [t.shape for t in expected]
    x = torch.randn(3, 40)
    got = quant_triton.quantize_any(x, Before(), "fp8_tensor", None)
    assert_quantized("dynamic", got, reference_quant.quantize(x, "fp8_tensor", None))
    got = quant_triton.quantize_any(x, Before(activation="gelu"), "fp8_tensor", None)
    expected = reference_quant.gated_activation_quant(x, "gelu", 0.0, 0.0, "fp8_tensor", None)
    assert_quantized("dynamic gate", got, expected)


def assert_quantized(name: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Scales to the last bits; values up to one step where sums were added up in another order."""
    q, scale = got[:2]
    assert q.dtype == expected[0].dtype, name
    assert q.shape == expected[0].shape, name
    assert_close(f"{name} scale", scale, expected[1], factor=2000.0)
    mine, theirs = q.float(), expected[0].float()
    step = torch.maximum(theirs.abs() * 0.125, torch.tensor(2.0**-8))
    if q.dtype == torch.int8:
        step = torch.ones_like(theirs)
    assert ((mine - theirs).abs() <= step * 1.01).all(), name
    share = float((mine != theirs).float().mean())
    assert share <= 0.02, f"{name}: {share:.3f} of the values differ"


def check_dequantize() -> None:
    """Every format, odd rows and columns."""
    for format in reference_quant.WEIGHT_FORMATS:
        for rows, size in ((5, 64), (131, 300)):
            packed = quantize_weight(torch.randn(rows, size), format)
            args = (*packed, format, size, FP32)
            got = quant_dequantize_triton.dequantize(*args)
            assert_close(format, got, reference_quant.dequantize(*args))
    packed = quantize_weight(torch.randn(3, 256), "int4_group")
    zero = torch.randint(0, 17, packed.scale.shape, dtype=torch.uint8)
    args = (packed.weight, packed.scale, zero, None, "int4_group", 256, FP16)
    got = quant_dequantize_triton.dequantize(*args)
    assert_close("zeros", got, reference_quant.dequantize(*args))
    offsets = torch.randn(packed.scale.shape)
    args = (packed.weight, packed.scale, offsets, None, "int4_group", 256, FP32)
    got = quant_dequantize_triton.dequantize(*args)
    assert_close("values of zeros", got, reference_quant.dequantize(*args))


def check_scaled() -> None:
    """Pairs of layouts, odd tokens, outputs and columns."""
    config = quant_scaled_triton.Config(16, 32, 2, 1, 1)
    for format, name in (
        ("fp8_tensor", "fp8_tensor"),
        ("fp8_channel", "fp8_token"),
        ("fp8_channel", "fp8_tensor"),
        ("fp8_tensor", "fp8_token"),
        ("fp8_block", "fp8_block"),
        ("fp8_token_block", "fp8_block"),
        ("int8_channel", "int8_token"),
    ):
        for num_tokens, rows, size in ((1, 40, 64), (17, 133, 272)):
            q, q_scale = reference_quant.quantize(torch.randn(num_tokens, size), name, None)
            packed = quantize_weight(torch.randn(rows, size), format)
            bias = torch.randn(rows) if num_tokens > 1 else None
            args = (q, q_scale, packed.weight, packed.scale, bias, format, name, FP32)
            with readable_loop_bounds():
                got = quant_scaled_triton.scaled_linear(ScaledOperands(*args), config=config)
            want = reference_quant.scaled_linear(*args)
            assert_close(f"{format} {name}", got, want, factor=8)
            if format == "int8_channel":
                sums = q.int() @ packed.weight.int().T
                with readable_loop_bounds():
                    got = quant_scaled_triton.scale_sums(sums, ScaledOperands(*args))
                assert_close("scaled sums", got, want, factor=8)


CHECKS = {"quantize": check_quantize, "dequantize": check_dequantize, "scaled": check_scaled}


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.manual_seed(0)
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
