"""Gated activations over two halves become ops; other halves and other functions do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.pass_harness import Harness, aten, calls_of, ce, op_counts, placeholders

NAME = "lift_gated_activation"
KEPT = frozenset({"silu_and_mul", "gelu_and_mul", "swiglu_clamped"})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def silu(gate: Tensor) -> Tensor:
    return F.silu(gate)


def swish(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate)


def gelu(gate: Tensor) -> Tensor:
    return F.gelu(gate)


def gelu_tanh(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def by_chunks(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * act(gate)


def by_slices(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    size = x.shape[-1] // 2
    return act(x[..., :size]) * x[..., size:]


OPS = {
    silu: (ce.silu_and_mul.default, ()),
    gelu: (ce.gelu_and_mul.default, ("none",)),
    gelu_tanh: (ce.gelu_and_mul.default, ("tanh",)),
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("halves", [by_chunks, by_slices])
@pytest.mark.parametrize("act", OPS)
def test_spellings(act, halves, dtype: torch.dtype):
    x = torch.randn(5, 26).to(dtype)

    def function(x: Tensor) -> Tensor:
        return halves(x.sin(), act)

    found = Harness(kept_ops=KEPT).run(function, x)
    assert found.matches(NAME) == 1
    op, options = OPS[act]
    (node,) = calls_of(found.after, op)
    (source,) = calls_of(found.after, aten.sin.default)
    assert node.args == (source, *options)
    assert not calls_of(found.after, aten.exp.default)
    assert not calls_of(found.after, aten.tanh.default)
    torch.testing.assert_close(found.outputs, function(x))


def test_swish_in_fp32_and_three_dims():
    x = torch.randn(2, 3, 8)

    def function(x: Tensor) -> Tensor:
        return by_chunks(x, swish)

    found = Harness(kept_ops=KEPT).run(function, x)
    assert op_counts(found.after) == {"silu_and_mul": 1}
    (node,) = calls_of(found.after, ce.silu_and_mul.default)
    assert node.args == tuple(placeholders(found.after))
    torch.testing.assert_close(found.outputs, function(x))


def clamped(x: Tensor, limit: float = 7.0, low: float = -7.0) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=low, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def test_clamped_swiglu():
    x = torch.randn(5, 12) * 6
    found = Harness(kept_ops=KEPT).run(clamped, x)
    assert found.matches(NAME) == 1
    (node,) = calls_of(found.after, ce.swiglu_clamped.default)
    assert node.args == (*placeholders(found.after), 1.702, 7.0)
    torch.testing.assert_close(found.outputs, clamped(x))


def same_half(x: Tensor) -> Tensor:
    gate, _ = x.chunk(2, dim=-1)
    return F.silu(gate) * gate


def up_first(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def thirds(x: Tensor) -> Tensor:
    gate, up, _ = x.chunk(3, dim=-1)
    return F.silu(gate) * up


def uneven(x: Tensor) -> Tensor:
    return F.silu(x[..., :5]) * x[..., 5:10]


def interleaved(x: Tensor) -> Tensor:
    return F.silu(x[..., ::2]) * x[..., 1::2]


def rows(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=0)
    return F.silu(gate) * up


def two_sources(x: Tensor) -> Tensor:
    return F.silu(x[..., :6]) * x.sin()[..., 6:]


def another_function(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.relu(gate).square() * up


def shifted(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate / (1.5 + torch.exp(-gate)) * up


def quick_gelu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(1.702 * gate) * up


def other_tanh(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.tanh(0.8 * (gate + 0.044715 * gate.pow(3)))) * up


def lopsided(x: Tensor) -> Tensor:
    return clamped(x, 7.0, -6.0)


def mixed(x: Tensor) -> Tensor:
    gate, up = x.bfloat16().chunk(2, dim=-1)
    return F.silu(gate.float()) * up.float()


@pytest.mark.parametrize(
    "function",
    [
        same_half, up_first, thirds, uneven, interleaved, rows, two_sources, another_function,
        shifted, quick_gelu, other_tanh, lopsided, mixed,
    ],
)  # fmt: skip
def test_near_misses_do_not_match(function: Callable[[Tensor], Tensor]):
    x = torch.randn(6, 12)
    found = Harness(kept_ops=KEPT).run(function, x)
    assert found.matches(NAME) == 0
    assert not op_counts(found.after)
    torch.testing.assert_close(found.outputs, function(x))


def test_switched_off():
    x = torch.randn(6, 12)

    def function(x: Tensor) -> Tensor:
        return by_chunks(x, silu)

    found = Harness(disabled=(NAME,), kept_ops=KEPT).run(function, x)
    assert not op_counts(found.after)
    torch.testing.assert_close(found.outputs, function(x))
