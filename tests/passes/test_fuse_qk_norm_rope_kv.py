"""Rotary embedding + KV write: matches, roles of the arguments, cache contents, near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from compiled_engine.custom_ops import kv_write, qk_norm_rope, rope
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Target
from compiled_engine.engine import kept_ops
from compiled_engine.passes.fuse_qk_norm_rope_kv import NAME
from tests.helpers.pass_harness import Captured, Harness, calls_of, ce, item, op_counts

T, H, H_KV, D, PAGES, PAGE_SIZE, EPS = 6, 4, 2, 8, 5, 4, 1e-6
KEPT = frozenset({"rope_kv_write", "qk_norm_rope_kv_write"})


def step_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    angles = torch.randn(T, D // 2)
    caches = torch.randn(2, PAGES, PAGE_SIZE, H_KV, D).to(dtype)
    return {
        "q": torch.randn(T, H, D).to(dtype),
        "k": torch.randn(T, H_KV, D).to(dtype),
        "v": torch.randn(T, H_KV, D).to(dtype),
        "q_weight": torch.randn(D).to(dtype),
        "k_weight": torch.randn(D).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "k_cache": caches[0].clone(),
        "v_cache": caches[1].clone(),
        "slots": torch.tensor([4, 19, 7, 8, -1, -1]),
    }


def llama(t: dict[str, Tensor]) -> Tensor:
    q, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    kv_write(k, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return q


def qwen3(t: dict[str, Tensor]) -> Tensor:
    q, k = qk_norm_rope(t["q"], t["k"], t["q_weight"], t["k_weight"], t["cos"], t["sin"], EPS)
    kv_write(k, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return q


FAMILIES = {"llama": (llama, "rope_kv_write"), "qwen3": (qwen3, "qk_norm_rope_kv_write")}
Function = Callable[[dict[str, Tensor]], Any]


def run(function: Function, harness: Harness, **options: Any) -> tuple[Captured, dict[str, Tensor]]:
    """Runs with passes, and checks outputs and every tensor against the plain eager run."""
    tensors = step_tensors(**options)
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    found = harness.run(function, mine)
    expected = function(tensors)
    torch.testing.assert_close(found.outputs, expected, rtol=0, atol=0)
    for name, tensor in tensors.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=0, msg=f"{name} differs")
    return found, mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_with_the_right_roles(family, dtype):
    function, fused_name = FAMILIES[family]
    found, _ = run(function, Harness(kept_ops=KEPT), dtype=dtype)
    assert found.matches(NAME) == 1
    assert op_counts(found.before)["kv_write"] == 1
    assert op_counts(found.after) == {fused_name: 1}
    overload = getattr(ce, fused_name).default
    (fused,) = calls_of(found.after, overload)
    # The same nodes that the separate ops had, each in its own role.
    (write,) = calls_of(found.before, ce.kv_write.default)
    source, index = item(write.kwargs["k"])
    assert index == 1
    schema = [argument.name for argument in source.target._schema.arguments]  # type: ignore[union-attr]
    assert len(source.args) == len(schema) - 1  # halves turn, which is the default
    expected = dict(zip(schema, source.args, strict=False))
    expected |= {"interleaved": False} | {
        "v": write.kwargs["v"],
        "slot_mapping": write.kwargs["slot_mapping"],
    }
    got = {name: fused.kwargs[name] for name in expected}
    assert named(got) == named(expected)
    assert len(set(named(got).values())) == len(got), "one node in two roles"
    bases = [node.name for node in fused.kwargs["_all_bases"]]  # type: ignore[union-attr]
    assert bases == [node.name for node in write.kwargs["_all_bases"]]  # type: ignore[union-attr]
    for name in ("k_cache", "v_cache"):
        key = f"_{name}_base_index"
        assert fused.kwargs[key] == write.kwargs[key]


def named(values: dict[str, Any]) -> dict[str, Any]:
    """Node names instead of nodes: the graphs before and after are copies."""
    return {key: value.name if isinstance(value, Node) else value for key, value in values.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_expanded_where_no_kernel_takes_it(family):
    function, _ = FAMILIES[family]
    found, _ = run(function, Harness())
    assert found.matches(NAME) == 1
    assert found.counters.num_expansions == 1
    assert not op_counts(found.after)
    writes = calls_of(found.after, torch.ops.aten.index_put.default)
    assert len(writes) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_switched_off(family):
    function, _ = FAMILIES[family]
    found, _ = run(function, Harness(disabled=(NAME,)))
    assert NAME not in found.counters.num_matches
    assert found.counters.num_expansions == 2, "the rotation and the write, each by itself"
    assert not op_counts(found.after)


def two_layers(t: dict[str, Tensor]) -> Tensor:
    """One layer's keys are the next one's values, over the same caches."""
    q = llama(t)
    return qwen3({**t, "q": q, "slots": t["slots"].flip(0)})


@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["expanded", "kept"])
def test_two_writes_into_the_same_caches_keep_their_order(kept):
    found, _ = run(two_layers, Harness(kept_ops=kept))
    assert found.matches(NAME) == 2


def unused_query(t: dict[str, Tensor]) -> Tensor:
    _, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    kv_write(k, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return t["k_cache"] * 2


def cache_read_after(t: dict[str, Tensor]) -> Tensor:
    q = llama(t)
    return q.sum() + t["k_cache"][1].sum() + t["v_cache"].sum()


def stacked_views(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    stacked = torch.stack((t["k_cache"], t["v_cache"]))
    q = qwen3({**t, "k_cache": stacked[0], "v_cache": stacked[1]})
    return q, stacked


@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["expanded", "kept"])
@pytest.mark.parametrize("function", [unused_query, cache_read_after, stacked_views])
def test_unusual_surroundings_match_and_stay_right(function, kept):
    found, _ = run(function, Harness(kept_ops=kept))
    assert found.matches(NAME) == 1


@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["expanded", "kept"])
@pytest.mark.parametrize("layout", ["layer-of-stack", "halves-of-one"])
def test_caches_that_are_views_of_an_input_stay_right(layout, kept):
    tensors = step_tensors()

    def fresh() -> Tensor:
        if layout == "layer-of-stack":
            return torch.zeros(2, 2, PAGES, PAGE_SIZE, H_KV, D)
        return torch.zeros(PAGES, 2, PAGE_SIZE, H_KV, D)

    def function(storage: Tensor, t: dict[str, Tensor]) -> Tensor:
        k, v = storage[1] if layout == "layer-of-stack" else storage.unbind(1)
        return llama({**t, "k_cache": k, "v_cache": v})

    mine, theirs = fresh(), fresh()
    found = Harness(kept_ops=kept).run(function, mine, tensors)
    expected = function(theirs, tensors)
    assert found.matches(NAME) == 1
    torch.testing.assert_close(found.outputs, expected, rtol=0, atol=0)
    assert torch.equal(mine, theirs)
    assert mine.abs().sum() > 0


def keys_read_again(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    kv_write(k, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return q, k + 1


def query_read_before_the_write(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    q, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    early = q * 2
    kv_write(k, t["v"] + early[:, :H_KV], t["k_cache"], t["v_cache"], t["slots"])
    return early, q


def queries_written(t: dict[str, Tensor]) -> Tensor:
    k, q = rope(t["k"], t["q"], t["cos"], t["sin"])
    kv_write(k, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return q


def values_rotated(t: dict[str, Tensor]) -> Tensor:
    q, v = rope(t["q"], t["v"], t["cos"], t["sin"])
    kv_write(t["k"], v, t["k_cache"], t["v_cache"], t["slots"])
    return q


def keys_scaled(t: dict[str, Tensor]) -> Tensor:
    q, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    kv_write(k * 2, t["v"], t["k_cache"], t["v_cache"], t["slots"])
    return q


def keys_also_values(t: dict[str, Tensor]) -> Tensor:
    q, k = rope(t["q"], t["k"], t["cos"], t["sin"])
    kv_write(k, k, t["k_cache"], t["v_cache"], t["slots"])
    return q


@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["expanded", "kept"])
@pytest.mark.parametrize(
    "function",
    [
        keys_read_again,
        query_read_before_the_write,
        queries_written,
        values_rotated,
        keys_scaled,
        keys_also_values,
    ],
)
def test_near_misses_do_not_match(function, kept):
    found, _ = run(function, Harness(kept_ops=kept))
    assert found.matches(NAME) == 0


def test_caches_given_the_other_way_round_keep_their_roles():
    def swapped(t: dict[str, Tensor]) -> Tensor:
        return llama({**t, "k_cache": t["v_cache"], "v_cache": t["k_cache"]})

    for kept in (frozenset[str](), KEPT):
        found, _ = run(swapped, Harness(kept_ops=kept))
        assert found.matches(NAME) == 1


# --- on a GPU, where the number of pages is open --------------------------------------------------


def harness_of_a_gpu(*overrides: str, disabled: tuple[str, ...] = ()) -> Harness:
    return Harness(
        disabled=disabled,
        kept_ops=kept_ops(torch.device("cuda")),
        registry=make_registry(overrides),
        target=Target("cuda", 90),
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("overrides", [(), ("rope_kv=torch",)], ids=["chosen", "plain"])
@pytest.mark.parametrize("disabled", [(), (NAME,)], ids=["on", "off"])
def test_on_a_gpu_no_code_of_the_compiler_writes_the_caches(family, overrides, disabled):
    function, fused_name = FAMILIES[family]
    harness = harness_of_a_gpu(*overrides, disabled=disabled)
    found, _ = run(function, harness, dtype=torch.bfloat16)
    write = "kv_write" if disabled else fused_name
    assert op_counts(found.after) == {f"{write}_plain" if overrides else write: 1}
    indexed = [n for n in found.after.nodes if "index_put" in str(n.target)]
    assert not indexed, "code of the compiler's own would index the caches with 32 bits"
