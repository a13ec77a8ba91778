"""Tuning without an engine: what is compared, what is chosen, stages, the file."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.custom_ops.registry import Measured
from compiled_engine.errors import EngineError
from compiled_engine.settings_file import TunedFor, read_settings_file
from compiled_engine.tune.candidates import LIMITS_MS, bench_config, candidates
from compiled_engine.tune.choose import TOKENS_PER_S, choose_best, choose_limit, not_measured
from compiled_engine.tune.measure import (
    Deadline,
    JobResult,
    Limits,
    TimeUp,
    Trial,
    measure_in_turns,
)
from compiled_engine.tune.recipe import Recipe, as_toml, write_recipe
from compiled_engine.tune.stages import Plan, Stages
from compiled_engine.tune.winners import winner_lines
from compiled_engine.tune.workloads import WORKLOADS, Job, workload
from tests.helpers.source_tree import ROOT


def result(rate: float, itl_ms: float = 10.0) -> JobResult:
    """A job of 1000 tokens at `rate` tokens per second."""
    return JobResult(1000 / rate, 1000, [itl_ms] * 20, [1e6 / rate])


def trial(value: Any, *rates: float, itl_ms: float = 10.0) -> Trial[Any]:
    return Trial(value, [result(rate, itl_ms) for rate in rates])


def settings(kind: str = "cpu", **changes: Any) -> Any:
    values = {
        "device": torch.device(kind),
        "chunked_prefill_size": 512,
        "max_num_seqs": 64,
        "max_model_len": 8192,
        "num_pages": 100_001,
    }
    return SimpleNamespace(**{**values, **changes})


# --- choosing ---


def test_a_clear_win_is_chosen_with_its_numbers():
    trials = [trial(512, 100, 101, 99), trial(256, 120, 121, 119), trial(128, 90, 90, 91)]
    decision = choose_best("chunked_prefill_size", trials, TOKENS_PER_S)
    assert (decision.value, decision.chosen) == (256, 256)
    assert "512 (default): 100 (99 to 101) tok/s; 256: 120 (119 to 121)" in decision.reason
    assert decision.reason.endswith("256 is better")


@pytest.mark.parametrize(
    "other",
    [(101, 101, 101), (105, 90, 110), (99, 99, 99)],
    ids=["less than the least margin", "less than its spread", "worse"],
)
def test_what_may_be_noise_keeps_the_default(other):
    decision = choose_best("x", [trial(512, 100, 100, 100), trial(256, *other)], TOKENS_PER_S)
    assert decision.value is None
    assert decision.chosen == 512
    assert decision.is_measured
    assert "is noise: the default is kept" in decision.reason


def test_the_default_s_own_spread_is_noise_too():
    decision = choose_best("x", [trial(512, 80, 100, 120), trial(256, 115, 116, 117)], TOKENS_PER_S)
    assert decision.value is None
    assert decision.reason.endswith("the machine was too busy to tell, the default is kept")


def test_of_equal_winners_the_one_next_to_the_default_is_taken():
    trials = [trial(512, 100, 100), trial(256, 150, 150), trial(128, 151, 151)]
    assert choose_best("x", trials, TOKENS_PER_S).value == 256


def test_without_two_whole_rounds_nothing_is_chosen():
    trials = [trial(512, 100, 100), trial(256, 200)]
    decision = choose_best("x", trials, TOKENS_PER_S)
    assert (decision.value, decision.is_measured, decision.trials) == (None, False, ())
    assert "not measured (the time was up before it): the default is kept" in decision.reason
    limited = choose_limit("y", trials, TOKENS_PER_S, 0.1)
    assert (limited.chosen, limited.is_measured) == (None, False)


def test_the_shortest_steps_that_cost_little_give_the_limit():
    trials = [
        trial(None, 100, 100, itl_ms=200),
        trial(50.0, 99, 99, itl_ms=50),
        trial(25.0, 96, 96, itl_ms=25),
        trial(10.0, 80, 80, itl_ms=10),
    ]
    assert choose_limit("max_step_ms", trials, TOKENS_PER_S, 0.05).value == 25.0
    assert choose_limit("max_step_ms", trials, TOKENS_PER_S, 0.02).value == 50.0
    kept = choose_limit("max_step_ms", trials, TOKENS_PER_S, 0.0)
    assert kept.value is None
    assert kept.reason.endswith("no limit, which is the default")


def test_a_limit_that_changes_nothing_is_not_set():
    trials = [trial(None, 100, 100, itl_ms=20), trial(50.0, 100, 100, itl_ms=20)]
    assert choose_limit("max_step_ms", trials, TOKENS_PER_S, 0.05).value is None


# --- what is compared ---


def test_a_cpu_compares_chunks_rows_and_kernels():
    found = candidates(EngineConfig(model="m"), settings(), workload("agentic", "cpu"))
    assert found.chunks == (512, 256, 128)
    assert found.rows == (64, 32, 16)
    assert found.objectives == ("latency", "autotune")
    assert found.limits_ms == ()
    assert found.reasons == {"max_step_ms": "GPU only"}


def test_throughput_on_a_gpu_tries_more_than_the_default():
    here = settings("cuda", chunked_prefill_size=8192, max_num_seqs=256)
    wanted = workload("throughput", "cuda")
    found = candidates(EngineConfig(model="m"), here, wanted)
    assert found.chunks == (8192, 4096, 2048, 16384)
    assert found.rows == (256, 128, 64, 512)
    assert found.limits_ms == (None, *LIMITS_MS)
    config = bench_config(EngineConfig(model="m"), here, found, wanted)
    assert (config.chunked_prefill_size, config.max_num_seqs) == (16384, 512)
    assert config.max_step_ms == LIMITS_MS[0]
    assert config.max_total_tokens == 128 * (1024 + 128 + 16)


def test_what_is_given_is_not_compared():
    config = EngineConfig(
        model="m", chunked_prefill_size=64, max_num_seqs=4, kernels=("attention=torch",)
    )
    found = candidates(config, settings(), workload("agentic", "cpu"))
    assert (found.chunks, found.rows, found.objectives) == ((), (), ())
    assert found.reasons["max_num_seqs"] == "given"
    eager = candidates(
        EngineConfig(model="m", enforce_eager=True), settings(), workload("latency", "cpu")
    )
    assert "--enforce-eager" in eager.reasons["kernel_objective"]
    assert "few requests" in eager.reasons["max_num_seqs"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_jobs_fit_any_model(name, kind):
    wanted = workload(name, kind)
    for longest in (40, 500, 131_072):
        fitted = wanted.within(longest)
        for job in (fitted.main, fitted.crowd):
            if job is not None:
                assert job.longest <= longest
                assert min(job.first, job.output) >= 1
    assert wanted.within(131_072) == wanted


def test_tokens_of_a_job_are_those_of_its_requests():
    job = Job(num_conversations=2, at_once=1, shared=10, first=20, later=5, turns=2, output=3)
    assert job.longest == 10 + 20 + 3 + 5 + 3
    assert job.num_tokens == 2 * ((30 + 3) + (30 + 3 + 5 + 3))


# --- turns and time ---


class Clock:
    """Seconds that only pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_values_take_turns_in_another_order_each_round():
    seen = []

    def run(value: str, seed: int) -> JobResult:
        seen.append((value, seed))
        return result(100)

    trials = measure_in_turns(
        ("a", "b"), run, num_repeats=2, deadline=Deadline(1e9), on_done=lambda: None
    )
    assert seen == [("a", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(t.results) for t in trials] == [2, 2]


def test_a_round_that_was_not_finished_does_not_count():
    clock = Clock()

    def run(value: str, seed: int) -> JobResult:
        clock.now += 1
        return result(100)

    trials = measure_in_turns(
        ("a", "b"), run, num_repeats=9, deadline=Deadline(6.0, clock), on_done=lambda: None
    )
    assert clock.now == 6.0
    assert [len(t.results) for t in trials] == [2, 2]


# --- stages ---


class FakeBench:
    """Rates by setting instead of an engine; a second passes with each run."""

    def __init__(self, clock: Clock, factor: float = 1.0, **best: Any) -> None:
        self.clock, self.factor, self.best = clock, factor, best
        self.seen: list[Limits] = []

    def run(self, job: Job, limits: Limits, seed: int) -> JobResult:
        self.clock.now += 1
        self.seen.append(limits)
        rate = 100.0 * self.factor
        for name, value in self.best.items():
            rate *= 1.5 if getattr(limits, name) == value else 1.0
        return result(rate, itl_ms=100.0 if limits.limit_ms is None else limits.limit_ms)


def stages(bench: FakeBench, second: Any, seconds: float = 1e9, kind: str = "cpu") -> Stages:
    here, wanted = settings(kind), workload("agentic", kind)
    config = EngineConfig(model="m")
    plan = Plan(
        config=config,
        settings=here,
        workload=wanted,
        candidates=candidates(config, here, wanted),
    )
    return Stages(plan, bench, second, Deadline(seconds, bench.clock))


def test_each_stage_builds_on_what_the_ones_before_chose():
    clock = Clock()
    bench = FakeBench(clock, chunk=256, rows=32)
    other = FakeBench(clock, factor=2.0, chunk=256, rows=32)
    decisions = stages(bench, lambda: (other, ""), kind="cuda").run()
    assert {d.name: d.value for d in decisions} == {
        "chunked_prefill_size": 256,
        "max_step_ms": 10.0,
        "max_num_seqs": 32,
        "kernel_objective": "autotune",
    }
    assert set(other.seen) == {Limits(chunk=256, limit_ms=10.0, rows=32)}


def test_an_engine_that_cannot_be_had_keeps_the_kernels():
    decisions = stages(FakeBench(Clock()), lambda: (None, "no memory")).run()
    assert decisions[-1].value is None
    assert "not measured (no memory)" in decisions[-1].reason


def test_what_there_was_no_time_for_is_said():
    def never() -> Any:
        raise AssertionError("no time for a second engine")

    decisions = stages(FakeBench(Clock(), chunk=128), never, seconds=12).run()
    assert decisions[0].value == 128
    assert {d.name for d in decisions if not d.is_measured} == {
        "max_step_ms",
        "max_num_seqs",
        "kernel_objective",
    }
    assert "the time was up before it" in decisions[-1].reason


def test_a_second_engine_that_takes_too_long_is_given_up():
    def slow() -> Any:
        raise TimeUp

    decisions = stages(FakeBench(Clock()), slow).run()
    assert "the time was up before it" in decisions[-1].reason


# --- the file ---

TUNED = TunedFor(
    model="m",
    model_digest="0123",
    device='a "GPU"',
    workload="agentic: so much",
    date="2026-01-01",
    versions={"torch": "2.0", "compiled-engine": "0.1"},
)


def recipe() -> Recipe:
    return Recipe(
        given={"quantization": "fp8", "disable_passes": ("a", "b"), "dump_graphs": Path("/x")},
        decisions=[
            choose_best("chunked_prefill_size", [trial(512, 1, 1), trial(256, 2, 2)], TOKENS_PER_S),
            choose_best("max_num_seqs", [trial(64, 1, 1), trial(32, 1, 1)], TOKENS_PER_S),
            choose_limit(
                "max_step_ms",
                [trial(None, 1, 1, itl_ms=99), trial(15.0, 1, 1, itl_ms=15)],
                TOKENS_PER_S,
                0.05,
            ),
            not_measured("kernel_objective", "latency", "it\nfailed"),
        ],
        tuned=TUNED,
        notes=["attention.paged: cuda 1.0 us"],
    )


@pytest.mark.parametrize("name", ["tuned.toml", "tuned.json"])
def test_what_is_written_is_what_config_reads(name, tmp_path):
    path = tmp_path / name
    write_recipe(recipe(), path)
    found = read_settings_file(path)
    assert found.values == {
        "quantization": "fp8",
        "disable_passes": ("a", "b"),
        "dump_graphs": Path("/x"),
        "chunked_prefill_size": 256,
        "max_step_ms": 15.0,
    }
    assert found.tuned is not None
    assert replace(found.tuned, reasons={}) == TUNED
    assert "256: 2 (2 to 2) tok/s" in path.read_text()
    assert "attention.paged: cuda 1.0 us" in path.read_text()
    assert EngineConfig(model="m", **found.values).chunked_prefill_size == 256
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_default_that_is_kept_is_a_comment_with_its_reason():
    text = as_toml(recipe())
    assert "# 32: 1 (1 to 1) tok/s" in text
    assert "# max_num_seqs = 64" in text
    assert "# not measured (it failed): the default is kept" in text
    assert "max_num_seqs" not in tomllib.loads(text)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(EngineError, match="No space left"):
        write_recipe(recipe(), tmp_path / "tuned.toml")
    assert not list(tmp_path.iterdir())


def test_kernels_are_named_for_each_bucket_of_shapes():
    entries = {
        "linear.any float32 ; k=64, m=8; cpp, torch": Measured("cpp", {"torch": 2e-6, "cpp": 1e-6}),
        "linear.any float32 ; k=64, m=1; cpp, torch": Measured("torch", {"torch": 2e-6}),
    }
    tuner: Any = SimpleNamespace(entries=entries, asked=set(), path=Path("/c/kernels/ab.json"))
    head, *lines = winner_lines(tuner)
    assert "kernels/ab.json" in head
    assert "of every model" in head
    assert lines[1] == "linear.any float32; k=64, m=8: cpp 1.0 us, torch 2.0 us"
    tuner.asked = {next(iter(entries))}
    assert len(winner_lines(tuner)) == 2
    tuner.entries = {}
    assert winner_lines(tuner) == []


def test_recipes_that_are_kept_can_be_read():
    found = list((ROOT / "perf" / "recipes").rglob("*.toml"))
    assert found
    for path in found:
        assert read_settings_file(path).tuned is not None, path
