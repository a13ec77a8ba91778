"""The Triton kernels of norm, activation, rotary and KV write: interpreted, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import note_plain_body
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tolerances import assert_close

pytest.importorskip("triton")


def test_interpreted_kernels_equal_the_references():
    run_interpreted("tests.helpers.interpreted_glue")


def test_plain_bodies_on_a_gpu_are_told_once_with_the_reason(caplog):
    from compiled_engine.custom_ops import norm_triton

    note_plain_body.cache_clear()
    x = torch.randn(3, 4)
    for weight in (torch.randn(8)[::2], torch.randn(4).double(), torch.randn(8)[::2]):
        got = norm_triton.rms_norm(x, weight, 1e-6)
        assert torch.equal(got, reference.rms_norm(x, weight, 1e-6))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all("rms_norm runs as plain PyTorch" in message for message in messages)
    assert "the weight is not contiguous" in messages[0]
    assert "a dtype other than" in messages[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_tokens", [1, 33, 700])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_fused_kv_write_on_views_of_one_tensor(num_tokens, dim, cache_dtype, interleaved):
    torch.set_default_device("cuda")
    try:
        qkv = torch.randn(num_tokens, 16 + 2 * 4, dim, dtype=torch.bfloat16)
        q, k, v = qkv.split([16, 4, 4], dim=1)
        angles = torch.randn(num_tokens, dim // 2)
        gains = torch.randn(2, dim, dtype=torch.bfloat16)
        slots = torch.randperm(16 * 50)[:num_tokens] + 16
        slots[num_tokens // 2] = -1
        caches = torch.zeros(4, 60, 16, 4, dim).to(cache_dtype)
        args = (q, k, v, *gains, angles.cos(), angles.sin(), 1e-6)
        tails = ((*pair, slots, interleaved) for pair in (caches[:2], caches[2:]))
        got = torch.ops.ce.qk_norm_rope_kv_write.default(*args, *next(tails))
        expected = reference.qk_norm_rope_kv_write(*args, *next(tails))
    finally:
        torch.set_default_device(None)  # "cpu" would leave a mode behind
    assert got.is_contiguous()
    assert_close("q", got, expected)
    # An 8-bit value may fall on the other side of a rounding by a last bit of bf16.
    mine, theirs = caches[:2, 1:].to(torch.bfloat16), caches[2:, 1:].float()
    assert_close("cache", mine, theirs, factor=16.0)
    assert not caches[:2, 0].float().any()
