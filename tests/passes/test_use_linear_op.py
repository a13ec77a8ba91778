"""Matrix products with a weight: which become `ce.linear`, with which arguments, and which not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compiled_engine.passes.use_linear_op import NAME
from tests.helpers.pass_harness import Harness, calls_of, ce, op_counts, placeholders


def run(function, *inputs: Tensor, disabled: tuple[str, ...] = ()):
    """Runs with the pass, and checks the numbers against the plain run."""
    found = Harness(disabled=disabled).run(function, *inputs)
    expected = function(*inputs)
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.outputs, expected, rtol=tolerance, atol=tolerance)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_without_bias(num_rows, dtype):
    x, weight = torch.randn(num_rows, 24).to(dtype), (torch.randn(10, 24) / 5).to(dtype)
    found = run(nn.functional.linear, x, weight)
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"linear": 1}
    (product,) = calls_of(found.after, ce.linear.default)
    first, second = placeholders(found.after)
    assert product.args == (first, second, None)


def test_with_bias():
    inputs = torch.randn(3, 24), torch.randn(10, 24), torch.randn(10)
    found = run(nn.functional.linear, *inputs)
    assert found.matches(NAME) == 1
    (product,) = calls_of(found.after, ce.linear.default)
    values = [tuple(node.meta["val"].shape) for node in product.args]
    assert values == [(3, 24), (10, 24), (10,)]


def test_switched_off():
    found = run(nn.functional.linear, torch.randn(3, 24), torch.randn(10, 24), disabled=(NAME,))
    assert not op_counts(found.after)


def plain_product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.reshape(24, 10)


def scaled_addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t(), beta=2.0)


def added_matrix(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias.expand(3, 10).contiguous(), x, weight.t())


def one_value_as_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias[:1], x, weight.t())


def double_precision(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x.double(), weight.double(), bias.double()).float()


@pytest.mark.parametrize(
    "function", [plain_product, scaled_addmm, added_matrix, one_value_as_bias, double_precision]
)
def test_near_misses_do_not_match(function):
    found = run(function, torch.randn(3, 24), torch.randn(10, 24), torch.randn(10))
    assert found.matches(NAME) == 0
