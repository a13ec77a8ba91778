"""Serving before anything is compiled, and what takes over."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine import engine
from compiled_engine.compile.driver import CompileDriver
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from compiled_engine.config import EngineConfig
from compiled_engine.eager_first import LaterPieces
from compiled_engine.errors import ConfigError
from compiled_engine.settings import check_options
from tests.helpers import gpu_engine
from tests.helpers.engines import run_requests, tiny_engine
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.turned_engine import TurnedEngine

PROMPTS = [[5, 6, 7], list(range(40)), [9] * 17]


@pytest.mark.parametrize(
    ("option", "value"),
    [("enforce_eager", True), ("device_loop", True), ("max_step_ms", 9.0)],
)
def test_what_cannot_go_with_it_is_refused(option: str, value: Any):
    options: dict[str, Any] = {option: value, "compile_mode": "eager-first"}
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}, which"):
        check_options(EngineConfig(model="m", **options), torch.device("cpu"))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="--compile-mode is 'later'"):
        EngineConfig(model="m", compile_mode="later")  # type: ignore[arg-type]


class Processes:
    """Stand for those that compile; end when they are told."""

    def __init__(self, unkept: frozenset[str] = frozenset()) -> None:
        self.unkept = unkept
        self.is_ended = False
        self.is_closed = False

    def is_done(self) -> bool:
        return self.is_ended

    def wait(self) -> None:
        assert self.is_ended

    def close(self) -> None:
        self.is_closed = True


def test_plain_code_goes_on_where_pieces_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plain = tiny_engine(write_tiny_model(tmp_path / "model"))
    executor, processes = plain.loop.executor, Processes()
    before = executor.pieces

    class Pieces:
        def preload(self) -> list[str]:
            return ["layer_one"]

    driver = CompileDriver(EngineConfig(model="m", cache_dir=tmp_path))
    later = LaterPieces(executor, driver, Pieces, processes, None)  # type: ignore[arg-type]
    expected = run_requests(plain, PROMPTS).tokens
    assert later.is_waiting
    processes.is_ended = True
    assert run_requests(plain, PROMPTS).tokens == expected
    assert not later.is_waiting
    assert processes.is_closed
    assert executor.pieces is before
    assert "layer_one could not be compiled" in caplog.text


def test_what_cannot_be_kept_stays_plain_and_the_rest_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Here it is all pieces but one, which is the function itself, too: nothing is compiled."""
    plain = tiny_engine(write_tiny_model(tmp_path / "model"))
    expected = run_requests(plain, PROMPTS).tokens
    executor, settings = plain.loop.executor, plain.settings
    driver = CompileDriver(EngineConfig(model="m", cache_dir=tmp_path))
    driver.store = EntryStore(tmp_path, StartKey({"flags.any": "1"}))
    made = engine.make_pieces(executor.model, executor.shape, settings, driver)
    names = frozenset(made.preload())
    assert {"head", "layer_one"} < names
    taken: list[bool] = []
    for unkept, is_taken in ((names - {"head"}, False), (names, True)):
        processes = Processes(unkept)
        later = LaterPieces(executor, driver, lambda: made, processes, None)  # type: ignore[arg-type]
        later.on_taken = lambda: taken.append(True)
        processes.is_ended = True
        assert run_requests(plain, PROMPTS).tokens == expected
        assert bool(taken) == is_taken
    assert executor.pieces is made
    assert "head could not be compiled" in caplog.text
    assert "cannot be kept and stay uncompiled" in caplog.text
    assert driver.refresh().num_graphs == 0


def test_an_idle_engine_takes_up_what_was_compiled(tmp_path: Path):
    engine = TurnedEngine(tiny_engine(write_tiny_model(tmp_path / "model")))
    seen = []
    engine.loop.executor.before_launch = lambda: seen.append(engine.loop.has_work)
    engine.turn()
    assert seen == [False]


def test_nothing_missing_means_nothing_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With all in the cache the mode changes nothing."""
    seen = []
    monkeypatch.setattr(engine, "is_missing", lambda config: bool(seen.append(config)))
    folder = write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(
        engine, "_warm_up", lambda *_: (_ for _ in ()).throw(RuntimeError("compiles first"))
    )
    with pytest.raises(RuntimeError, match="compiles first"):
        tiny_engine(folder, enforce_eager=False, compile_mode="eager-first")
    assert len(seen) == 1


def takes_over(folder: Path, log: pytest.LogCaptureFixture, **options: Any) -> None:
    """Serves plain until compiled pieces are there, and goes on with them: equal tokens always."""
    log.set_level(logging.INFO)
    expected = run_requests(tiny_engine(folder, **{**options, "enforce_eager": True}), PROMPTS)
    start = time.monotonic()
    made = tiny_engine(
        folder, **{**options, "enforce_eager": False}, compile_mode="eager-first", compile_jobs=2
    )
    ready_s = time.monotonic() - start
    assert made.driver.refresh().num_loaded == 0
    num_plain = 0
    while made.driver.refresh().num_loaded == 0:
        assert run_requests(made, PROMPTS).tokens == expected.tokens
        num_plain += 1
        assert time.monotonic() - start < 600
    assert num_plain > 1, "served while it was compiled"
    took_s = time.monotonic() - start
    print(f"ready after {ready_s:.1f} s, compiled after {took_s:.1f} s")
    counters = made.driver.refresh()
    assert counters.num_graphs == 0
    with counters.expect(num_recompiles=0, num_graphs=0):
        assert run_requests(made, PROMPTS).tokens == expected.tokens
        made.driver.refresh()
    assert "compiled code serves from here on" in log.text


@pytest.mark.slow
def test_compiled_pieces_take_over_between_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_tiny_model(tmp_path / "model")
    takes_over(folder, caplog, cache_dir=tmp_path / "cache")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["full", "none"])
def test_gpu_compiled_pieces_take_over_between_steps(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = gpu_engine.write_exact_model(tmp_path / "model")
    options = {**gpu_engine.OPTIONS, "dtype": "float32", "cudagraph_mode": mode}
    takes_over(folder, caplog, cache_dir=tmp_path / "cache", **options)
