"""Routers written out become `ce.route`; near misses stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import ExpertWeights, Routes, experts
from compiled_engine.models.hf_attention import routes_of
from compiled_engine.passes import lift_route
from tests.helpers.pass_harness import Captured, Harness, calls_of, ce, op_counts, source_of

T, E, K, HIDDEN, INNER = 9, 8, 3, 16, 12
Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


GATE_UP, DOWN = normal(E, 2 * INNER, HIDDEN, seed=1) * 0.3, normal(E, HIDDEN, INNER, seed=2) * 0.3


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, logits, bias, and the matrices of the experts."""
    x, logits, bias = normal(T, HIDDEN), normal(T, E, seed=3) * 2, normal(E, seed=4) * 0.2
    return x.to(dtype), logits.to(dtype), bias, GATE_UP.to(dtype), DOWN.to(dtype)


def mixture(router: Router) -> Callable[..., Tensor]:
    """A mixture of experts that a router written out chooses from."""

    def function(x: Tensor, logits: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights, ids = router(logits, bias)
        return experts(x, routes_of(weights, ids, E), ExpertWeights(gate_up, down))

    return function


def run(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Captured:
    """Runs the pipeline and compares with the plain function."""
    found = Harness(kept_ops=frozenset({"route"})).run(function, *given)
    with torch.no_grad():
        expected = function(*given)
    limit = 0.03 if given[0].dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.outputs, expected, rtol=limit, atol=limit)
    return found


# --- routers that are lifted ----------------------------------------------------------------------


def softmax_top(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), K, dim=-1)
    return weights.to(logits.dtype), ids


def softmax_renormalized(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(torch.softmax(logits.float(), dim=1), K)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def softmax_of_chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    chosen, ids = logits.topk(K, dim=1)
    return torch.softmax(chosen, dim=1, dtype=torch.float32) * 0.5, ids


def sigmoid_biased(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    _, ids = torch.topk(scores + bias, K, dim=-1, sorted=False)
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * 2.5, ids


def softmax_biased(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits.float(), -1)
    ids = torch.topk(scores + bias.bfloat16()[None].squeeze(), K, dim=-1).indices
    weights = torch.gather(scores, -1, ids)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), ids


def in_groups(
    logits: Tensor, bias: Tensor, *, best: int = 2, filler: float = float("-inf")
) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    choice = scores + bias
    groups = choice.view(-1, 4, E // 4).topk(best, dim=-1)[0].sum(dim=-1)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=-1, sorted=False)[1], 1)
    mask = kept.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), filler).topk(K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.5, ids


# Router -> bias or not, and arguments of the op behind it.
LIFTED: dict[Router, tuple[bool, tuple[Any, ...]]] = {
    softmax_top: (False, (K, "softmax", False, 1, 1, 1.0)),
    softmax_renormalized: (False, (K, "softmax", True, 1, 1, 1.0)),
    softmax_of_chosen: (False, (K, "softmax", True, 1, 1, 0.5)),
    sigmoid_biased: (True, (K, "sigmoid", True, 1, 1, 2.5)),
    softmax_biased: (True, (K, "softmax", True, 1, 1, 1.0)),
    in_groups: (True, (K, "sigmoid", True, 4, 2, 1.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", LIFTED, ids=lambda router: router.__name__)
def test_routers_become_the_op(router: Router, dtype: torch.dtype):
    has_bias, expected = LIFTED[router]
    found = run(mixture(router), inputs(dtype))
    assert found.matches(lift_route.NAME) == 1
    assert op_counts(found.after) == {"route": 1, "experts": 1}
    (node,) = calls_of(found.after, ce.route.default)
    logits, bias, *rest = node.args
    assert tuple(rest) == expected
    assert source_of(logits).meta["val"].shape == (T, E)
    assert logits.meta["val"].dtype == dtype, "the op casts logits itself"
    assert (bias is not None) == has_bias
    if has_bias:
        assert (bias.meta["val"].shape, bias.meta["val"].dtype) == ((E,), torch.float32)
    (mixed,) = calls_of(found.after, ce.experts.default)
    taken = mixed.args[5:9]
    assert [value.args for value in taken] == [(node, place) for place in range(4)]
    shapes = [(tuple(v.meta["val"].shape), v.meta["val"].dtype) for v in taken]
    int32 = torch.int32
    assert shapes == [
        ((T, K), torch.float32), ((T, K), int32), ((T * K,), int32), ((E + 1,), int32),
    ]  # fmt: skip


@pytest.mark.parametrize("router", [softmax_renormalized, in_groups], ids=lambda r: r.__name__)
def test_any_number_of_tokens(router: Router):
    given = inputs()
    for tensor in given[:2]:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=512)
    assert run(mixture(router), given).matches(lift_route.NAME) == 1


def test_the_op_off_is_the_same():
    found = Harness(disabled=(lift_route.NAME,)).run(mixture(sigmoid_biased), *inputs())
    expected = mixture(sigmoid_biased)(*inputs())
    torch.testing.assert_close(found.outputs, expected, rtol=1e-5, atol=1e-5)
    assert op_counts(found.after) == {"experts": 1}


# --- near misses ----------------------------------------------------------------------------------


def smallest(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(logits, -1).topk(K, largest=False)


def over_tokens(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(logits, 0).topk(K)


def biased_values(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The bias counts in the weights too."""
    return (logits.sigmoid() + bias).topk(K)


def bias_of_tokens(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = (scores + logits.abs()).topk(K).indices
    return scores.gather(1, ids), ids


def other_scores(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids = (logits.sigmoid() + bias).topk(K).indices
    return torch.softmax(logits, -1).gather(1, ids), ids


def whole_sum(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Divided by the sum over all experts, not over the chosen."""
    scores = logits.sigmoid()
    weights, ids = scores.topk(K)
    return weights / scores.sum(-1, keepdim=True), ids


def large_addend(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.sigmoid().topk(K)
    return weights / (weights.sum(-1, keepdim=True) + 0.1), ids


def raw_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return logits.topk(K)


def sigmoid_of_chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of chosen logits that are no softmax."""
    chosen, ids = logits.topk(K)
    return chosen.sigmoid(), ids


def renormalized_twice(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.sigmoid().topk(K)
    for _ in range(2):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def scaled_by_a_tensor(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.sigmoid().topk(K)
    return weights * bias[:K], ids


def groups_by_their_best(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return in_groups(logits, bias, best=1)


def groups_hidden_by_zero(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return in_groups(logits, bias, filler=0.0)


@pytest.mark.parametrize(
    "router",
    [
        smallest, over_tokens, biased_values, bias_of_tokens, other_scores, whole_sum,
        large_addend, raw_logits, sigmoid_of_chosen, renormalized_twice, scaled_by_a_tensor,
        groups_by_their_best, groups_hidden_by_zero,
    ],
    ids=lambda router: router.__name__,
)  # fmt: skip
def test_near_misses_stay(router: Router):
    found = run(mixture(router), inputs())
    assert found.matches(lift_route.NAME) == 0
    assert op_counts(found.after) == {"experts": 1}


def rounded_scores(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in 16 bits, among which the choice is another."""
    return torch.softmax(logits, -1, dtype=torch.float32).to(logits.dtype).topk(K)


def test_scores_in_16_bits_stay():
    assert run(mixture(rounded_scores), inputs(torch.bfloat16)).matches(lift_route.NAME) == 0


def test_pairs_of_another_choice_stay():
    """Sorted by the ids of one choice, and computed with the weights of another."""

    def function(x: Tensor, logits: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights, ids = softmax_top(logits, bias)
        _, others = softmax_top(logits.flip(1), bias)
        mine, theirs = routes_of(weights, ids, E), routes_of(weights, others, E)
        mixed = Routes(mine.weights, theirs.ids, theirs.order, theirs.offsets)
        crossed = Routes(mine.weights, mine.ids, theirs.order, theirs.offsets)
        stacked = ExpertWeights(gate_up, down)
        # Order and ids that differ are no routes: only looked at, times 0.
        return experts(x, mixed, stacked) + 0.0 * experts(x, crossed, stacked).nan_to_num()

    found = run(function, inputs())
    assert found.matches(lift_route.NAME) == 0
    assert op_counts(found.after) == {"experts": 2}
