"""Kernels that an option, an objective or a plugin asks for stand in the graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from compiled_engine.custom_ops import kernels, rms_norm
from compiled_engine.custom_ops.registry import KernelRegistry, Measured
from compiled_engine.errors import ConfigError
from compiled_engine.passes.choose_kernels import MANY_PAGES, token_limits, with_size
from tests.helpers.kernel_plugin import install
from tests.helpers.pass_harness import Harness, calls_of, op_counts

ce = torch.ops.ce


def project(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-5)


def impls(registry: KernelRegistry, num_tokens: int, *, dynamic: bool) -> list[str]:
    """What the products of a graph are told; the result must be right."""
    x, weight = torch.randn(num_tokens, 32), torch.randn(8, 32)
    found = Harness(registry=registry).run(project, x, weight, dynamic=dynamic)
    torch.testing.assert_close(found.outputs, project(x, weight))
    return [node.kwargs.get("impl", "") for node in calls_of(found.after, ce.linear.default)]


def test_a_static_graph_names_the_kernel():
    assert impls(kernels.make_registry(), 3, dynamic=False) == ["cpp"]
    assert impls(kernels.make_registry(), 40, dynamic=False) == ["torch"]
    assert impls(kernels.make_registry(("linear=torch",)), 3, dynamic=False) == ["torch"]


def test_a_graph_of_many_sizes_leaves_it_to_the_op_unless_something_is_asked_for():
    assert impls(kernels.make_registry(), 3, dynamic=True) == [""]
    assert impls(kernels.make_registry(("linear=torch",)), 3, dynamic=True) == ["torch"]
    registry = kernels.make_registry(objective="throughput")
    assert impls(registry, 3, dynamic=True) == ["16=cpp,1024=torch"]


class Measurements:
    """A tuner that finds plain torch fastest from 8 tokens on."""

    generation = "1"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def measure(self, query, fitting, arguments):
        num_tokens = query.traits["num_tokens"]
        assert arguments["x"].shape[0] == num_tokens
        self.asked.append(num_tokens)
        seconds = {c.name: float(c.name != "torch") for c in fitting}
        if num_tokens < 8:
            seconds = {name: 1 - value for name, value in seconds.items()}
        return Measured(min(seconds, key=seconds.__getitem__), seconds)


def test_measurements_reach_an_op_that_picks_by_itself():
    tuner = Measurements()
    registry = kernels.make_registry(objective="autotune", tuner=tuner)
    assert impls(registry, 3, dynamic=True) == ["4=cpp,1024=torch"]
    assert tuner.asked == token_limits(2, 2**31)
    assert impls(registry, 3, dynamic=False) == ["cpp"]


def test_what_is_measured_has_a_number_for_every_size_that_is_open():
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    cache = mode.from_tensor(torch.empty(7, 5))
    assert isinstance(cache.shape[0], torch.SymInt)
    sized = with_size({"cache": cache, "size": 2}, None, 0)
    assert tuple(sized["cache"].shape) == (MANY_PAGES, MANY_PAGES)
    assert tuple(sized["cache"].stride()) == (MANY_PAGES, 1)
    assert all(type(n) is int for n in (*sized["cache"].shape, *sized["cache"].stride()))
    assert sized["size"] == 2


def test_sizes_between_the_same_limits_are_one():
    """Tensors of a step's tokens, of which Dynamo does not know that they are as long."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, static_shapes=False)
    x, slots, cache = (mode.from_tensor(torch.empty(n, 4)) for n in (7, 9, 11))
    for tensor, high in ((x, 8192), (slots, 8192), (cache, 2**31 - 1)):
        symbol = tensor.shape[0].node.expr
        env.var_to_range[symbol] = ValueRanges(2, high)
    assert x.shape[0].node.expr != slots.shape[0].node.expr
    planes = torch.empty_strided((2, cache.shape[0], 4), (cache.shape[0] * 4, 4, 1), device="meta")
    given = {"x": x, "slots": slots, "cache": cache, "planes": planes, "count": x.shape[0] * 2 + 1}
    sized = with_size(given, x.shape[0], 4096)
    assert [sized[name].shape[0] for name in ("x", "slots", "cache")] == [4096, 4096, MANY_PAGES]
    assert sized["planes"].stride() == (MANY_PAGES * 4, 4, 1)
    assert sized["count"] == 8193


def test_an_option_makes_an_op_without_a_name_its_body():
    inputs = (torch.randn(4, 16), torch.randn(16))
    kept = frozenset({"rms_norm"})
    plain = Harness(kept_ops=kept).run(normed, *inputs)
    assert op_counts(plain.after) == {"rms_norm": 1}
    asked = Harness(kept_ops=kept, registry=kernels.make_registry(("norm=torch",)))
    found = asked.run(normed, *inputs)
    assert op_counts(found.after) == {}
    assert torch.equal(found.outputs, plain.outputs)


def test_a_plugin_is_called_in_the_place_of_the_op(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = install(tmp_path, change="* 2")
    inputs = (torch.randn(4, 16), torch.randn(16))
    found = Harness(kept_ops=frozenset({"rms_norm"})).run(normed, *inputs)
    assert op_counts(found.after) == {}
    (call,) = calls_of(found.after, getattr(torch.ops, module).norm.default)
    assert len(call.args) == 3
    assert not call.kwargs
    torch.testing.assert_close(found.outputs, 2 * normed(*inputs))
    without = Harness(
        kept_ops=frozenset({"rms_norm"}), registry=kernels.make_registry(("norm.rms_norm=torch",))
    )
    torch.testing.assert_close(without.run(normed, *inputs).outputs, normed(*inputs))


def test_a_kernel_that_cannot_serve_is_refused():
    registry = kernels.make_registry(("norm=triton",))
    with pytest.raises(Exception, match=r"norm\.rms_norm=triton: it runs on cuda") as caught:
        Harness(kept_ops=frozenset({"rms_norm"}), registry=registry).run(
            normed, torch.randn(4, 16), torch.randn(16)
        )
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(cause, ConfigError) for cause in causes)


def test_token_limits_are_powers_of_two_and_the_highest():
    assert token_limits(1, 1) == [1]
    assert token_limits(2, 64) == [2, 4, 8, 16, 32, 64]
    assert token_limits(33, 100) == [64, 100]
    assert token_limits(2, 2**31)[-1] == 1024
    assert token_limits(2, 10**6)[-1] == 16384
