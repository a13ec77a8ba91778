"""Cache folders that cannot take what compilers write: read-only ones, and full disks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_engine import cache_folders
from compiled_engine.build_ahead import is_missing
from compiled_engine.build_cache import load_or_build
from compiled_engine.cache_folders import (
    make_room_for_compilers,
    place_caches,
    warn_unkept,
    write_problem,
)
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from compiled_engine.config import EngineConfig
from tests.helpers.cache_folder import files_of
from tests.helpers.mounts import READ_ONLY, SMALL, mounted
from tests.helpers.tiny_model import write_tiny_model

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
KEPT, CUT, NEW = ("a" * 8, "b" * 8, "c" * 8)

# What a start does to the folder, without the compilers.
SCRIPT = """
import json, os, sys
from pathlib import Path
from compiled_engine.build_cache import load_or_build
from compiled_engine.cache_folders import make_room_for_compilers, place_caches
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from compiled_engine.triton_cache import MovableCache
cache = Path(sys.argv[1])
place_caches(cache)
kept = MovableCache(sys.argv[2])
before = os.environ["TRITON_CACHE_DIR"]
for _ in range(2):
    make_room_for_compilers()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    folder.joinpath("x").write_bytes(bytes(2**21))
    store = EntryStore(cache, StartKey({"flags.any": "1"}))
    store.save("piece", bytes(2**21))
    load_or_build(cache / "cpp" / "x.so", lambda: bytes(2**21))
found = {}
for name in sys.argv[2:]:
    manager = MovableCache(name)
    if manager.get_group("k.json") is None:
        manager.put_group("k.json", {"k.cubin": manager.put(b"new", "k.cubin")})
    found[name] = Path(manager.get_group("k.json")["k.cubin"]).read_text()
print(json.dumps({"before": before, "folder": str(folder), "found": found}))
"""


def start(how: str, cache: Path) -> tuple[dict[str, Any], list[str]]:
    """What the script found, and its warnings."""
    words = mounted(how, cache, sys.executable, "-c", SCRIPT, str(cache), KEPT, CUT, NEW)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr.strip().splitlines()


def test_a_read_only_folder_is_read_and_compilers_work_in_a_temporary_one(tmp_path: Path):
    for name, files in ((KEPT, ("k.cubin", "__grp__k.json")), (CUT, ("k.cubin",))):
        (tmp_path / "triton" / name).mkdir(parents=True)
        for file in files:
            text = '{"child_paths": {"k.cubin": "elsewhere"}}' if "grp" in file else "old"
            (tmp_path / "triton" / name / file).write_text(text)
    before = files_of(tmp_path)
    found, warnings = start(READ_ONLY, tmp_path)
    assert found["before"] == str(tmp_path / "triton"), "a kernel that is there needs no room"
    assert found["found"] == {KEPT: "old", CUT: "new", NEW: "new"}
    assert files_of(tmp_path) == before
    (warning,) = warnings
    assert f"{tmp_path} cannot be written (it is read-only)" in warning
    assert "--cache-dir" in warning
    assert not Path(found["folder"]).exists(), "it goes with the process"


def test_a_full_disk_costs_one_warning_too(tmp_path: Path):
    found, warnings = start(SMALL, tmp_path)
    assert found["found"] == dict.fromkeys((KEPT, CUT, NEW), "new")
    (warning,) = warnings
    assert f"{tmp_path} cannot be written (no space: 1 MiB are free" in warning


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that this user may not write to."""
    cache = tmp_path / "cache"
    cache.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache and real(path, mode))
    place_caches(cache)
    return cache


def test_what_may_not_be_written_is_left_alone(unwritable, caplog, tmp_path):
    make_room_for_compilers()
    make_room_for_compilers()
    (record,) = caplog.records
    assert f"this user may not write to {unwritable}" in record.getMessage()
    for name in NAMES:
        assert not Path(os.environ[name]).is_relative_to(tmp_path)
        assert Path(os.environ[name]).is_dir()
    assert not any(unwritable.iterdir())


def test_a_start_there_launches_no_processes(unwritable, tmp_path):
    """What they make could not be kept for the start that waits for them."""
    model = write_tiny_model(tmp_path / "model")
    config = EngineConfig(model=str(model), device="cpu", cache_dir=unwritable)
    assert not is_missing(config)
    usual = EngineConfig(model=str(model), device="cpu", cache_dir=tmp_path / "usual")
    assert is_missing(usual)


def test_with_room_nothing_changes(tmp_path, caplog):
    place_caches(tmp_path / "cache")
    before = {name: os.environ[name] for name in NAMES}
    make_room_for_compilers()
    assert before == {name: os.environ[name] for name in NAMES}
    assert not (tmp_path / "cache").exists()
    assert not caplog.records


def test_without_another_place_the_compilers_try(unwritable, monkeypatch, caplog):
    monkeypatch.setattr(cache_folders, "_scratch_folder", lambda: None)
    make_room_for_compilers()
    assert os.environ["TRITON_CACHE_DIR"] == str(unwritable / "triton")
    assert not caplog.records


def test_each_folder_is_warned_of_once_whoever_cannot_write(tmp_path, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module in ("build_cache", "compile.store"):
        monkeypatch.setattr(f"compiled_engine.{module}.write_file", fail)
    caplog.set_level(logging.WARNING)
    for cache in (tmp_path / "one", tmp_path / "two"):
        EntryStore(cache, StartKey({"flags.any": "1"})).save("piece", b"x")
        load_or_build(cache / "cpp" / "x.so", lambda: b"code")
        warn_unkept(cache, "it is read-only")
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        str(tmp_path / "one"),
        str(tmp_path / "two"),
    ]


def test_a_file_in_the_way_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    assert write_problem(tmp_path / "file" / "below") == f"{tmp_path / 'file'} is no folder"
    assert write_problem(tmp_path / "new" / "below") == ""
