"""Linears over rows of one matrix become one product; rows with gaps or other inputs do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.helpers.pass_harness import Harness, aten, calls_of, placeholders

NAME = "merge_linears"
# The products stay ATen's.
OFF = ("use_linear_op",)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 8), torch.randn(12, 8), torch.randn(12)


def three(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    cuts = ((0, 6), (6, 9), (9, 12))
    return tuple(linear(x, weight[a:b]) for a, b in cuts)


def three_with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    # In another order than the rows'.
    cuts = ((6, 9), (0, 6), (9, 12))
    return tuple(linear(x, weight[a:b], bias[a:b]) for a, b in cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("function", [three, three_with_bias])
def test_parts_of_one_matrix(function: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype):
    given = tuple(tensor.to(dtype) for tensor in tensors())
    found = Harness(disabled=OFF).run(function, *given)
    assert found.matches(NAME) == 1
    has_bias = function is three_with_bias
    (product,) = calls_of(found.after, aten.addmm.default if has_bias else aten.mm.default)
    inputs = placeholders(found.after)
    *bias, x, transposed = product.args
    shapes = [tuple(n.meta["val"].shape) for n in (x, transposed.args[0], *bias)]
    assert shapes == [(5, 8), (12, 8)] + [(12,)] * has_bias
    assert {x, transposed.args[0], *bias} <= set(inputs)
    cuts = [node.args[1:] for node in calls_of(found.after, aten.slice.Tensor)]
    assert sorted(cuts) == [(1, 0, 6), (1, 6, 9), (1, 9, 12)]
    torch.testing.assert_close(found.outputs, function(*given))


def test_two_groups_of_one_matrix_are_two_products():
    def both(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return *three(x, weight, bias), *three(x.sin(), weight, bias)

    found = Harness(disabled=OFF).run(both, *tensors())
    assert found.matches(NAME) == 2
    assert len(calls_of(found.after, aten.mm.default)) == 2
    torch.testing.assert_close(found.outputs, both(*tensors()))


def gap(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:6]), linear(x, weight[7:])


def overlap(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:7]), linear(x, weight[6:])


def incomplete(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:4]), linear(x, weight[4:8])


def steps(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[::2]), linear(x, weight[1::2])


def columns(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x[:, :4], weight[:, :4]), linear(x[:, 4:], weight[:, 4:])


def two_inputs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:6]), linear(x.sin(), weight[6:])


def one_bias(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:6], bias[:6]), linear(x, weight[6:])


def other_bias(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return linear(x, weight[:6], bias[6:]), linear(x, weight[6:], bias[:6])


def whole(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (linear(x, weight, bias),)


@pytest.mark.parametrize(
    "function",
    [gap, overlap, incomplete, steps, columns, two_inputs, one_bias, other_bias, whole],
)
def test_near_misses_do_not_match(function: Callable[..., tuple[Tensor, ...]]):
    found = Harness(disabled=OFF).run(function, *tensors())
    assert found.matches(NAME) == 0
    torch.testing.assert_close(found.outputs, function(*tensors()))


def test_switched_off():
    found = Harness(disabled=(*OFF, NAME)).run(three, *tensors())
    assert len(calls_of(found.after, aten.mm.default)) == 3
