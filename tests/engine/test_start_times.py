"""The clock of a start, and what is kept of our own sources' builds."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import msgspec
import pytest

from compiled_engine.build_cache import (
    build_totals,
    file_problem,
    load_or_build,
    triton_totals,
)
from compiled_engine.cache_folders import BUILD_VARIABLE, VARIABLES, build_dir, place_caches
from compiled_engine.commands.progress import PieceProgress
from compiled_engine.commands.settings_table import print_start
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.config import EngineConfig
from compiled_engine.ipc import EngineFrame
from compiled_engine.start_table import AHEAD, StartMeter, used_files
from compiled_engine.start_times import StartPhase, StartTimes, process_age_s
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model


class Clock:
    """Time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_counts_once_and_inner_phases_are_taken_out():
    clock = Clock()
    times = StartTimes(clock)
    clock.now += 1
    with times.measure("load"):
        clock.now += 2
        with times.measure("read"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert times.finish() == {"other": 17, "load": 10, "read": 4}


def test_a_phase_that_fails_is_charged_too():
    clock = Clock()
    times = StartTimes(clock)

    def fail() -> None:
        with times.measure("load"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert times.finish() == {"other": 1, "load": 2}


def test_a_split_moves_time_and_never_more_than_there_is():
    clock = Clock()
    times = StartTimes(clock)
    with times.measure("steps"):
        clock.now += 10
    times.split("steps", {"trace": 3, "none": 0, "inductor": 30})
    found = times.finish()
    assert {name: s for name, s in found.items() if s} == {"trace": 3, "inductor": 7}
    assert sum(found.values()) == 10


def test_the_age_of_a_process_grows_with_it():
    first = process_age_s()
    time.sleep(0.05)
    assert 0 < first < process_age_s() < 24 * 3600


@pytest.mark.parametrize(
    ("hits", "misses", "word"), [(0, 0, "-"), (2, 0, "hit"), (0, 2, "miss"), (1, 2, "part")]
)
def test_a_phase_says_in_a_word_what_its_cache_had(hits, misses, word):
    phase = StartPhase(name="x", seconds=1.0, num_hits=hits, num_misses=misses)
    assert phase.cache == word


def test_an_engine_accounts_for_its_whole_start(tmp_path):
    begin = time.perf_counter()
    engine = tiny_engine(write_tiny_model(tmp_path / "model"))
    whole = time.perf_counter() - begin
    phases = {phase.name: phase for phase in engine.start}
    assert {"load", "first steps", "other"} <= phases.keys()
    assert "pieces" not in phases, "an eager engine has none"
    total = sum(phase.seconds for name, phase in phases.items() if not name.startswith("- "))
    assert 0.8 * whole < total <= whole


def test_the_table_has_a_row_for_each_phase(capsys):
    from rich.console import Console

    phases = [
        StartPhase(name="load", seconds=1.5),
        StartPhase(name="pieces", seconds=0.25, num_hits=3, num_misses=1, num_bytes=2**21),
    ]
    print_start(Console(width=100), phases)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["load", "1.50", "-"]
    assert lines[-1].split() == ["pieces", "0.25", "part", "3", "1", "2.0"]


def test_the_table_is_followed_by_the_reason_of_each_miss(capsys):
    from rich.console import Console

    whys = ("head was compiled: [other] shape", "embed was compiled: " + "long " * 40)
    phases = [
        StartPhase(name="pieces", seconds=0.2, num_misses=2, reasons=whys),
        StartPhase(name="inductor", seconds=1.0),
    ]
    print_start(Console(width=60), phases)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()[-2:]] == [
        why.rstrip() for why in whys
    ]


def test_reasons_arrive_in_the_api_process_which_prints_them(capsys):
    from rich.console import Console

    whys = ("head was compiled: the cache is empty",)
    sent = EngineFrame(start=[StartPhase(name="pieces", seconds=0.1, num_misses=1, reasons=whys)])
    data = msgspec.msgpack.encode(sent)
    received = msgspec.msgpack.decode(data, type=EngineFrame)
    assert received.start == sent.start
    print_start(Console(width=100), received.start)
    assert whys[0] in capsys.readouterr().out.splitlines()


def test_what_is_built_is_taken_out_of_the_phase_in_which_it_is_built(tmp_path):
    clock = Clock()
    driver = CompileDriver(EngineConfig(model="m", enforce_eager=True, cache_dir=tmp_path))
    driver.times = StartTimes(clock)
    meter = StartMeter(driver.times)
    with driver.times.measure("memory probe"):
        clock.now += 5
        triton_totals().note_built(tmp_path / "a", 10, 2.0)
        triton_totals().note_found(tmp_path / "b", 20)
    with driver.times.measure("capture"):
        clock.now += 3
        build_totals().note_built(tmp_path / "c", 1, 3.0)
    phases = {phase.name: phase for phase in meter.phases(driver)}
    assert {name: phase.seconds for name, phase in phases.items()} == {
        "memory probe": 3.0,
        "triton": 2.0,
        "own sources": 3.0,
    }
    assert phases["triton"] == StartPhase(
        name="triton", seconds=2.0, num_hits=1, num_misses=1, num_bytes=30
    )
    assert used_files(driver, tmp_path) == ["a", "b", "c"]
    triton_totals().note_built(tmp_path / "d", 1, 1.0)  # after the start: nobody is told
    assert driver.times.finish()["triton"] == 2.0


def test_what_processes_make_ahead_has_its_reason_too(tmp_path):
    driver = CompileDriver(EngineConfig(model="m", enforce_eager=True, cache_dir=tmp_path))
    meter = StartMeter(driver.times)
    meter.note_missing([("every piece", "the cache is empty")])
    with driver.times.measure(AHEAD):
        pass
    (phase,) = (phase for phase in meter.phases(driver) if phase.name == AHEAD)
    assert phase.reasons == ("every piece was compiled ahead: the cache is empty",)


def test_each_piece_has_a_line_where_there_is_no_terminal(capsys):
    from rich.console import Console

    with PieceProgress(Console(width=100)) as progress:
        progress.update("loading", "model.safetensors", 1, 2)
        for done, label in enumerate(("plan", "graph of 2 tokens", "graph of 1 tokens", "done")):
            progress.update("compiling", label, done, 3)
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["loading ...", "loading", "compiling ...", "  plan", "  graphs", "compiling"]


def test_each_piece_has_a_bar_on_a_terminal(capsys):
    from rich.console import Console

    with PieceProgress(Console(width=100, force_terminal=True)) as progress:
        for done, label in enumerate(("plan", "head", "done")):
            progress.update("compiling", label, done, 2)
        tasks = [task.description for task in progress._bars.tasks]
        assert tasks[1:] == ["plan, done", "head, done"]
    capsys.readouterr()


# --- builds of our own sources ------------------------------------------------------------


def built(path: Path, code: bytes = b"code") -> tuple[bytes, bool]:
    """What is loaded, and whether it was built."""
    before = build_totals().num_misses
    return load_or_build(path, lambda: code), build_totals().num_misses > before


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cpp" / "x.so"


def test_what_was_built_is_loaded_and_its_use_is_noted(path):
    assert built(path) == (b"code", True)
    os.utime(path, (1, 1))
    assert built(path) == (b"code", False)
    assert path.stat().st_mtime > 1
    assert path in build_totals().paths
    assert file_problem(path) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes(100)),
        lambda path: path.chmod(0o666),
        lambda path: (path.rename(path.with_name("y")), path.symlink_to(path.with_name("y"))),
    ],
    ids=["empty", "cut", "zeros", "open-to-others", "link"],
)
def test_what_is_damaged_or_not_trusted_is_built_again_with_a_warning(path, damage):
    built(path)
    damage(path)
    assert file_problem(path)
    with pytest.warns(UserWarning, match="is not used, and built again"):
        assert built(path, b"anew") == (b"anew", True)
    assert built(path) == (b"anew", False)


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_more(tmp_path):
    (tmp_path / "cpp").write_text("in the way")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert built(tmp_path / "cpp" / "x.so") == (b"code", True)
    assert any("cannot be kept" in str(w.message) for w in seen)


def test_an_error_of_the_build_itself_is_what_is_raised(path):
    def fail() -> bytes:
        raise RuntimeError("the compiler's own words")

    with pytest.raises(RuntimeError, match="the compiler's own words"):
        load_or_build(path, fail)
    assert not path.exists()


def test_every_cache_lies_below_the_engines_folder(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COMPILED_ENGINE_CACHE", str(tmp_path / "default"))
    assert build_dir() == tmp_path / "default"
    place_caches(tmp_path / "cache")
    assert build_dir() == tmp_path / "cache"
    assert BUILD_VARIABLE in VARIABLES
    folders = [name for name in VARIABLES if name != "TRITON_CACHE_MANAGER"]
    assert all(os.environ[name].startswith(str(tmp_path / "cache")) for name in folders)


def test_a_relative_cache_folder_is_the_same_one_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place_caches(Path("cache"))
    monkeypatch.chdir("/")
    assert build_dir() == tmp_path / "cache"
