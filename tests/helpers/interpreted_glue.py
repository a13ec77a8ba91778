"""The glue kernels in Triton's CPU interpreter against their references.

Run as a program of its own with TRITON_INTERPRET=1 (`run_interpreted` of `interpreted.py`): Triton
reads the variable when a kernel is decorated. A function a kernel, called by name.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from compiled_engine.custom_ops import activation_triton, norm_triton, reference, rope_kv_triton
from compiled_engine.custom_ops.rope_kv_triton import Cache, Config, Norm
from tests.helpers.tolerances import assert_close

BF16, FP32, FP16, FP8 = torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn


def check_norm() -> None:
    """Dtypes, odd sizes, several rows a program, a strided [T, H, D] view, mixed dtypes."""
    for shape, dtype, weight_dtype in (
        ((1, 64), BF16, BF16),
        ((5, 33), FP32, FP32),
        ((3, 2, 96), FP16, FP16),
        ((3, 40), FP16, FP32),
    ):
        x, residual = torch.randn(2, *shape).to(dtype)
        weight = torch.randn(shape[-1]).to(weight_dtype)
        for rows in (1, 4):
            config = norm_triton.Config(rows, 1)
            got, _ = norm_triton.launch(x, weight, 1e-5, None, config=config)
            assert_same("norm", got, reference.rms_norm(x, weight, 1e-5))
            both = norm_triton.launch(x, weight, 1e-5, residual, config=config)
            expected = reference.add_rms_norm(x, residual, weight, 1e-5)
            assert_same("add norm", both[0], expected[0])
            assert_same("total", both[1], expected[1])
    heads = torch.randn(3, 6, 16)[:, 1:4]
    weight = torch.randn(16)
    assert norm_triton.unsupported_reason(heads, weight) is None
    got = norm_triton.rms_norm(heads, weight, 1e-5)
    assert_same("strided norm", got, reference.rms_norm(heads, weight, 1e-5))
    swapped = torch.randn(3, 4, 16).transpose(0, 1)
    got = norm_triton.rms_norm(swapped, weight, 1e-5)
    assert_same("swapped norm", got, reference.rms_norm(swapped, weight, 1e-5))
    assert norm_triton.unsupported_reason(heads.transpose(1, 2), weight[:3]) is not None
    assert norm_triton.rms_norm(torch.zeros(0, 16), weight, 1e-5).shape == (0, 16)


def check_activation() -> None:
    """Odd sizes, three dims, a strided view, extreme gates."""
    for shape, dtype in (((1, 64), BF16), ((3, 2 * 33), FP32), ((2, 3, 32), FP16)):
        x = torch.randn(shape).to(dtype) * 4
        for name in ("silu", "gelu", "gelu_tanh", "swiglu_clamped"):
            kind = activation_triton.Activation(name, 1.702, 2.0)
            got = activation_triton.launch(x, kind, config=activation_triton.Config(16, 1))
            assert_same(name, got, reference.gated_activation(x, *kind))
    x = torch.randn(4, 96)[:, :64]
    assert_same("strided", activation_triton.silu_and_mul(x), reference.silu_and_mul(x))
    x = torch.tensor([[-1e4, 1e4, -0.0, 1.0, 1.0, 2.0, 3.0, 4.0]])
    assert_same("extreme", activation_triton.silu_and_mul(x), reference.silu_and_mul(x))
    assert activation_triton.silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)


def views(num_tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as views of one qkv tensor."""
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], dim).to(dtype)
    return list(qkv.split([heads[0], heads[1], heads[1]], dim=1))


def check_rope_kv() -> None:
    """All five ops: strided views, odd head counts and dims, parts of heads, padding, FP8."""
    for dim, turned, heads, page_size, dtype, cache_dtype, per_program, interleaved in (
        (16, 16, (4, 2), 4, BF16, BF16, 1, False),
        (80, 80, (5, 3), 16, FP16, FP16, 2, False),
        (6, 6, (3, 1), 3, FP32, FP32, 4, False),
        (16, 16, (4, 2), 8, BF16, FP8, 4, False),
        (80, 20, (5, 3), 16, FP16, FP16, 2, False),
        (24, 10, (3, 1), 3, FP32, FP32, 4, False),
        (80, 80, (5, 3), 16, FP16, FP16, 2, True),
        (24, 10, (3, 1), 3, FP32, FP32, 4, True),
        (16, 8, (4, 2), 8, FP16, FP16, 4, True),
    ):
        num_tokens = 3
        q, k, v = views(num_tokens, heads, dim, dtype)
        v.mul_(400.0)
        angles = torch.randn(num_tokens, turned // 2)
        cos, sin = angles.cos(), angles.sin()
        gains = torch.randn(2, dim).to(dtype)
        shape = (4, page_size, heads[1], dim)
        caches = torch.zeros(2, *shape).to(cache_dtype)
        slots = torch.tensor([page_size + 1, -1, 3 * page_size])
        config = Config(per_program, 1)
        for norm in (None, Norm(gains[0], gains[1], 1e-6)):
            mine, theirs = caches.clone(), caches.clone()
            tail = (theirs[0], theirs[1], slots)
            cache = Cache(mine[0], mine[1], slots)
            assert rope_kv_triton.unsupported_reason((q, k, v), (cos, sin), norm, cache) is None
            options = {"config": config, "is_interleaved": interleaved}
            got = rope_kv_triton.launch((q, k, v), (cos, sin), norm, cache, **options)[0]
            rotated = rope_kv_triton.launch((q, k, k), (cos, sin), norm, **options)
            if norm is None:
                expected = reference.rope_kv_write(q, k, v, cos, sin, *tail, interleaved)
                pair = reference.rope(q, k, cos, sin, interleaved)
            else:
                args = (*gains, cos, sin, 1e-6)
                expected = reference.qk_norm_rope_kv_write(q, k, v, *args, *tail, interleaved)
                pair = reference.qk_norm_rope(q, k, *args, interleaved)
            assert_same("q", got, expected)
            assert got.is_contiguous()
            assert_caches(mine, theirs)
            for a, b in zip(rotated, pair, strict=True):
                assert_same("rotated", a, b)
        mine, theirs = caches.clone(), caches.clone()
        rope_kv_triton.kv_write(k, v, mine[0], mine[1], slots)
        reference.kv_write(k, v, theirs[0], theirs[1], slots)
        assert_caches(mine, theirs)
    assert rope_kv_triton.unsupported_reason((q, k.double()), (cos, sin)) is not None


def assert_caches(mine: Tensor, theirs: Tensor) -> None:
    """Pages with an owner are equal; page 0 stays as it was where padding is not written."""
    assert not mine[:, 0].float().any()
    factor = 32.0 if mine.dtype == FP8 else 8.0
    got, expected = mine[:, 1:].float(), theirs[:, 1:].float()
    assert expected.any()
    assert_close("cache", got.to(BF16), expected, factor=factor)


def assert_same(name: str, got: Tensor, expected: Tensor) -> None:
    """Dtype and values. The interpreter cuts bf16 off where a device rounds, at every step."""
    assert got.dtype == expected.dtype
    assert_close(name, got, expected, factor=8.0 if got.dtype == BF16 else 1.0)


CHECKS = {"norm": check_norm, "activation": check_activation, "rope_kv": check_rope_kv}


if __name__ == "__main__":
    # The interpreter computes with NumPy, which reports that exp of a large number is infinite.
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.manual_seed(0)
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
