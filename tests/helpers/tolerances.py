"""Tolerances of comparisons, with the reason of each, and one function that applies them."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the largest expected value: sums in another order, times some tens of terms.
_BY_DTYPE = {
    torch.float32: 2e-6,
    # One unit in the last place of the output is 2^-8 (bf16) or 2^-11 (fp16) of the value.
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    # 3 bits of mantissa.
    torch.float8_e4m3fn: 2**-4,
}


def assert_close(name: str, got: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    """Compares shape, dtype and values; the tolerance follows the dtype of `got`.

    Args:
        name: of the tensor, for the message.
        got: what the code under test made.
        expected: the oracle's, of any float dtype.
        factor: widens the tolerance; say why where you use it.
    """
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got, expected), f"{name} differs"
        return
    if got.numel() == 0:
        return
    is_nan = got.float().isnan()
    assert not is_nan.any(), f"{name} holds NaN: {int(is_nan.sum())} values unwritten"
    scale = expected.double().abs().max().clamp_min(1e-30)
    worst = (got.double() - expected.double()).abs().max() / scale
    limit = _BY_DTYPE[got.dtype] * factor
    assert worst <= limit, f"{name}: off by {worst:.2e} of the largest value, allowed {limit:.2e}"
