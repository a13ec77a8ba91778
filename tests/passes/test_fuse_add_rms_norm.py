"""Residual add + RMS norm: matches, roles of the arguments, numbers, and what must not match."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import rms_norm
from compiled_engine.passes.fuse_add_rms_norm import NAME
from tests.helpers.pass_harness import Harness, aten, calls_of, ce, item, op_counts, placeholders

KEPT = frozenset({"add_rms_norm"})
EPS = 1e-5


def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm(total, weight, EPS), total


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(*shape).to(dtype),
        torch.randn(*shape).to(dtype),
        torch.randn(shape[-1]).to(dtype),
    )


def assert_same(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 32), (1, 32), (2, 3, 33)])
def test_matches_and_keeps_the_roles(dtype, shape):
    x, residual, weight = tensors(*shape, dtype=dtype)
    found = Harness(kept_ops=KEPT).run(block, x, residual, weight)
    assert found.matches(NAME) == 1
    assert op_counts(found.before) == {"rms_norm": 1}
    assert op_counts(found.after) == {"add_rms_norm": 1}
    (fused,) = calls_of(found.after, ce.add_rms_norm.default)
    # The graph's inputs come in order of first use: residual, x, weight.
    first, second, third = placeholders(found.after)
    assert fused.args == (second, first, third, EPS)
    assert not calls_of(found.after, aten.add.Tensor)
    (output,) = [n for n in found.after.nodes if n.op == "output"]
    assert [item(value) for value in output.args[0]] == [(fused, 0), (fused, 1)]
    assert_same(found.outputs, block(x, residual, weight))


def test_weights_in_another_dtype_than_the_sum():
    x, residual, _ = tensors(4, 16, dtype=torch.bfloat16)
    weight = torch.randn(16)
    found = Harness(kept_ops=KEPT).run(block, x, residual, weight)
    assert found.matches(NAME) == 1
    assert found.outputs[0].dtype == torch.float32
    assert found.outputs[1].dtype == torch.bfloat16
    assert_same(found.outputs, block(x, residual, weight))


def test_expanded_where_no_kernel_takes_it():
    inputs = tensors(7, 32)
    found = Harness().run(block, *inputs)
    assert found.matches(NAME) == 1
    assert found.counters.num_expansions == 1
    assert not op_counts(found.after)
    assert len(calls_of(found.after, aten.rsqrt.default)) == 1
    assert_same(found.outputs, block(*inputs))


def test_dynamic_sizes():
    inputs = tensors(7, 32)
    found = Harness(kept_ops=KEPT).run(block, *inputs, dynamic=True)
    assert found.matches(NAME) == 1
    assert_same(found.outputs, block(*inputs))


def test_a_chain_of_blocks_matches_every_time():
    def chain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x, residual = block(x, residual, weight)
            x = x.sin()
        return x, residual

    inputs = tensors(8, 8)
    found = Harness(kept_ops=KEPT).run(chain, *inputs)
    assert found.matches(NAME) == 3
    assert op_counts(found.after) == {"add_rms_norm": 3}
    assert not calls_of(found.after, aten.add.Tensor)
    assert_same(found.outputs, chain(*inputs))


def test_two_norms_of_one_sum_both_give_right_numbers():
    def both(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        return rms_norm(total, weight, EPS), rms_norm(total, weight, 1e-2), total

    inputs = tensors(5, 16)
    found = Harness(kept_ops=KEPT).run(both, *inputs)
    assert 1 <= found.matches(NAME) <= 2
    assert_same(found.outputs, both(*inputs))


def test_a_reader_of_the_sum_before_the_norm_keeps_the_add():
    def early(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = residual + x
        scaled = total * 2
        return scaled, rms_norm(total, weight, EPS), total - 1

    inputs = tensors(5, 16)
    found = Harness(kept_ops=KEPT).run(early, *inputs)
    assert_same(found.outputs, early(*inputs))
    found.after.lint()


def broadcast(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual + x[:1], weight, EPS)


def with_alpha(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(torch.add(residual, x, alpha=2), weight, EPS)


def promoted(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual + x.bfloat16(), weight, EPS)


def scalar(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual + 1.0, weight, EPS) + x


def product(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual * x, weight, EPS)


def subtraction(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(residual - x, weight, EPS)


def through_a_cast(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm((residual + x).bfloat16(), weight, EPS)


@pytest.mark.parametrize(
    "function", [broadcast, with_alpha, promoted, scalar, product, subtraction, through_a_cast]
)
def test_near_misses_do_not_match(function):
    inputs = tensors(5, 16)
    found = Harness(kept_ops=KEPT).run(function, *inputs)
    assert found.matches(NAME) == 0
    assert found.counters.num_expansions == 1
    assert_same(found.outputs, function(*inputs))


def test_switched_off():
    inputs = tensors(5, 16)
    found = Harness(disabled=(NAME,), kept_ops=KEPT).run(block, *inputs)
    assert NAME not in found.counters.num_matches
    assert len(calls_of(found.after, aten.add.Tensor)) == 2, "the residual's and the norm's eps"
    assert not op_counts(found.after)
    assert_same(found.outputs, block(*inputs))
