"""Processes that compile for a start: what they are told, what they leave in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine import build_ahead
from compiled_engine.build_ahead import BuildProcesses, building_ahead, num_jobs
from compiled_engine.build_parts import list_parts
from compiled_engine.build_worker import open_maker, shortened
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.piece import Piece
from compiled_engine.config import EngineConfig
from compiled_engine.layer_kinds import layer_kinds
from compiled_engine.models import ARCHITECTURES, ModelConfig
from compiled_engine.models.config import load_model_config
from compiled_engine.models.weights import outline_model
from compiled_engine.pieces import layer_versions
from compiled_engine.sampler import Variant
from compiled_engine.start_table import StartMeter
from compiled_engine.start_times import StartPhase
from tests.helpers.engines import run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model

CPU = torch.device("cpu")
SAYS = '{"part": "one"}'


def config(folder: Path, cache: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 20,
        "chunked_prefill_size": 64,
        "block_size": 4,
        "device": "cpu",
        "cache_dir": cache,
    }
    return EngineConfig(model=str(folder), **{**defaults, **options})


def test_every_version_and_variant_is_in_a_part():
    for is_gpu in (False, True):
        versions = layer_versions(8192, 256, is_gpu=is_gpu, has_last=is_gpu)
        parts = list_parts(versions, is_gpu=is_gpu, scheduler="cuda" if is_gpu else "torch")
        assert {p.version for p in parts if p.piece == "layer"} == set(versions)
        assert {p.variant for p in parts if p.piece == "sampler"} == set(Variant)
        for version in versions:
            shares = [p.share for p in parts if p.version == version]
            assert sorted(shares) == [(index, len(shares)) for index in range(len(shares))]


def test_processes_by_device_and_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plain = config(tmp_path, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    cuda = torch.device("cuda")
    monkeypatch.setattr(build_ahead, "MOST_ON_GPU", 8)
    assert num_jobs(plain, CPU) == 1
    assert num_jobs(plain, cuda) == 8
    assert num_jobs(replace(plain, compile_jobs=3), CPU) == 3
    measured = replace(plain, compile_jobs=3, kernel_objective="autotune")
    assert num_jobs(measured, cuda) == 1, "what one measures the others would disturb"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert num_jobs(plain, cuda) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_shortened_model_has_each_kind_of_layer(tmp_path: Path, architecture: str):
    folder = write_tiny_model(tmp_path / "model", family=architecture)
    whole = load_model_config(folder, "auto")
    short = shortened(whole, torch.float32)
    assert replace(short, num_layers=whole.num_layers, windows=whole.windows) == whole

    def kinds(config: ModelConfig) -> tuple[int, ...]:
        model = ARCHITECTURES[config.architecture]
        return layer_kinds(outline_model(model, config, dtype=torch.float32).layers)

    assert set(kinds(short)) == set(kinds(whole))
    assert kinds(short)[-1] == kinds(whole)[-1], "what stands last may be compiled as the last"
    assert kinds(short) == kinds(whole)[: short.num_layers]
    assert (architecture != "llama") or short.num_layers == 1


def test_a_process_that_fails_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def launch(_text: str, index: int, _count: int, errors: Any) -> subprocess.Popen[str]:
        script = "print('{\"part\": \"one\"}'); import sys; sys.exit('no room here')"
        command = [sys.executable, "-c", script if index else "pass"]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )

    monkeypatch.setattr(build_ahead, "_launch", launch)
    monkeypatch.setattr(build_ahead, "missing_parts", lambda _: [("every piece", "why")])
    monkeypatch.setattr(build_ahead, "_is_foreign", lambda _: False)
    monkeypatch.setattr(build_ahead, "_num_parts", lambda *_: 5)
    seen = []
    wanted = config(tmp_path, tmp_path, compile_jobs=2)
    told: list[tuple[str, str]] = []
    with building_ahead(wanted, CPU, lambda *report: seen.append(report), told.extend) as wait:
        wait()
    assert told == [("every piece", "why")], "why there is something to make"
    assert seen[0] == ("pieces, in processes", 0, 5)
    assert ("one, in a process", 1, 5) in seen
    assert "1 of 2 processes that compile ahead failed (no room here)" in caplog.text


def test_what_processes_did_is_added_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = {"name": "inductor", "seconds": 1.5, "num_misses": 2, "num_bytes": 10}
    lines = "\n".join(map(json.dumps, ({"part": "one"}, {"phases": [row]})))
    made, _ = processes_of(monkeypatch, tmp_path, f"print({lines!r})", jobs=2)
    made.wait()
    assert made.phases == [StartPhase(name="inductor", seconds=3.0, num_misses=4, num_bytes=20)], (
        "and a line of sums is no part"
    )
    assert made._counter._done == 2
    meter = StartMeter(CompileDriver(config(tmp_path, tmp_path)).times)
    meter.note_made(made.phases)
    driver = CompileDriver(config(tmp_path, tmp_path, enforce_eager=True))
    (shown,) = (row for row in meter.phases(driver) if row.name == "- inductor")
    assert (shown.seconds, shown.num_misses, shown.cache) == (3.0, 4, "miss")


def test_processes_end_with_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    launched = []

    def launch(_text: str, _index: int, _count: int, errors: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        launched.append(worker)
        return worker

    monkeypatch.setattr(build_ahead, "_launch", launch)
    monkeypatch.setattr(build_ahead, "missing_parts", lambda _: [("every piece", "why")])
    monkeypatch.setattr(build_ahead, "_is_foreign", lambda _: False)
    monkeypatch.setattr(build_ahead, "_num_parts", lambda *_: 5)
    wanted = config(tmp_path, tmp_path, compile_jobs=2)
    with (
        pytest.raises(RuntimeError, match="weights"),
        building_ahead(wanted, CPU, lambda *_: None),
    ):
        raise RuntimeError("no weights")
    assert [worker.poll() for worker in launched] == [-9, -9]


def processes_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, jobs: int = 1
) -> tuple[BuildProcesses, list[subprocess.Popen[str]]]:
    """Processes that run `script` in place of the real one."""
    launched = []

    def launch(_text: str, _index: int, _count: int, errors: Any) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        launched.append(worker)
        return worker

    monkeypatch.setattr(build_ahead, "_launch", launch)
    monkeypatch.setattr(build_ahead, "_num_parts", lambda *_: 5)
    made = BuildProcesses(config(tmp_path, tmp_path), CPU, lambda *_: None, jobs)
    return made, launched


def test_a_process_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(build_ahead, "MOST_QUIET_S", 1.0)
    script = f"import time; print({SAYS!r}, flush=True); time.sleep(600)"
    made, launched = processes_of(monkeypatch, tmp_path, script, jobs=2)
    start = time.monotonic()
    assert not made.is_done()
    made.wait()
    assert 1.0 < time.monotonic() - start < 60
    made.close()
    assert [worker.returncode for worker in launched] == [-9, -9]
    assert "2 of 2 processes that compile ahead have made nothing for 1 s" in caplog.text


def test_a_process_that_makes_something_now_and_then_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(build_ahead, "MOST_QUIET_S", 3.0)
    script = f"import time\nfor _ in range(5): print({SAYS!r}, flush=True); time.sleep(1)"
    made, launched = processes_of(monkeypatch, tmp_path, script)
    made.wait()
    made.close()
    assert [worker.returncode for worker in launched] == [0]
    assert not caplog.text


def test_processes_say_what_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    lines = ['{"part": "a", "unkept": []}', '{"part": "b", "unkept": ["head"]}', SAYS]
    made, _ = processes_of(monkeypatch, tmp_path, f"print(*{lines!r}, sep=chr(10))")
    made.wait()
    made.close()
    assert made.unkept == {"head"}


def test_what_a_process_leaves_behind_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A compiler that outlives the process that launched it has its output open."""
    script = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'left')!r}, 'w').write(str(left.pid))"
    )
    made, _ = processes_of(monkeypatch, tmp_path, script)
    start = time.monotonic()
    made.wait()
    made.close()
    assert time.monotonic() - start < 60
    status = Path("/proc", (tmp_path / "left").read_text(), "status")
    deadline = time.monotonic() + 20  # a killed process dies when it is next scheduled
    while is_alive(status) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(status)


def test_a_part_compiles_nothing_that_another_part_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Layers of several kinds: in front of the last stand others, whose sizes nobody marked."""
    folder = write_tiny_model(tmp_path / "model", family="gpt_oss")
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "chunked_prefill_size": 32}
    compiled: list[str] = []

    def run(piece: Piece, *arguments: Any) -> Any:
        compiled.append(piece.name)
        return piece._function(*arguments)

    monkeypatch.setattr(Piece, "first", run)
    maker, _ = open_maker(config(folder, tmp_path / "cache", **sizes))
    pieces = maker.pieces
    versions = layer_versions(32, 4, is_gpu=True, has_last=True, max_few=8)
    assert any(version.is_last for version in versions)
    pieces.versions = maker.plain.versions = versions
    for part in list_parts(versions, is_gpu=True, scheduler="torch"):
        if part.version is not None:
            compiled.clear()
            maker.make(part)
            assert {name.partition("_kind_")[0] for name in compiled} == {part.version.name}


def is_alive(status: Path) -> bool:
    """Of a process by its file in /proc."""
    try:
        return "zombie" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_only_what_was_not_waited_for_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The number of a process may be another's once somebody has waited for it."""
    real, killed = os.killpg, []

    def kill(group: int, number: int) -> None:
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # it is ours still
        killed.append(group)
        real(group, number)

    monkeypatch.setattr(os, "killpg", kill)
    made, launched = processes_of(monkeypatch, tmp_path, "import sys; sys.exit(3)")
    while not made.is_done():
        time.sleep(0.01)
    made.wait()
    made.close()
    assert set(killed) == {worker.pid for worker in launched}
    assert [worker.returncode for worker in launched] == [3]


WORKER = """
import sys, threading, time
from compiled_engine.build_worker import _end_with_parent
threading.Thread(target=_end_with_parent, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("seconds", "is_left", "code"), [("0.3", False, 0), ("60", True, 1)])
def test_a_process_ends_by_itself_or_with_its_parent(seconds: str, is_left: bool, code: int):
    command = [sys.executable, "-c", WORKER, seconds]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        if is_left:
            worker.stdin.close()
        assert worker.wait(timeout=30) == code


@pytest.mark.slow
def test_what_processes_made_is_all_a_start_needs(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "model")
    options = {"enforce_eager": False, "cache_dir": tmp_path / "cache", "compile_jobs": 2}
    first = tiny_engine(folder, **options)
    counters = first.driver.refresh()
    assert counters.num_graphs == 0
    assert counters.num_loaded == len(first.driver.store.counters.hit_bytes) > 7
    assert first.driver.store.counters.misses == []
    plain = tiny_engine(folder)
    prompts = [[5, 6, 7], list(range(40))]
    assert run_requests(first, prompts).tokens == run_requests(plain, prompts).tokens
