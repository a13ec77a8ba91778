"""`compiled-engine kernels list | check | bench` on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re

import pytest
import torch

from compiled_engine import cli
from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.kernels import CANDIDATES, make_registry
from compiled_engine.custom_ops.registry import Candidate, KernelRegistry, Priority
from compiled_engine.kernels import bench, ceilings, check
from compiled_engine.kernels.ceilings import Ceilings
from perf import cpu_ops

DEVICE = torch.device("cpu")
GATES = ("silu_and_mul", "gelu_and_mul", "swiglu_clamped")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code = cli.main(["kernels", *arguments, "--json"])
    assert code == 0
    return json.loads(capsys.readouterr().out)


# --- list -----------------------------------------------------------------------------------------


def test_list_names_every_candidate_and_why_it_cannot_run(capsys):
    rows = run_json(capsys, "list", "--device", "cpu")["kernels"]
    assert {(r["place"], r["name"]) for r in rows} == {
        (f"{c.family}.{c.mode}", c.name) for c in CANDIDATES
    }
    reasons = {(r["place"], r["name"]): r["reason"] for r in rows}
    assert reasons["attention.paged", "cuda"] == "runs on cuda, not on cpu"
    assert reasons["attention.paged", "cpp"] == ""


def test_list_for_a_gpu_that_is_not_here(capsys):
    for arch, reason in (("90", ""), ("80", "needs sm_90, this is sm_80")):
        rows = run_json(capsys, "list", "--device", "cuda", "--arch", arch)["kernels"]
        found = {(r["place"], r["name"]): r["reason"] for r in rows}
        assert found["fused_linear.few", "mma"] == reason


def test_list_as_a_table_shows_one_family(capsys):
    assert cli.main(["kernels", "list", "--device", "cpu", "--only", "sampling"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"sampling\.threshold +cpp +TUNED +cpu +yes", out)
    assert "attention" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--only", "norms"], "--only norms: no such family; there are activation"),
        (["list", "--arch", "90"], "--arch describes a GPU: it needs --device cuda"),
        (["list", "--device", "cuda", "--arch", "9"], "--arch is 9; allowed is 50 to 130"),
        (["check", "--num-seeds", "0"], "--num-seeds is 0; allowed is at least 1"),
        (["bench", "--num-tokens", "0"], "--num-tokens is 0; allowed is at least 1"),
    ],
)
def test_wrong_options_are_refused(capsys, arguments, message):
    assert cli.main(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- check ----------------------------------------------------------------------------------------


def test_check_runs_every_candidate_of_the_cpu(capsys):
    document = run_json(capsys, "check", "--num-seeds", "1")
    assert document["num_failed"] == 0
    ran = {(r["place"], r["name"]) for r in document["results"] if r["status"] == "OK"}
    assert {(f"{c.family}.{c.mode}", c.name) for c in CANDIDATES if c.device_type != "cuda"} == ran
    assert all(r["num_cases"] > 0 for r in document["results"] if r["status"] == "OK")
    skipped = [r for r in document["results"] if r["status"] == "-"]
    assert all("runs on cuda" in r["reason"] for r in skipped)


def test_what_is_interpreted_exists():
    """`TRITON_INTERPRET=1 compiled-engine kernels check` calls it by this name."""
    named = {c.interpreted for c in CANDIDATES if c.interpreted}
    assert {f"activation_triton:{gate}" for gate in GATES} <= named
    for spelled in named:
        module, _, name = spelled.partition(":")
        found = importlib.import_module(f"compiled_engine.custom_ops.{module}")
        assert callable(getattr(found, name))


def norm_with(launch: object, **fields: object) -> KernelRegistry:
    """A registry with one more candidate of `norm.rms_norm`."""
    wrong = Candidate(
        family="norm", mode="rms_norm", name="wrong", priority=Priority.TUNED, launch=launch,
        **fields,
    )  # fmt: skip
    return KernelRegistry((*CANDIDATES, wrong))


def failures_of(registry: KernelRegistry) -> list[str]:
    results = check.check_kernels(registry, DEVICE, only="norm.rms_norm", num_seeds=1)
    return [r.reason for r in results if r.status == check.FAILED]


def test_check_finds_values_that_are_off_a_little():
    def off(x, weight, eps):
        return torch.ops.ce.rms_norm.default(x, weight, eps) * (1 + 3e-5)

    (reason,) = failures_of(norm_with(off, dtypes=(torch.float32,)))
    assert re.match(r"example 0, seed 0: off by \d+\.\d times what is allowed", reason)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.half(), "torch.float16, expected torch.float32"),
        (lambda y: y[..., :-1], "shape"),
        (lambda y: y + torch.nan, "NaN in other places"),
        (lambda y: (y, y), "2 results, expected 1"),
    ],
    ids=["dtype", "shape", "nan", "count"],
)
def test_check_finds_wrong_results(change, message):
    def wrong(x, weight, eps):
        return change(torch.ops.ce.rms_norm.default(x, weight, eps))

    (reason,) = failures_of(norm_with(wrong, dtypes=(torch.float32,)))
    assert message in reason


def test_check_finds_bits_that_differ_from_run_to_run():
    calls = []

    def unsteady(x, weight, eps):
        calls.append(1)
        return torch.ops.ce.rms_norm.default(x, weight, eps) * (1 + 1e-7 * (len(calls) % 2))

    given = {"dtypes": (torch.float32,), "tags": ("deterministic",)}
    (reason,) = failures_of(norm_with(unsteady, **given))
    assert "other bits the second time" in reason
    assert failures_of(norm_with(unsteady, dtypes=(torch.float32,))) == []


def test_check_fails_what_nothing_checks(capsys, monkeypatch):
    picky = norm_with(torch.ops.ce.rms_norm.default, rejects=lambda _: "takes nothing")
    assert failures_of(picky) == ["no case fits it: it is checked by nothing"]
    monkeypatch.setattr("compiled_engine.custom_ops.kernels.make_registry", lambda: picky)
    assert cli.main(["kernels", "check", "--only", "norm.rms_norm"]) == 1
    assert "FAIL no case fits it" in capsys.readouterr().out


def test_tolerances_grow_with_the_sum_and_shrink_with_the_dtype():
    family = next(f for f in FAMILIES if f.place == "linear.any")
    short, long = {"x": torch.empty(1, 16)}, {"x": torch.empty(1, 4096)}
    limit = family.tolerance.limit
    assert limit(torch.float32, short) < limit(torch.float32, long) < 1e-4
    assert limit(torch.float16, long) < limit(torch.bfloat16, long) < 0.01


# --- bench ----------------------------------------------------------------------------------------


def test_bench_measures_ceilings_and_shares(capsys, monkeypatch):
    monkeypatch.setattr(ceilings, "CPU_BYTES", 2**24)
    arguments = ["bench", "--only", "norm", "--num-tokens", "3", "--num-repeats", "1"]
    document = run_json(capsys, *arguments, "--device", "cpu")
    assert document["read_tb_s"] > 0
    assert document["matmul_tflop_s"] > 0
    ran = [t for t in document["timings"] if t["us"] is not None]
    assert {t["place"] for t in ran} == {
        f"norm.{name}" for name in ("rms_norm", "add_rms_norm", "scaled_rms_norm")
    }
    for timing in ran:
        moved = timing["tb_s"] * timing["us"]
        floor_us = moved / document["read_tb_s"]
        assert timing["share"] == pytest.approx(floor_us / timing["us"], rel=1e-3)
        assert timing["bound"] == "bytes"
    (norm,) = [t for t in ran if t["place"] == "norm.rms_norm"]
    assert norm["tb_s"] * norm["us"] * 1e6 == pytest.approx((2 * 3 * 576 + 576) * 4)
    assert {entry["place"] for entry in document["fastest"]} == {t["place"] for t in ran}


def test_rows_of_a_bench_keep_its_repeats(monkeypatch):
    taken = [3e-3, 2e-3, 8e-3]
    monkeypatch.setattr(bench, "calls_ms", lambda calls, *_, **__: taken)
    shapes = dataclasses.replace(check.SMALL["cpu"], dtype=torch.float32)
    options = bench.Options(shapes=shapes, num_tokens=(2,), only="norm.rms_norm")
    timings = bench.bench_kernels(make_registry(), DEVICE, Ceilings(1e12, 1e13), options)
    left_out = next(t for t in timings if t.us is None)
    assert left_out.repeats_us == ()
    ran = next(t for t in timings if t.us is not None)
    assert ran.us == pytest.approx(2.0)
    time, share, moved, _ = cpu_ops.rows(dataclasses.asdict(ran))
    assert time.values == pytest.approx([3.0, 2.0, 8.0])
    assert share.values == pytest.approx([ran.share * 2 / 3, ran.share, ran.share / 4])
    assert moved.values[0] * time.values[0] == pytest.approx(ran.tb_s * 1e3 * 2)
    documents = iter((0.5, 0.7))

    def one(*_: object) -> dict[str, object]:
        return {
            "timings": [dataclasses.asdict(ran)],
            "matmul_tflop_s": 1,
            "read_tb_s": next(documents),
        }

    monkeypatch.setattr(cpu_ops, "bench", one)
    outcome = cpu_ops.run(cpu_ops.Options(only="norm.rms_norm,norm.add_rms_norm"), lambda _: None)
    (read,) = (entry for entry in outcome.measured if entry.metric == "read_gb_s")
    assert read.values == [500.0, 700.0]


def test_bench_times_every_family_at_tiny_shapes(monkeypatch):
    """Costs, inputs and candidates of each fit together, those without bench cases too."""
    monkeypatch.setattr(bench, "calls_ms", lambda calls, *_, **__: [1.0])
    shapes = dataclasses.replace(check.SMALL["cpu"], dtype=torch.float32)
    options = bench.Options(shapes=shapes, num_tokens=(2, 300), num_repeats=1)
    timings = bench.bench_kernels(make_registry(), DEVICE, Ceilings(1e12, 1e13), options)
    ran = {t.place for t in timings if t.us is not None}
    assert ran == {family.place for family in FAMILIES}
    assert all(t.share > 0 for t in timings if t.us is not None), "a cost of nothing"
    assert all(t.reason for t in timings if t.us is None)
    prompt = next(t for t in timings if t.case == "prompt 1x300" and t.name == "cpp")
    head = shapes.head_dim * shapes.num_heads
    assert prompt.tflop_s * 1e9 == pytest.approx(4 * head * 300 * 301 / 2)


def test_products_of_8_bit_numbers_are_judged_by_their_own_rate():
    both, one = Ceilings(1e12, 1e13, 2e13), Ceilings(1e12, 1e13)
    assert both.floor_s(1e3, 1e6) == one.floor_s(1e3, 1e6) == 1e6 / 1e13
    assert both.floor_s(1e3, 1e6, is_8bit=True) == 1e6 / 2e13
    assert one.floor_s(1e3, 1e6, is_8bit=True) == 1e6 / 1e13
    shapes = dataclasses.replace(check.SMALL["cpu"], dtype=torch.float32)
    options = bench.Options(shapes=shapes, num_tokens=(2,), only="scaled_linear", num_repeats=1)
    quick, slow = (
        next(t for t in bench.bench_kernels(make_registry(), DEVICE, given, options) if t.us)
        for given in (Ceilings(1e30, 1e6, 2e6), Ceilings(1e30, 1e6))
    )
    assert quick.share * quick.us == pytest.approx(slow.share * slow.us / 2)
    assert quick.bound == "operations"


def test_bench_takes_the_shapes_of_a_model(capsys, tmp_path, monkeypatch):
    from tests.helpers.tiny_model import write_tiny_model

    monkeypatch.setattr(ceilings, "CPU_BYTES", 2**20)
    folder = write_tiny_model(tmp_path / "model")
    arguments = ["bench", "--only", "activation", "--num-repeats", "1", "--model", str(folder)]
    document = run_json(capsys, *arguments, "--device", "cpu")
    assert document["shapes"]["inner"] == 96
    assert {t["case"] for t in document["timings"]} == {"1x192", "32x192"}
    assert {t["place"] for t in document["timings"]} == {f"activation.{gate}" for gate in GATES}
