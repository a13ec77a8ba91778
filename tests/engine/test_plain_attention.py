"""A model that no attention kernel serves: said aloud, and refused where it cannot fit."""

from __future__ import annotations

import logging

import pytest
import torch

from compiled_engine.custom_ops.registry import Target
from compiled_engine.errors import ConfigError
from compiled_engine.kv_cache import CacheGeometry
from compiled_engine.plain_attention import check_attention

H200 = Target("cuda", 90)


def check(head_dim: int, *, dtype: torch.dtype = torch.bfloat16, num_tokens: int = 64) -> None:
    geometry = CacheGeometry(
        num_layers=2, num_kv_heads=2, head_dim=head_dim, page_size=16, dtype=dtype
    )
    sizes = {"num_heads": 4, "num_tokens": num_tokens, "context": 512, "num_rows": 8}
    check_attention(H200, geometry, dtype, **sizes, free_bytes=1 << 30)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_a_kernel_says_nothing(caplog, head_dim, dtype):
    with caplog.at_level(logging.WARNING):
        check(head_dim, dtype=dtype, num_tokens=8192)
    assert not caplog.records


def test_plain_attention_is_said_with_its_reason(caplog):
    with caplog.at_level(logging.WARNING):
        check(48)
    (record,) = caplog.records
    assert "not 48" in record.getMessage()
    assert "--max-model-len" in record.getMessage()


def test_plain_attention_that_cannot_fit_is_refused():
    with pytest.raises(ConfigError, match=r"needs 6\.0 GiB for steps of 16384 tokens") as caught:
        check(48, num_tokens=16384)
    assert caught.value.param == "chunked_prefill_size"
    assert "lower --chunked-prefill-size" in str(caught.value)
