"""Kernels of experts written into graphs, and the router's op that an option takes out."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.custom_ops import Activation, ExpertWeights, experts, route
from compiled_engine.custom_ops.kernels import make_registry
from tests.helpers.pass_harness import Harness, calls_of, op_counts

ce = torch.ops.ce
WEIGHTS = ExpertWeights(torch.randn(4, 16, 8), torch.randn(4, 8, 8))


def mixture(x, logits):
    routes = route(logits, None, 2)
    return experts(x, routes, WEIGHTS, Activation("swiglu_clamped", 1.7, 2.0))


def capture(*options, dynamic=False):
    harness = Harness(kept_ops=frozenset({"route"}), registry=make_registry(options))
    x, logits = torch.randn(3, 8), torch.randn(3, 4)
    found = harness.run(mixture, x, logits, dynamic=dynamic)
    torch.testing.assert_close(found.outputs, mixture(x, logits))
    return found


def impls(found):
    return [node.kwargs.get("impl") for node in calls_of(found.after, ce.experts.default)]


def test_experts_get_the_name_of_their_kernel():
    assert impls(capture()) == ["grouped"]
    assert impls(capture("experts=torch")) == ["torch"]


def test_experts_of_any_number_of_tokens_are_left_to_the_op():
    assert impls(capture(dynamic=True)) == [None]
    assert impls(capture("experts=torch", dynamic=True)) == ["torch"]


def test_an_option_takes_the_router_out_of_the_graph():
    assert op_counts(capture().after)["route"] == 1
    assert op_counts(capture("route=torch").after)["route"] == 0


@pytest.mark.parametrize("option", ["experts=rows", "route=triton"])
def test_a_kernel_of_another_device_is_refused(option):
    with pytest.raises(Exception, match="runs on cuda, not on cpu"):
        capture(option)
