"""Objectives, the config file and plugins: what they choose, and what they refuse."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from compiled_engine.custom_ops import kernels
from compiled_engine.custom_ops.families import FAMILIES, family_of
from compiled_engine.custom_ops.registry import (
    Candidate,
    KernelRegistry,
    Objective,
    Priority,
    Query,
    Target,
    by_tokens,
    names_by_tokens,
)
from compiled_engine.errors import ConfigError
from tests.helpers.kernel_plugin import install

H200, A100, B200, CPU = (
    Target("cuda", 90), Target("cuda", 80), Target("cuda", 100), Target("cpu"),
)  # fmt: skip
BF16, FP32 = torch.bfloat16, torch.float32


def some(**changes: dict[str, object]) -> tuple[Candidate, ...]:
    """One of each band; `changes` are fields by name."""
    plain: dict[str, dict[str, object]] = {
        "reference": {"priority": Priority.REFERENCE, "tags": ("deterministic",)},
        "portable": {"priority": Priority.PORTABLE, "tags": ("portable", "throughput")},
        "tuned": {"priority": Priority.TUNED, "min_arch": 80, "tags": ("deterministic",)},
        "special": {
            "priority": Priority.SPECIALIZED, "min_arch": 90, "max_arch": 99, "tags": ("latency",),
        },
    }  # fmt: skip
    return tuple(
        Candidate(family="f", mode="m", name=name, **{**fields, **changes.get(name, {})})
        for name, fields in plain.items()
    )


def chosen(
    objective: str, target: Target = H200, candidates: tuple[Candidate, ...] | None = None
) -> str:
    registry = KernelRegistry(candidates or some(), objective=Objective(objective))
    return registry.choose("f", "m", target, BF16, {"num_tokens": 8}).candidate.name


# --- objectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "target", "expected"),
    [
        ("latency", H200, "special"),
        ("latency", A100, "tuned"),
        ("latency", B200, "tuned"),
        ("throughput", H200, "portable"),
        ("portability", H200, "portable"),
        ("determinism", H200, "tuned"),
        ("determinism", CPU, "reference"),
    ],
)
def test_each_objective_has_its_own_ranking(objective, target, expected):
    assert chosen(objective, target) == expected


def test_portability_takes_plain_torch_only_where_nothing_else_serves():
    without = tuple(c for c in some() if c.name != "portable")
    assert chosen("portability", H200, without) == "tuned"
    assert chosen("portability", CPU, without) == "reference"


def test_throughput_still_avoids_what_is_known_to_be_slower():
    changes = {"portable": {"tags": ()}, "tuned": {"slower": lambda _: "is slow"}}
    assert chosen("throughput", A100, some(**changes)) == "portable"


def test_determinism_says_what_it_leaves_out_and_refuses_what_is_left_with_nothing():
    registry = KernelRegistry(some(), objective=Objective.DETERMINISM)
    choice = registry.choose("f", "m", H200, BF16, {})
    assert dict(choice.rejected)["special"] == "gives no promise of equal bits from run to run"
    assert "same bits" in choice.reason
    none = tuple(c for c in some() if "deterministic" not in c.tags)
    with pytest.raises(ConfigError, match=r"--kernel-objective determinism: no kernel can serve"):
        KernelRegistry(none, objective=Objective.DETERMINISM).choose("f", "m", H200, BF16, {})


def test_an_option_by_name_wins_over_the_objective():
    registry = KernelRegistry(some(), {"f": "special"}, Objective.DETERMINISM)
    choice = registry.choose("f", "m", H200, BF16, {})
    assert (choice.candidate.name, choice.reason) == ("special", "an option asks for it")


def test_capability_has_two_ends_and_formats_are_a_signature():
    packed = some(special={"formats": ("mxfp4",)})[-1]
    assert packed.rejection(B200, BF16, {}, "mxfp4") == "was made up to sm_99, this is sm_100"
    assert packed.rejection(H200, BF16, {}, "mxfp4") is None
    assert packed.rejection(H200, BF16, {}) == "has no version for format plain"
    registry = KernelRegistry(some(special={"formats": ("mxfp4",)}))
    for layout, name in (("mxfp4", "special"), ("", "tuned")):
        query = Query(family="f", mode="m", target=H200, dtype=BF16, traits={}, layout=layout)
        assert registry.decide(query).candidate.name == name


@pytest.mark.parametrize("objective", [o for o in Objective if o is not Objective.AUTOTUNE])
def test_every_family_has_a_choice_for_every_objective(objective):
    registry = kernels.make_registry(objective=objective)
    for family in FAMILIES:
        arguments = family.bind(family.op.example_inputs(FP32, torch.device("cpu"), 0)[0])
        traits, dtype = family.traits(arguments, CPU), family.dtype_of(arguments)
        choice = registry.choose(family.family, family.mode, CPU, dtype, traits)
        assert choice.reason
        assert choice.candidate.device_type in ("", "cpu")


def test_fingerprint_follows_the_objective_and_the_overrides():
    prints = {
        kernels.make_registry(given, objective=objective).fingerprint
        for given in ((), ("attention=torch",))
        for objective in ("latency", "throughput")
    }
    assert len(prints) == 4


def test_autotune_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="autotune measures on the device"):
        kernels.make_registry(objective="autotune")


# --- lists by tokens ------------------------------------------------------------------------------


def test_lists_by_tokens_are_short_and_read_back():
    text = names_by_tokens([(2, "a"), (4, "a"), (8, "b"), (64, "c"), (128, "c")])
    assert text == "4=a,8=b,128=c"
    assert [by_tokens(text, n) for n in (0, 1, 4, 5, 8, 9, 128, 10**6)] == [*"aaabbccc"]
    assert names_by_tokens([(2, "a"), (4, "a")]) == "a"
    assert by_tokens("a", 7) == "a"
    assert by_tokens("", 7) == ""


def test_linear_goes_by_a_list_and_refuses_what_there_is_not():
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    expected = torch.nn.functional.linear(x, weight)
    for impl in ("", "cpp", "torch", "2=cpp,8=torch"):
        got = torch.ops.ce.linear.default(x, weight, None, impl)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="linear has no kernel cub; there are cpp, torch"):
        torch.ops.ce.linear.default(x, weight, None, "cub")
    with pytest.raises(ValueError, match="contiguous weight"):
        torch.ops.ce.linear.default(x, torch.randn(32, 8).T, None, "cpp")


# --- config file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kernels.toml", "kernels.json"])
def test_file_gives_objective_and_overrides_and_flags_win(tmp_path, name):
    path = tmp_path / name
    if name.endswith("toml"):
        path.write_text(
            'objective = "throughput"\n[kernels]\nattention = "torch"\nlinear.any="cpp"'
        )
    else:
        path.write_text(
            '{"objective": "throughput", "kernels": {"attention": "torch", "linear.any": "cpp"}}'
        )
    registry = kernels.make_registry(config_file=path)
    assert registry.objective is Objective.THROUGHPUT
    assert registry.overrides == (("attention", "torch"), ("linear.any", "cpp"))
    registry = kernels.make_registry(
        ("attention=triton",), config_file=path, objective="determinism"
    )
    assert registry.objective is Objective.DETERMINISM
    assert registry.override("attention", "paged") == "triton"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objective = 3", "objective: 3 is none; there are latency, throughput, portability"),
        ('objektive = "latency"', "objektive: no such key; there are objective, kernels"),
        ('kernels = "torch"', "kernels: holds no table"),
        ("[kernels]\nattention = 3", r"kernels.attention: 3 is no name"),
        ('[kernels]\natention = "torch"', r"kernels.atention = 'torch': no such kernel family"),
        ('[kernels]\nattention.paged = "x"', r"kernels.attention.paged = 'x': no such kernel; "),
        ("[kernels", "is no TOML"),
    ],
)
def test_file_errors_name_file_key_and_what_there_is(tmp_path, text, message):
    path = tmp_path / "kernels.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        kernels.make_registry(config_file=path)
    assert str(path) in str(caught.value)


def test_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json: cannot be read: No such file"):
        kernels.make_registry(config_file=tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no table"):
        kernels.make_registry(config_file=tmp_path / "list.json")


# --- plugins --------------------------------------------------------------------------------------


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> str:
    monkeypatch.syspath_prepend(folder)
    return install(folder, **options)


def test_plugin_adds_a_candidate_that_is_chosen_and_named(tmp_path, monkeypatch):
    module = installed(tmp_path, monkeypatch)
    registry = kernels.make_registry()
    choice = registry.choose("norm", "rms_norm", CPU, FP32, {"num_tokens": 2, "size": 8})
    assert choice.candidate.name == "theirs"
    assert choice.candidate.origin.startswith(f"{module} 1.5 ")
    assert not registry.is_plain("norm", "rms_norm")
    assert registry.is_plain("norm", "add_rms_norm")
    assert registry.fingerprint != KernelRegistry(kernels.CANDIDATES).fingerprint


def test_plugin_that_clashes_is_refused(tmp_path, monkeypatch):
    module = installed(tmp_path, monkeypatch, name="torch")
    message = f"kernel plugin {module} 1.5: norm.rms_norm.torch is there already, from compiled-eng"
    with pytest.raises(ConfigError, match=message):
        kernels.make_registry()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"before": 'raise RuntimeError("no such card")'}, "RuntimeError: no such card"),
        ({"family": "norms"}, r"norms.rms_norm.theirs: no such family and mode; there are"),
        (
            {"schema": "norm(Tensor x, Tensor w, float eps) -> Tensor"},
            r"launch must take \(Tensor x, Tensor weight, float eps\)",
        ),
    ],
    ids=["raises", "family", "schema"],
)
def test_broken_plugin_costs_a_warning_that_names_it(tmp_path, monkeypatch, caplog, options, why):
    module = installed(tmp_path, monkeypatch, **options)
    with caplog.at_level(logging.WARNING):
        registry = kernels.make_registry()
    assert f"kernel plugin {module} 1.5 is left out" in caplog.text
    assert not [c for c in registry.candidates if c.origin]
    with pytest.raises(ConfigError, match=rf"could not be loaded: {module} 1.5: .*{why}"):
        kernels.make_registry(("norm=theirs",))


def test_families_name_ops_once_and_have_a_reference():
    places = [family.place for family in FAMILIES]
    assert len(places) == len(set(places))
    for family in FAMILIES:
        assert family_of(family.op.overload) is family
        found = KernelRegistry(kernels.CANDIDATES).of(family.family, family.mode)
        assert [c.name for c in found if c.priority is Priority.REFERENCE] == ["torch"]
        assert len({c.name for c in found}) == len(found)
    known = set(places)
    assert {f"{c.family}.{c.mode}" for c in kernels.CANDIDATES} == known
