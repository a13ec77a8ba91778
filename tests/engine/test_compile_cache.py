"""The compile cache through real starts: what is kept, moved, damaged, shared and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.cache_folders import VARIABLES
from tests.helpers.mounts import READ_ONLY, SMALL, mounted
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

FLAGS = ("--device", "cpu", "--max-num-seqs", "4", "--chunked-prefill-size", "32")


SLOW_WRITER = """
import os, sys, time
real = os.replace
def slow(*args, **options):
    if ".program." in str(args[0]):
        time.sleep(600)
    real(*args, **options)
os.replace = slow
from compiled_engine.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def filled(model, tmp_path_factory) -> Path:
    """A cache folder after one start; not to be changed."""
    cache = tmp_path_factory.mktemp("cache")
    document = warmup(model, cache)
    assert document["pieces"]
    assert misses(document) == {piece["name"] for piece in document["pieces"]}
    return cache


@pytest.fixture
def warm(filled, tmp_path) -> Path:
    """A copy that may be changed; Inductor's and Triton's own caches are not in it."""
    return shutil.copytree(filled, tmp_path / "warm", ignore=shutil.ignore_patterns("inductor"))


def words_of(command: str, model: Path, cache: Path, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "compiled_engine.cli", command, str(model), *FLAGS, *flags]
    return [*words, "--cache-dir", str(cache)]


def start(command: str, model: Path, cache: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    return started(words_of(command, model, cache, *flags), **env)


def started(words: list[str], **env: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        words,
        env=environment | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=1500)
    assert process.returncode == code, err
    return out, err


def warmup(model: Path, cache: Path, *flags: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        end(start("warmup", model, cache, *flags))[0].splitlines()[-1]
    )
    return document


def misses(document: dict[str, Any]) -> set[str]:
    return {piece["name"] for piece in document["pieces"] if piece["cache"] != "hit"}


def compiles(document: dict[str, Any]) -> int:
    counters = document["counters"]
    return int(counters["num_inductor_compiles"] + counters["num_cache_hits"])


ASK = ("--raw", "--temperature", "0", "--max-tokens", "8", "--prompt", "abc")


def answer(model: Path, cache: Path, *flags: str) -> str:
    return end(start("generate", model, cache, *ASK, *flags))[0]


def test_a_second_start_compiles_nothing_and_answers_alike(model, warm, tmp_path):
    end(start("warmup", model, warm, "--check"))
    document = warmup(model, warm)
    assert misses(document) == set()
    assert compiles(document) == 0
    assert answer(model, warm) == answer(model, tmp_path / "none", "--enforce-eager")


def test_an_artifact_in_another_folder_compiles_nothing(model, warm, tmp_path):
    artifact = tmp_path / "start.tar"
    warmup(model, warm, "--output", str(artifact))
    shutil.rmtree(warm)
    new = tmp_path / "elsewhere"
    words = ("cache", "import", str(artifact), "--trust-artifact", "--cache-dir", str(new))
    subprocess.run([sys.executable, "-m", "compiled_engine.cli", *words], check=True, timeout=300)
    end(start("warmup", model, new, "--check"))
    document = warmup(model, new)
    assert (misses(document), compiles(document)) == (set(), 0)
    assert answer(model, new) == answer(model, tmp_path / "none", "--enforce-eager")


def test_settings_share_a_folder_and_never_each_others_code(model, warm, tmp_path):
    expected = answer(model, tmp_path / "none", "--enforce-eager")
    first = warmup(model, warm, "--block-size", "32")
    assert misses(first) == {piece["name"] for piece in first["pieces"]}
    assert all("shape.page_size (32, there 16)" in piece["reason"] for piece in first["pieces"])
    for flags in ((), ("--block-size", "32")):
        assert misses(warmup(model, warm, *flags)) == set(), flags
        assert answer(model, warm, *flags) == expected


def test_damaged_entries_alone_are_compiled_anew(model, warm, tmp_path):
    paths = sorted(warm.glob("programs/*/*.program"), key=lambda path: path.stat().st_size)[:2]
    for path, data in zip(paths, (bytes(500), paths[1].read_bytes()[:500]), strict=True):
        path.write_bytes(data)
    names = {path.stem for path in paths}
    _, said = end(start("warmup", model, warm, "--check"), code=1)
    assert "Traceback" not in said
    out, err = end(start("warmup", model, warm))
    assert misses(json.loads(out.splitlines()[-1])) == names
    for path in paths:
        assert err.count(f"{path} is not used") == 1
    assert misses(warmup(model, warm)) == set()
    assert answer(model, warm) == answer(model, tmp_path / "none", "--enforce-eager")


@pytest.mark.parametrize("how", [READ_ONLY, SMALL], ids=["read-only", "full"])
def test_a_cold_start_serves_where_nothing_can_be_kept(model, tmp_path, how):
    cache = tmp_path / "cache"
    cache.mkdir()
    words = mounted(how, cache, *words_of("generate", model, cache, *ASK))
    said, err = end(started(words))
    assert said == answer(model, tmp_path / "none", "--enforce-eager")
    # Whatever else could not be kept is not said again.
    assert err.count(f"{cache} cannot be written") == err.count("cannot be") == 1, err
    assert "compiled again" not in err
    assert not any(cache.iterdir())


def test_a_warm_start_over_a_read_only_folder_says_nothing(model, warm, tmp_path):
    words = mounted(READ_ONLY, warm, *words_of("generate", model, warm, *ASK))
    said, err = end(started(words))
    assert said == answer(model, tmp_path / "none", "--enforce-eager")
    assert "cannot be written" not in err


def test_several_starts_at_once_fill_one_cache_though_one_is_killed(model, tmp_path):
    cache = tmp_path / "cache"
    # Of the first, writes take a while.
    slow = [sys.executable, "-c", SLOW_WRITER, *words_of("warmup", model, cache)[3:]]
    processes = [started(slow), *(start("warmup", model, cache) for _ in range(2))]
    mark = f".{processes[0].pid}."
    while not (left := [p for p in cache.glob("programs/*/.*.tmp") if mark in p.name]):
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.01)
    processes[0].kill()
    processes[0].communicate()
    assert left[0].exists(), "killed while it wrote"
    for process in processes[1:]:
        end(process)
    assert misses(warmup(model, cache)) == set()
    assert set(cache.glob("programs/*/.*.tmp")) == set(left), "swept by a later start, by its age"


def test_a_folder_that_others_may_write_is_served_without(model, warm):
    folder = next(warm.glob("programs/*"))
    folder.chmod(0o777)
    out, err = end(start("warmup", model, warm))
    document = json.loads(out.splitlines()[-1])
    assert misses(document) == {piece["name"] for piece in document["pieces"]}
    assert err.count("is not used: ") == 1
    assert "others may write it" in err


def test_a_real_compile_error_is_what_is_shown(model, warm):
    next(warm.glob("programs/*/*.program")).write_bytes(b"damaged")
    _, err = end(start("warmup", model, warm, CXX="/bin/false"), code=1)
    assert "CppCompileError" in err or "/bin/false" in err
    assert "KeyError" not in err
