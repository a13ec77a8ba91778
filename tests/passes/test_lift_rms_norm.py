"""RMS norms written out become ops, with the right arguments; what only looks like one stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.pass_harness import Harness, aten, calls_of, ce, op_counts, placeholders

NAME = "lift_rms_norm"
KEPT = frozenset({"rms_norm", "scaled_rms_norm"})
EPS = 3e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def normed(x: Tensor, eps: float = EPS) -> Tensor:
    full = x.to(torch.float32)
    return full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, weight: Tensor) -> Tensor:
    return weight * normed(x).to(x.dtype)


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    full = x.float()
    variance = (full * full).mean(-1, keepdim=True)
    return (torch.rsqrt(variance + EPS) * full).type_as(x) * weight


def olmo2(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * normed(x)).to(x.dtype)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    return (normed(x) * (1.0 + weight.float())).type_as(x)


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(5, 16), (1, 33), (3, 4, 8)], ids=str)
@pytest.mark.parametrize("spelling", [llama, swapped])
def test_plain_spellings(spelling: Callable[..., Tensor], dtype: torch.dtype, shape):
    given = inputs(dtype, *shape)
    found = Harness(kept_ops=KEPT).run(spelling, *given)
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"rms_norm": 1}
    (node,) = calls_of(found.after, ce.rms_norm.default)
    x, weight = placeholders(found.after)
    assert set(node.args) == {x, weight, EPS}
    assert node.args[0].meta["val"].dim() == len(shape)
    assert not calls_of(found.after, aten.rsqrt.default)
    torch.testing.assert_close(found.outputs, spelling(*given))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("spelling", "offset"), [(olmo2, 0.0), (gemma, 1.0)])
def test_weights_that_are_applied_before_rounding(spelling, offset: float, dtype: torch.dtype):
    given = inputs(dtype, 5, 16)
    found = Harness(kept_ops=KEPT).run(spelling, *given)
    assert found.matches(NAME) == 1
    if dtype == torch.float32 and not offset:  # nothing is rounded
        assert op_counts(found.after) == {"rms_norm": 1}
    else:
        assert op_counts(found.after) == {"scaled_rms_norm": 1}
        (node,) = calls_of(found.after, ce.scaled_rms_norm.default)
        x, weight = sorted(placeholders(found.after), key=lambda n: -n.meta["val"].dim())
        assert node.args == (x, weight, EPS, offset)
    torch.testing.assert_close(found.outputs, spelling(*given))


def test_any_eps_and_several_norms():
    def three(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight * normed(x, eps) for eps in (1e-6, 1e-5, 0.5))

    given = inputs(torch.float32, 4, 8)
    found = Harness(kept_ops=KEPT).run(three, *given)
    assert found.matches(NAME) == 3
    assert [n.args[2] for n in calls_of(found.after, ce.rms_norm.default)] == [1e-6, 1e-5, 0.5]
    torch.testing.assert_close(found.outputs, three(*given))


def test_a_value_in_between_that_is_read_again_is_still_there():
    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        middle = normed(x).to(x.dtype)
        return weight * middle, middle - 1

    given = inputs(torch.bfloat16, 4, 8)
    found = Harness(kept_ops=KEPT).run(both, *given)
    assert found.matches(NAME) == 1
    assert len(calls_of(found.after, aten.rsqrt.default)) == 1
    torch.testing.assert_close(found.outputs, both(*given))


def test_rows_that_are_strided():
    x, weight = inputs(torch.bfloat16, 6, 4, 8)
    given = (x[:, 1:3], weight)
    found = Harness(kept_ops=KEPT).run(llama, *given)
    assert found.matches(NAME) == 1
    torch.testing.assert_close(found.outputs, llama(*given))


def other_dtype(x: Tensor, weight: Tensor) -> Tensor:
    return weight.double() * normed(x)


def no_rounding(x: Tensor, weight: Tensor) -> Tensor:
    """The result stays in fp32: `rms_norm` would round it."""
    return weight.float() * normed(x.bfloat16())


def half_statistics(x: Tensor, weight: Tensor) -> Tensor:
    x = x.bfloat16()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return weight.bfloat16() * (x * scale)


def other_dim(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS))


def both_dims(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean((0, 1), keepdim=True) + EPS))


def centred(x: Tensor, weight: Tensor) -> Tensor:
    return weight * ((x - 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def cubes(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS))


def sums(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS))


def matrix_of_weights(x: Tensor, weight: Tensor) -> Tensor:
    return weight.expand(x.shape[0], -1).clone().sin() * normed(x)


def one_weight(x: Tensor, weight: Tensor) -> Tensor:
    return weight[:1] * normed(x)


def no_eps(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


def weighted_eps(x: Tensor, weight: Tensor) -> Tensor:
    eps = weight.square().mean()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize(
    "function",
    [
        other_dtype, no_rounding, half_statistics, other_dim, both_dims, centred, cubes, sums,
        matrix_of_weights, one_weight, no_eps, weighted_eps,
    ],
)  # fmt: skip
def test_near_misses_do_not_match(function: Callable[..., Tensor]):
    given = inputs(torch.float32, 5, 16)
    found = Harness(kept_ops=KEPT).run(function, *given)
    assert found.matches(NAME) == 0
    assert not op_counts(found.after)
    torch.testing.assert_close(found.outputs, function(*given))


def test_a_sum_that_is_rounded_before_it_is_applied_stays():
    def early(x: Tensor, weight: Tensor) -> Tensor:
        return (normed(x) * (1.0 + weight)).type_as(x)

    given = inputs(torch.bfloat16, 5, 16)
    found = Harness(kept_ops=KEPT).run(early, *given)
    assert found.matches(NAME) == 0
    torch.testing.assert_close(found.outputs, early(*given))


def test_switched_off():
    given = inputs(torch.float32, 5, 16)
    found = Harness(disabled=(NAME,), kept_ops=KEPT).run(llama, *given)
    assert not op_counts(found.after)
    torch.testing.assert_close(found.outputs, llama(*given))
