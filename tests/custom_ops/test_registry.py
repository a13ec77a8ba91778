"""Kernels are chosen by device, dtype and traits; every rejection says why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compiled_engine.custom_ops.registry import Candidate, KernelRegistry, Priority, Target
from compiled_engine.errors import ConfigError

H200 = Target("cuda", 90)
A100 = Target("cuda", 80)
CPU = Target("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def candidates() -> tuple[Candidate, ...]:
    def odd(traits):
        return (
            f"takes head dims up to 128, not {traits['head_dim']}"
            if traits["head_dim"] > 128
            else None
        )

    both = dict(family="attention", mode="decode")
    return (
        Candidate(name="reference", priority=Priority.REFERENCE, **both),
        Candidate(name="portable", priority=Priority.PORTABLE, device_type="cuda", **both),
        Candidate(
            name="tuned", priority=Priority.TUNED, device_type="cuda", min_arch=90, dtypes=(BF16,),
            rejects=odd, **both,
        ),
        Candidate(family="attention", mode="mixed", name="reference", priority=Priority.REFERENCE),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "expected"),
    [
        (H200, BF16, 128, "tuned"),
        (H200, BF16, 256, "portable"),
        (H200, FP32, 128, "portable"),
        (A100, BF16, 128, "portable"),
        (CPU, BF16, 128, "reference"),
    ],
)
def test_registry_takes_the_best_that_fits(target, dtype, head_dim, expected):
    registry = KernelRegistry(candidates())
    choice = registry.choose("attention", "decode", target, dtype, {"head_dim": head_dim})
    assert choice.candidate.name == expected
    assert len(choice.rejected) == 2
    assert all(reason for _, reason in choice.rejected)


def test_registry_states_each_reason():
    registry = KernelRegistry(candidates())
    reasons = dict(registry.choose("attention", "decode", A100, BF16, {"head_dim": 64}).rejected)
    assert reasons == {
        "reference": "ranks below portable",
        "tuned": "needs sm_90, this is sm_80",
    }
    reasons = dict(registry.choose("attention", "decode", H200, BF16, {"head_dim": 256}).rejected)
    assert reasons["tuned"] == "takes head dims up to 128, not 256"
    reasons = dict(registry.choose("attention", "decode", H200, FP32, {"head_dim": 64}).rejected)
    assert reasons["tuned"] == "has no version for torch.float32"
    reasons = dict(registry.choose("attention", "decode", CPU, FP32, {"head_dim": 64}).rejected)
    assert reasons["portable"] == "runs on cuda, not on cpu"


def test_registry_prefers_what_is_not_slower():
    def slower(traits):
        return "was measured slower than portable" if traits["head_dim"] < 64 else None

    some = tuple(
        dataclasses.replace(c, slower=slower) if c.name == "tuned" else c for c in candidates()
    )
    for head_dim, name in ((32, "portable"), (64, "tuned")):
        choice = KernelRegistry(some).choose(
            "attention", "decode", H200, BF16, {"head_dim": head_dim}
        )
        assert choice.candidate.name == name
    choice = KernelRegistry(some).choose("attention", "decode", H200, BF16, {"head_dim": 32})
    assert dict(choice.rejected)["tuned"] == "was measured slower than portable"
    named = KernelRegistry(some, {"attention.decode": "tuned"})
    choice = named.choose("attention", "decode", H200, BF16, {"head_dim": 32})
    assert choice.candidate.name == "tuned"
    only = KernelRegistry(tuple(c for c in some if c.name == "tuned"))
    choice = only.choose("attention", "decode", H200, BF16, {"head_dim": 32})
    assert choice.candidate.name == "tuned"


def test_registry_chooses_once():
    calls = []

    def count(traits):
        calls.append(traits)

    registry = KernelRegistry(
        (Candidate(family="linear", mode="few", name="a", priority=Priority.TUNED, rejects=count),)
    )
    first = registry.choose("linear", "few", H200, BF16, {"n": 8})
    assert registry.choose("linear", "few", H200, BF16, {"n": 8}) is first
    assert len(calls) == 1
    assert registry.choices == (first,)


def test_registry_override_wins_or_fails():
    registry = KernelRegistry(candidates(), {"attention": "portable"})
    choice = registry.choose("attention", "decode", H200, BF16, {"head_dim": 64})
    assert choice.candidate.name == "portable"
    assert dict(choice.rejected)["tuned"] == "an option asks for another"
    # The mode that has no such kernel keeps its own choice.
    assert registry.choose("attention", "mixed", H200, BF16, {}).candidate.name == "reference"
    registry = KernelRegistry(candidates(), {"attention.decode": "tuned"})
    with pytest.raises(ConfigError, match=r"attention\.decode=tuned: it needs sm_90"):
        registry.choose("attention", "decode", A100, BF16, {"head_dim": 64})


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("atention", "tuned", "no such kernel family; there are attention.decode, attention.mixed"),
        ("attention.decoding", "tuned", "no such kernel family"),
        ("attention", "flash", "no such kernel; attention has portable, reference, tuned"),
        ("attention.mixed", "tuned", "attention.mixed has reference"),
    ],
)
def test_registry_refuses_unknown_overrides(place, name, message):
    with pytest.raises(ConfigError, match=message):
        KernelRegistry(candidates(), {place: name})


def test_registry_without_a_fit_says_why():
    only = tuple(c for c in candidates() if c.name == "tuned")
    with pytest.raises(
        ConfigError, match=r"no kernel can serve attention\.decode: tuned needs sm_90"
    ):
        KernelRegistry(only).choose("attention", "decode", A100, BF16, {"head_dim": 64})
