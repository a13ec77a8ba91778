"""A batch of one loses its dim; real batches, and ops over the dim, keep it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compiled_engine.custom_ops import rms_norm
from tests.helpers.pass_harness import Captured, Harness, aten, calls_of, ce, placeholders

NAME = "flatten_batch"
OFF = ("use_linear_op",)
KEPT = frozenset({"rms_norm", "add_rms_norm"})


def run(function: Callable[..., Tensor], *inputs: Tensor) -> Captured:
    found = Harness(disabled=OFF, kept_ops=KEPT).run(function, *inputs)
    torch.testing.assert_close(found.outputs, function(*inputs))
    return found


def ranks(found: Captured) -> set[int]:
    """Numbers of dims of all that is computed."""
    return {
        n.meta["val"].dim()
        for n in found.after.nodes
        if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)
    }


def block(x: Tensor, weight: Tensor, norm: Tensor) -> Tensor:
    """What stands in a decoder layer of transformers, over [1, T, hidden]."""
    hidden = x.unsqueeze(0)
    residual = hidden
    hidden = F.silu(F.linear(rms_norm(hidden, norm, 1e-5), weight))
    a, b = hidden.chunk(2, dim=-1)
    hidden = torch.cat((a * 2, -b), dim=-1).clone()
    hidden = F.layer_norm(hidden, hidden.shape[-1:], norm)
    return (residual + hidden).squeeze(0)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_block_is_computed_on_rows(num_tokens: int):
    given = (torch.randn(num_tokens, 8), torch.randn(8, 8), torch.randn(8))
    found = run(block, *given)
    assert found.matches(NAME) > 8
    assert ranks(found) == {2}
    assert not calls_of(found.after, aten.unsqueeze.default)
    assert not calls_of(found.after, aten.reshape.default)
    (norm,) = calls_of(found.after, ce.rms_norm.default)
    assert norm.args[0] in placeholders(found.after)
    (product,) = calls_of(found.after, aten.mm.default)
    assert product.args[0] is norm


def test_dynamic_sizes():
    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=100)
    assert ranks(run(block, x, torch.randn(8, 8), torch.randn(8))) == {2}


def test_heads_lose_the_dim_too():
    def heads(x: Tensor) -> Tensor:
        split = x.unsqueeze(0).view(1, x.shape[0], -1, 4).transpose(1, 2)  # [1, H, T, D]
        return (split * 2 + split).squeeze(0).transpose(0, 1)

    found = run(heads, torch.randn(5, 12))
    assert ranks(found) == {3}
    assert not calls_of(found.after, aten.unsqueeze.default)


def test_what_is_not_rewritten_gets_the_dim_back():
    def function(x: Tensor) -> Tensor:
        hidden = x.unsqueeze(0) * 2
        return hidden.cumsum(0) + hidden

    found = run(function, torch.randn(5, 8))
    (node,) = calls_of(found.after, aten.cumsum.default)
    assert node.args[0].meta["val"].dim() == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unsqueeze(0).expand(3, -1, -1) * 2,
        lambda x: torch.cat((x.unsqueeze(0) * 2, x.unsqueeze(0)), 0),
        lambda x: (x.unsqueeze(0) * 2).mean((0, -1), keepdim=True) * x,
        lambda x: x.unsqueeze(0) * x.unsqueeze(1),
        lambda x: (x.unsqueeze(0) * 2).transpose(0, 1) + 1,
        lambda x: x.unsqueeze(0) * x.expand(2, 5, 8),
        lambda x: (x.unsqueeze(0) * 2).split(1, 0)[0] - 1,
        lambda x: F.layer_norm(x.unsqueeze(0), (1, 5, 8)),
        lambda x: (x.unsqueeze(0) * x[:1]) * x[:1, None],
        lambda x: (x.unsqueeze(0) * 2)[0] + (x.unsqueeze(0) * 3)[:, 1],
    ],
)
def test_other_uses_of_the_dim_keep_their_values(function: Callable[[Tensor], Tensor]):
    run(function, torch.randn(5, 8))


@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: (x[:, :1] * x).sum(0)])
def test_without_a_batch_of_one_nothing_happens(function: Callable[[Tensor], Tensor]):
    found = run(function, torch.randn(5, 8))
    assert found.matches(NAME) == 0


def test_switched_off():
    found = Harness(disabled=(*OFF, NAME), kept_ops=KEPT).run(
        block, torch.randn(5, 8), torch.randn(8, 8), torch.randn(8)
    )
    assert 3 in ranks(found)
