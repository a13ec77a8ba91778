"""`compiled-engine tune` with real engines: what it writes, refusals, interruption, time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiled_engine import cli
from compiled_engine.commands import tune
from compiled_engine.commands.flags import config_from_args
from compiled_engine.config import EngineConfig
from compiled_engine.settings_file import read_settings_file
from compiled_engine.tune import stages, workloads
from compiled_engine.tune.measure import Deadline, EngineBench, Limits, TimeUp
from compiled_engine.tune.workloads import Job
from tests.helpers import gpu_engine
from tests.helpers.commands import refusal, run
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model

SMALL = Job(num_conversations=3, at_once=2, shared=8, first=24, later=4, turns=2, output=4)
EAGER = ("--enforce-eager", "--device", "cpu", "--max-model-len", "128", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tune") / "tiny")


@pytest.fixture
def few_runs(monkeypatch):
    """Two rounds of small jobs: what is chosen does not matter."""
    monkeypatch.setattr(workloads, "_MAIN", {("agentic", "cpu"): SMALL, ("latency", "cpu"): SMALL})
    crowd = Job(num_conversations=4, at_once=4, first=8, output=3)
    monkeypatch.setattr(workloads, "_CROWD", {"cpu": crowd})
    monkeypatch.setattr(stages.Plan, "num_repeats", 2)


def test_the_file_is_accepted_and_gives_what_was_chosen(model, few_runs, tmp_path, capsys):
    output = tmp_path / "tuned.toml"
    document = run(capsys, "tune", model, "--output", output, *EAGER)
    assert document["command"] == "tune"
    assert document["not_measured"] == ["max_step_ms", "kernel_objective"]
    assert "tok/s" in document["reasons"]["chunked_prefill_size"]
    args = cli.build_parser()[0].parse_args(["serve", str(model), "--config", str(output)])
    config = config_from_args(EngineConfig, args)
    for name, value in document["values"].items():
        assert getattr(config, name) == value
    assert config.enforce_eager
    tuned = read_settings_file(output).tuned
    assert tuned is not None
    assert tuned.model == "tiny"
    # The same model on the same device: no warning.
    answer = run(capsys, "bench", "latency", model, "--config", output, "--batch-size", "1",
                 "--num-repeats", "1", "--output-len", "4", "--input-len", "8")  # fmt: skip
    assert answer["config"]["max_model_len"] == 128


def test_the_table_shows_every_candidate(model, few_runs, tmp_path, capsys):
    argv = ["tune", str(model), "--output", str(tmp_path / "t.json"), "--workload", "latency"]
    assert cli.main([*argv, *EAGER]) == 0
    out = capsys.readouterr().out
    for chunk in ("512", "256", "128", "64"):
        assert chunk in out
    assert "max_num_seqs: not measured (latency has few requests at once)" in out


def test_smaller_steps_and_fewer_rows_are_limits_of_one_engine(model):
    engine = tiny_engine(model)
    bench = EngineBench(engine, Deadline(60))
    sizes, running = [], []
    launch = engine.loop.executor.launch

    def watched(inbox, params, key, **options):
        sizes.append(key.num_tokens)
        running.append(len(engine.loop.rows_in_use()))
        return launch(inbox, params, key, **options)

    engine.loop.executor.launch = watched
    result = bench.run(SMALL, Limits(chunk=16, limit_ms=None, rows=2), seed=1)
    assert max(sizes) == 16
    assert max(running) == 2
    assert result.num_tokens == SMALL.num_tokens
    assert len(result.requests_ms) == SMALL.num_conversations * SMALL.turns
    assert len(result.itls_ms) == SMALL.num_conversations * SMALL.turns * (SMALL.output - 1)
    sizes.clear()
    bench.run(SMALL, Limits(chunk=64, limit_ms=None, rows=1), seed=1)
    assert max(sizes) == 64
    assert engine.loop.choice.max_tokens == engine.loop.executor.buckets[-1]


def test_a_job_ends_with_the_time_and_leaves_the_engine_usable(model):
    engine = tiny_engine(model)
    seconds = iter(range(1000))
    limits = Limits(chunk=64, limit_ms=None, rows=2)
    with pytest.raises(TimeUp):
        EngineBench(engine, Deadline(6, lambda: next(seconds))).run(SMALL, limits, seed=1)
    assert next(seconds) < 12
    assert not engine.loop.has_work
    result = EngineBench(engine, Deadline(60)).run(SMALL, limits, seed=1)
    assert len(result.requests_ms) == SMALL.num_conversations * SMALL.turns


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-minutes", "0"], "--max-minutes is 0; allowed is more than 0 to 1440"),
        (["--output", "/no/such/folder/t.toml"], "no such folder"),
        (["--output", "t.yaml"], "its name must end with .toml or .json"),
        (["--output", "/dev/null"], "must end with"),
        (["--compile-mode", "eager-first"], "--compile-mode eager-first"),
        (["--max-step-ms", "5", "--device", "cpu", "--output", "x.toml"], "needs a GPU"),
        (
            [
                *("--chunked-prefill-size", "64", "--max-num-seqs", "4", "--enforce-eager"),
                *("--device", "cpu", "--output", "x.toml"),
            ],
            "every setting that tune measures is given",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_work_is_refused(argv, said, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said in refusal(capsys, "tune", model, *argv)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_not_overwritten(model, tmp_path, capsys):
    output = tmp_path / "t.toml"
    output.write_text("mine")
    assert "is there already" in refusal(capsys, "tune", model, "--output", output)
    assert output.read_text() == "mine"


def test_no_time_writes_nothing_and_says_so(model, few_runs, tmp_path, capsys):
    output = tmp_path / "t.toml"
    argv = ["tune", str(model), "--output", str(output), "--max-minutes", "0.000001", *EAGER]
    assert cli.main(argv) == 1
    assert "raise --max-minutes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ctrl_c_closes_the_engine_and_leaves_no_file(
    model, few_runs, tmp_path, monkeypatch, capsys
):
    closed = []

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineBench, "run", interrupted)
    monkeypatch.setattr("compiled_engine.engine.Engine.close", lambda self: closed.append(self))
    assert cli.main(["tune", str(model), "--output", str(tmp_path / "t.toml"), *EAGER]) == 130
    assert len(closed) == 1
    assert not list(tmp_path.iterdir())


def test_the_command_s_workloads_are_those_there_are():
    assert tune._WORKLOADS == workloads.WORKLOADS
    assert tune._WORKLOADS[0] == workloads.DEFAULT_WORKLOAD


@pytest.mark.slow
@pytest.mark.e2e
def test_a_real_ctrl_c_ends_the_process(model, tmp_path):
    command = [sys.executable, "-m", "compiled_engine.cli", "tune", str(model)]
    command += ["--output", str(tmp_path / "t.toml"), *EAGER]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("compiling: done"):
            break
    time.sleep(0.5)  # it measures now
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    process.stderr.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_measures_every_setting(few_runs, tmp_path, monkeypatch, capsys):
    folder = write_tiny_model(tmp_path / "gpu", family="qwen3", **gpu_engine.SHAPE)
    job = Job(num_conversations=4, at_once=4, shared=64, first=400, later=40, turns=2, output=16)
    crowd = Job(num_conversations=40, at_once=40, first=32, output=8)
    monkeypatch.setattr(workloads, "_MAIN", {("agentic", "cuda"): job})
    monkeypatch.setattr(workloads, "_CROWD", {"cuda": crowd})
    output = tmp_path / "t.toml"
    cache = ["--cache-dir", str(tmp_path / "cache"), "--device", "cuda"]
    document = run(capsys, "tune", folder, "--output", output, *cache)
    assert document["not_measured"] == []
    assert "50 ms: " in document["reasons"]["max_step_ms"]
    answer = run(capsys, "bench", "throughput", folder, "--config", output, *cache,
                 "--num-requests", "4")  # fmt: skip
    assert answer["num_output_tokens"] == 4 * 64


@pytest.mark.slow
def test_compiled_kernels_are_measured_on_a_second_engine(
    model, few_runs, tmp_path, monkeypatch, capsys
):
    """All stages for real; that the measured kernels win is made sure of."""
    from compiled_engine.tune import choose

    monkeypatch.setattr(choose, "_gain", lambda default, other, metric: 1.0)
    output = tmp_path / "t.toml"
    argv = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "128"]
    argv += ["--cache-dir", str(tmp_path / "cache"), "--chunked-prefill-size", "64"]
    document = run(capsys, "tune", model, "--output", output, *argv)
    assert document["values"]["kernel_objective"] == "autotune"
    assert document["not_measured"] == ["chunked_prefill_size", "max_step_ms"]
    text = output.read_text()
    assert "# Kernels that autotune chose" in text
    assert "# linear.any float32; " in text
    check = run(
        capsys, "warmup", model, "--config", output, "--cache-dir", tmp_path / "cache",
        "--max-num-seqs", "64",
    )  # fmt: skip
    assert check["counters"]["num_graphs"] == 0
