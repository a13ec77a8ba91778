"""`warmup`: what it refuses, and `--check`, which compiles nothing and says what a start would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiled_engine.build_ahead import is_missing
from compiled_engine.compile.store import EntryStore
from compiled_engine.config import EngineConfig
from compiled_engine.memory import needs_name
from compiled_engine.start_check import preview_key
from tests.helpers.cache_folder import files_of, halve, keep
from tests.helpers.commands import refusal, run
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


FLAGS = ("--device", "cpu", "--max-num-seqs", "4", "--chunked-prefill-size", "32")


def config_of(model: Path, cache: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model), device="cpu", max_num_seqs=4, chunked_prefill_size=32, cache_dir=cache
    )


@pytest.fixture
def warm(model, tmp_path) -> Path:
    """A cache folder after a start, as far as the store sees one."""
    keep(tmp_path, preview_key(config_of(model, tmp_path)), layer_one=b"one", head=b"head")
    return tmp_path


def check(capsys, model: Path, cache: Path, *flags: str, code: int) -> dict[str, Any]:
    before = files_of(cache)
    words = ("warmup", model, "--check", "--cache-dir", cache, *FLAGS, *flags)
    found = run(capsys, *words, code=code)
    assert files_of(cache) == before, "a check writes nothing"
    return found


def test_check_of_a_warm_start_finds_nothing_to_compile(model, warm, capsys):
    found = check(capsys, model, warm, code=0)
    assert (found["num_sound"], found["problems"]) == (3, [])
    assert check(capsys, model, warm, "--seed", "9", "--overlap-schedule", "on", code=0)


def test_check_names_the_part_of_the_key_that_differs(model, warm, capsys):
    found = check(capsys, model, warm, "--block-size", "32", code=1)
    (problem,) = found["problems"]
    assert problem["name"] == "every piece"
    assert "shape.page_size (32, there 16)" in problem["reason"]


def test_what_only_the_start_itself_makes_is_no_reason_for_processes(model, tmp_path, capsys):
    config = config_of(model, tmp_path)
    store = EntryStore(tmp_path, preview_key(config))
    store.load("layer_odd")
    for name in ("head", "memory_full_older"):
        store.save(name, b"x")
    assert is_missing(config)
    store.finish()
    found = check(capsys, model, tmp_path, code=1)
    needs = needs_name("full")
    assert {problem["name"] for problem in found["problems"]} == {"layer_odd", needs}
    assert not is_missing(config)
    halve(next(tmp_path.glob("programs/*/head.program")))
    assert is_missing(config)


@pytest.mark.parametrize("name", ["programs/*/head.program", "cpp/lib.so"])
def test_check_finds_what_is_damaged(model, warm, capsys, name):
    halve(next(warm.glob(name)))
    (problem,) = check(capsys, model, warm, code=1)["problems"]
    assert Path(problem["name"]).name in name
    assert "damaged" in problem["reason"]


def test_check_of_an_empty_cache_says_so(model, tmp_path, capsys):
    (problem,) = check(capsys, model, tmp_path, code=1)["problems"]
    assert problem["reason"] == "the cache is empty"


def test_check_of_a_start_that_compiles_nothing(model, tmp_path, capsys):
    assert check(capsys, model, tmp_path, "--enforce-eager", code=0)["problems"] == []


def test_check_and_output_contradict_each_other(model, tmp_path, capsys):
    words = ("warmup", model, "--check", "--output", tmp_path / "x")
    assert "leave one out" in refusal(capsys, *words)


def test_output_is_refused_before_anything_is_compiled(model, tmp_path, capsys):
    words = ("warmup", model, "--device", "cpu", "--output")
    assert "is there already" in refusal(capsys, *words, tmp_path)
    assert "no piece is kept" in refusal(capsys, *words, tmp_path / "x", "--enforce-eager")
