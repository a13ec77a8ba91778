"""Kernels by measurement: what is measured, what is kept, what a damaged file costs."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch

from compiled_engine.custom_ops import tuning
from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.kernel_family import KernelFamily
from compiled_engine.custom_ops.kernels import make_registry
from compiled_engine.custom_ops.registry import Query, Target
from compiled_engine.custom_ops.tuning import KernelTuner, bucket_key, fastest
from compiled_engine.kernels.check import as_tuple

CPU = Target("cpu")
LINEAR = next(f for f in FAMILIES if f.place == "linear.any")


def query_of(num_tokens: int, family: KernelFamily = LINEAR) -> tuple[Query, dict[str, object]]:
    arguments = family.bind((torch.empty(num_tokens, 64), torch.empty(32, 64), None))
    traits = family.traits(arguments, CPU)
    query = Query(
        family=family.family, mode=family.mode, target=CPU, dtype=torch.float32, traits=traits
    )
    return query, arguments


@pytest.fixture
def timings(monkeypatch) -> list[str]:
    """Every timing counts here and gives what the test says: plain torch is faster."""
    taken: list[str] = []

    def calls_ms(calls, device, *, num_repeats):
        candidate = calls[0].args[0]
        calls[0]()  # it must be able to run
        taken.append(candidate.name)
        return [1.0 if candidate.name == "torch" else 2.0] * num_repeats

    monkeypatch.setattr(tuning, "calls_ms", calls_ms)
    return taken


def choose(folder: Path, num_tokens: int) -> str:
    registry = make_registry(objective="autotune", tuner=KernelTuner(folder))
    query, arguments = query_of(num_tokens)
    return registry.decide(query, arguments).candidate.name


def test_the_winner_is_measured_once_a_bucket_and_read_back(tmp_path, timings):
    assert choose(tmp_path, 3) == "torch"
    assert sorted(timings) == ["cpp", "torch"]
    assert choose(tmp_path, 4) == "torch"
    assert len(timings) == 2, "3 and 4 tokens are one bucket, kept by the first tuner"
    assert choose(tmp_path, 5) == "torch"
    assert len(timings) == 4
    (path,) = tmp_path.glob("*.json")
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) == 2
    assert all(entry == {"winner": "torch", "s": {"cpp": 2e-3, "torch": 1e-3}}
               for entry in entries.values())  # fmt: skip
    assert not list(tmp_path.glob("*.tmp"))


def test_the_choice_says_what_was_measured(tmp_path, timings):
    registry = make_registry(objective="autotune", tuner=KernelTuner(tmp_path))
    choice = registry.decide(*query_of(3))
    assert choice.reason == "measured fastest here: 1000.00 us"
    assert dict(choice.rejected)["cpp"] == "was measured at 2000.00 us"


@pytest.mark.parametrize(
    "damage",
    ["", "{", '{"entries": 3}', '{"generation": "a", "entries": {"k": {"winner": "x", "s": {}}}}'],
)
def test_a_damaged_file_costs_one_warning_and_a_new_measurement(tmp_path, timings, caplog, damage):
    choose(tmp_path, 3)
    before = KernelTuner(tmp_path).generation
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path, 3) == "torch"
    assert len(timings) == 4
    assert len([r for r in caplog.records if "kernels are measured anew" in r.message]) == 1
    assert KernelTuner(tmp_path).generation != before, "compiled code must not be reused"


def test_generation_is_kept_while_entries_are_added(tmp_path, timings):
    registry = make_registry(objective="autotune", tuner=KernelTuner(tmp_path))
    before = registry.fingerprint
    registry.decide(*query_of(3))
    assert registry.fingerprint == before
    assert make_registry(objective="autotune", tuner=KernelTuner(tmp_path)).fingerprint == before


def test_two_tuners_keep_each_others_measurements_and_agree(tmp_path, timings):
    first, second = KernelTuner(tmp_path), KernelTuner(tmp_path)
    fitting = make_registry().of("linear", "any")
    assert first.generation == second.generation
    threads = [
        threading.Thread(target=lambda t=t, n=n: t.measure(query_of(n)[0], fitting, query_of(n)[1]))
        for t, n in ((first, 2), (second, 8), (first, 100), (second, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["entries"]) == 3


def test_a_kernel_that_cannot_be_run_does_not_cost_the_others(tmp_path, monkeypatch, caplog):
    def calls_ms(calls, device, *, num_repeats):
        if calls[0].args[0].name == "cpp":
            raise RuntimeError("no compiler")
        return [1.0]

    monkeypatch.setattr(tuning, "calls_ms", calls_ms)
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path, 3) == "torch"
    assert "linear.any.cpp cannot be measured: RuntimeError: no compiler" in caplog.text


def test_the_ranked_one_stays_unless_another_is_clearly_faster():
    assert fastest(["a", "b"], {"a": 1.02, "b": 1.0}) == "a"
    assert fastest(["a", "b"], {"a": 1.05, "b": 1.0}) == "b"


def test_keys_tell_dtypes_shapes_and_candidates_apart():
    fitting = make_registry().of("linear", "any")
    keys = [bucket_key(query_of(n)[0], fitting, LINEAR) for n in (1, 2, 3, 4, 5)]
    assert len(set(keys)) == 4
    assert keys[2] == keys[3]
    assert bucket_key(query_of(2)[0], fitting[:1], LINEAR) != keys[1]
    assert "num_tokens=4" in keys[2]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.place)
def test_inputs_of_every_family_can_be_measured(family):
    """Shapes of an example become inputs on which its reference runs: sizes, not values."""
    given = family.op.example_inputs(torch.float32, torch.device("cpu"), 0)[1]
    arguments = family.bind(given)
    real = family.real_inputs(arguments, torch.device("cpu"))
    reference = next(c for c in make_registry().of(family.family, family.mode) if c.name == "torch")
    results = family.run(reference, real)
    expected = family.op.reference(*(v for n, v in arguments.items() if n != "impl"))
    for got, wanted in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert not got.is_floating_point() or not got.isnan().any()


def test_a_real_measurement_ends_with_a_winner(tmp_path):
    tuner = KernelTuner(tmp_path)
    fitting = make_registry().of("linear", "any")
    query, arguments = query_of(2)
    measured = tuner.measure(query, fitting, arguments)
    assert measured is not None
    assert set(measured.seconds) == {"cpp", "torch"}
    assert all(seconds > 0 for seconds in measured.seconds.values())


@pytest.mark.parametrize("is_there", [False, True], ids=["no-folder", "no-lock"])
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, timings, caplog, is_there):
    place = tmp_path / "kernels"
    if is_there:  # the lock cannot be opened
        place.mkdir()
        KernelTuner(place).path.with_suffix(".lock").mkdir()
    else:
        place.write_text("in the way")
    registry = make_registry(objective="autotune", tuner=KernelTuner(place))
    with caplog.at_level(logging.WARNING):
        for num_tokens in (3, 4, 9):
            query, arguments = query_of(num_tokens)
            assert registry.decide(query, arguments).candidate.name == "torch"
    unkept = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(unkept) == 1
    assert len(timings) == 4, "two buckets, each measured once in this process"
