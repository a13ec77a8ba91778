"""Ops that change nothing go away, views of views become one; what changes something stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.pass_harness import Harness, aten, calls_of, placeholders

NAME = "remove_no_ops"
OFF = ("flatten_batch",)


def run(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    found = Harness(disabled=OFF).run(function, x)
    torch.testing.assert_close(found.outputs, function(x))
    return found


def targets(found: Any) -> list[str]:
    """Names of the ops that are left, sines apart."""
    names = [str(n.target) for n in found.after.nodes if n.op == "call_function"]
    return [name for name in names if name != "aten.sin.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin().clone().sin(),
        lambda x: x.sin().reshape(6, 4).sin(),
        lambda x: x.sin().view(6, 4)[0:].sin(),
        lambda x: x.sin().expand(6, 4).sin(),
        lambda x: (x.sin() + 0).sin(),
        lambda x: (x.sin() * 1).sin(),
        lambda x: (x.sin() * 1.0 - 0.0).sin(),
        lambda x: (x.sin() / 1).sin(),
        lambda x: torch.dropout(x.sin(), 0.5, train=False).sin(),
        lambda x: x.sin().t().t().sin(),
        lambda x: x.sin()[None].transpose(1, 2).transpose(2, 1)[0].sin(),
        lambda x: x.sin().unsqueeze(1).squeeze(1).sin(),
        lambda x: x.sin().unsqueeze(0).permute(1, 0, 2).squeeze(1).sin(),
    ],
)
def test_nothing_is_left(function: Callable[[Tensor], Tensor]):
    found = run(function, torch.randn(6, 4))
    assert targets(found) == []
    assert len(calls_of(found.after, aten.sin.default)) == 2


def test_views_of_views_become_one():
    def function(x: Tensor) -> Tensor:
        moved = x.sin().unsqueeze(0).permute(0, 2, 1, 3).squeeze(0)  # [4, 6, 5]
        return moved.permute(1, 2, 0).sin()

    found = run(function, torch.randn(6, 4, 5))
    (node,) = calls_of(found.after, aten.permute.default)
    assert node.args[1] == [0, 2, 1]
    assert targets(found) == ["aten.permute.default"]


def test_dynamic_sizes():
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=100)
    found = run(lambda x: x.sin().unsqueeze(0).reshape(1, x.shape[0], 4).squeeze(0).sin(), x)
    assert found.matches(NAME) >= 1


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.sin().t().clone(memory_format=torch.contiguous_format).sin(), "clone"),
        (lambda x: x.sin().bfloat16().sin(), "convert"),
        (lambda x: x.sin().bfloat16().float().sin(), "convert"),
        (lambda x: x.sin().reshape(4, 6).sin(), "reshape"),
        (lambda x: x.sin().reshape(24).reshape(6, 4)[1:].sin(), "slice"),
        (lambda x: x.sin()[:, :3].sin(), "slice"),
        (lambda x: x.sin().t().sin(), "permute"),
        (lambda x: (x.sin() + 1).sin(), "add"),
        (lambda x: (x.sin() * 0).sin(), "mul"),
        (lambda x: (x.sin() + x).sin(), "add"),
        (lambda x: (1 - x.sin()).sin(), "sub"),
        (lambda x: x.sin()[:, None].expand(6, 3, 4).sin(), "expand"),
    ],
)
def test_near_misses_stay(function: Callable[[Tensor], Tensor], kept: str):
    found = run(function, torch.randn(6, 4))
    assert any(kept in name for name in targets(found)), targets(found)


def test_an_integer_that_becomes_a_float_stays():
    found = run(lambda x: (x * 1.0).sin(), torch.arange(6))
    assert len(calls_of(found.after, aten.sin.default)) == 1


def test_a_copy_of_an_input_that_is_returned_or_written_stays_a_copy():
    x = torch.randn(6, 4)
    found = Harness(disabled=OFF).run(lambda x: (x.clone(), x.view(6, 4)), x)
    copy, view = found.outputs
    assert copy.data_ptr() != x.data_ptr()
    assert view.data_ptr() == x.data_ptr()

    def write(x: Tensor) -> Tensor:
        before = x.clone()
        x.add_(1)
        return before * 2

    before = x.clone()
    found = Harness(disabled=OFF).run(write, x)
    torch.testing.assert_close(found.outputs, before * 2)
    torch.testing.assert_close(x, before + 1)


def test_switched_off():
    x = torch.randn(6, 4)
    found = Harness(disabled=(*OFF, NAME)).run(lambda x: (x.sin() + 0).sin(), x)
    assert len(calls_of(found.after, aten.add.Tensor)) == 1
    assert len(placeholders(found.after)) == 1
