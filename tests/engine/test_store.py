"""The store of compiled pieces: what is kept is found again, and what is wrong costs a warning."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiled_engine import trusted_files
from compiled_engine.compile import store as store_module
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import (
    KEY_FILE,
    SUFFIX,
    EntryStore,
    StartRecord,
    entry_problem,
    read_record,
    sealed,
)

KEY = StartKey({"flags.x": "1", "shape.rows": "4", "source.models.llama": "aa"})
NAME = "layer_few"
DATA = bytes(range(256)) * 40


def store_of(cache: Path, key: StartKey = KEY) -> EntryStore:
    return EntryStore(cache, key)


@pytest.fixture
def kept(tmp_path) -> Path:
    """A cache folder with one entry."""
    store_of(tmp_path).save(NAME, DATA)
    return tmp_path


def path_of(cache: Path) -> Path:
    return cache / "programs" / KEY.digest / (NAME + SUFFIX)


def reasons(store: EntryStore) -> list[str]:
    return [miss.reason for miss in store.counters.misses]


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_load_gives_what_was_saved_and_counts_it(kept):
    store = store_of(kept)
    assert store.load(NAME) == DATA
    assert store.load("other") is None
    counters = store.counters
    assert (counters.num_hits, counters.bytes_read) == (1, len(DATA))
    assert [miss.name for miss in counters.misses] == ["other"]
    assert counters.hit_bytes == {NAME: len(DATA)}


@pytest.mark.parametrize("data", [b"", b"\0", DATA], ids=["empty", "one-byte", "long"])
def test_any_bytes_come_back(tmp_path, data):
    store_of(tmp_path).save("x", data)
    assert store_of(tmp_path).load("x") == data


def test_nothing_is_made_before_the_first_save(tmp_path):
    store = store_of(tmp_path / "cache")
    assert store.load(NAME) is None
    store.finish()
    assert not (tmp_path / "cache").exists()
    assert reasons(store) == ["the cache is empty"]


def test_a_miss_names_the_parts_that_differ_from_the_nearest_key(kept, caplog):
    """In the counters alone: the table of the start shows it, and the log does not repeat it."""
    far = StartKey({"flags.x": "2", "shape.rows": "9", "source.models.llama": "bb", "new": "1"})
    near = StartKey({**KEY.parts, "shape.rows": "8"})
    store_of(kept, far).save(NAME, b"far")
    caplog.set_level(logging.INFO)
    store = store_of(kept, near)
    assert store.load(NAME) is None
    assert reasons(store) == ["the nearest key in the cache differs in shape.rows (8, there 4)"]
    assert not caplog.records


def test_a_cold_start_keeps_its_reason_while_it_fills_the_folder(kept):
    store = store_of(kept, StartKey({**KEY.parts, "flags.x": "2"}))
    for name in ("a", "b"):
        assert store.load(name) is None
        store.save(name, DATA)
    assert len(set(reasons(store))) == 1
    assert "flags.x (2, there 1)" in reasons(store)[0]


def test_one_missing_entry_of_a_known_start_says_so(kept):
    store = store_of(kept)
    store.load("other")
    assert reasons(store) == ["it is not in the cache, though others of this start are"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + b"\0",
        lambda data: b"PK\x03\x04 something else",
        lambda data: sealed("another", KEY.digest, DATA),
        lambda data: sealed(NAME, "0" * 24, DATA),
    ],
    ids=["half", "zeros", "empty", "one-bit", "longer", "foreign", "other-name", "other-key"],
)
def test_a_damaged_entry_costs_one_warning_that_names_it_and_is_dropped(kept, caplog, damage):
    path = path_of(kept)
    path.write_bytes(damage(path.read_bytes()))
    store = store_of(kept)
    assert store.load(NAME) is None
    (warning,) = warnings_of(caplog)
    assert str(path) in warning
    assert store.counters.num_dropped == len(store.counters.misses) == 1
    assert not path.exists()
    store.save(NAME, b"anew")
    assert store_of(kept).load(NAME) == b"anew"


def test_an_entry_that_cannot_be_used_after_all_is_a_miss(kept, caplog):
    store = store_of(kept)
    store.load(NAME)
    store.drop(NAME, "made for another driver")
    assert (store.counters.num_hits, store.counters.bytes_read) == (0, 0)
    assert reasons(store) == ["made for another driver"]
    assert str(path_of(kept)) in warnings_of(caplog)[0]
    assert not path_of(kept).exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_an_entry_that_cannot_be_read_just_now_stays(kept, caplog, monkeypatch, number):
    real = trusted_files.os.open

    def fail(path, *args, **options):
        if str(path).endswith(SUFFIX):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    store = store_of(kept)
    with monkeypatch.context() as patched:
        patched.setattr(trusted_files.os, "open", fail)
        assert store.load(NAME) is None
    (warning,) = warnings_of(caplog)
    assert str(path_of(kept)) in warning
    assert os.strerror(number) in reasons(store)[0]
    assert store.counters.num_dropped == 0
    assert store_of(kept).load(NAME) == DATA


def test_what_took_the_place_of_a_bad_entry_stays(kept, monkeypatch):
    path_of(kept).write_bytes(b"damaged")
    real = store_module.read_entry

    def read(*args):
        try:
            return real(*args)
        finally:
            store_of(kept).save(NAME, b"by another process")

    monkeypatch.setattr(store_module, "read_entry", read)
    store = store_of(kept)
    assert store.load(NAME) is None
    assert store.counters.num_dropped == 1
    monkeypatch.undo()
    assert store_of(kept).load(NAME) == b"by another process"


def test_what_took_the_place_of_an_entry_of_no_use_stays(kept):
    store = store_of(kept)
    store.load(NAME)
    store_of(kept).save(NAME, b"by another process")
    store.drop(NAME, "made for another driver")
    assert store_of(kept).load(NAME) == b"by another process"


@pytest.mark.parametrize("where", ["entry", "key folder", "programs"])
@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "others"])
def test_what_others_may_write_is_not_used(kept, caplog, where, mode):
    entry = path_of(kept)
    target = {"entry": entry, "key folder": entry.parent, "programs": entry.parent.parent}[where]
    target.chmod(target.stat().st_mode | mode)
    store = store_of(kept)
    assert store.load(NAME) is None
    assert store.load(NAME) is None
    assert "others may write it" in reasons(store)[0]
    store.save(NAME, DATA)
    if where == "entry":
        assert store_of(kept).load(NAME) == DATA  # made anew, by us
    else:
        assert len(warnings_of(caplog)) == 1
        assert store.counters.num_saved == 0


@pytest.mark.parametrize("where", ["entry", "key folder", "programs"])
def test_a_symbolic_link_is_not_followed(kept, tmp_path_factory, caplog, where):
    entry = path_of(kept)
    target = {"entry": entry, "key folder": entry.parent, "programs": entry.parent.parent}[where]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x"
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    store = store_of(kept)
    assert store.load(NAME) is None
    assert "symbolic link" in reasons(store)[0]
    assert elsewhere.exists()
    assert len(warnings_of(caplog)) == 1


def test_what_belongs_to_somebody_else_is_not_used(kept, monkeypatch):
    owner = path_of(kept).stat().st_uid
    monkeypatch.setattr(trusted_files.os, "geteuid", lambda: owner + 1)
    store = store_of(kept)
    if owner == 0:  # root may be trusted: it could do anything anyway
        assert store.load(NAME) == DATA
        return
    assert store.load(NAME) is None
    assert f"belongs to user {owner}" in reasons(store)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("where", ["entry", "key folder", "programs"])
def test_a_foreign_owner_is_refused(kept, where):
    entry = path_of(kept)
    target = {"entry": entry, "key folder": entry.parent, "programs": entry.parent.parent}[where]
    os.chown(target, 12345, -1)
    store = store_of(kept)
    assert store.load(NAME) is None
    assert "belongs to user 12345" in reasons(store)[0]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_an_entry_that_is_no_file_is_not_used(kept, kind):
    path = path_of(kept)
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    store = store_of(kept)
    assert store.load(NAME) is None
    assert len(reasons(store)) == 1


def _failing_write(number: int):
    def write(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_costs_one_warning(kept, caplog, monkeypatch, number):
    monkeypatch.setattr("compiled_engine.compile.store.write_file", _failing_write(number))
    store = store_of(kept)
    for name in ("a", "b", "c"):
        assert store.load(name) is None
        store.save(name, DATA)
    store.finish()
    (warning,) = warnings_of(caplog)
    assert "cannot be written" in warning
    assert os.strerror(number) in warning
    assert store.load(NAME) == DATA


def test_a_full_disk_leaves_no_half_file(kept, monkeypatch):
    """The write itself fails, as it does on a full disk."""
    real = trusted_files.os.fchmod

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(trusted_files.os, "fchmod", fail)
    store_of(kept).save("b", DATA)
    monkeypatch.setattr(trusted_files.os, "fchmod", real)
    assert sorted(p.name for p in path_of(kept).parent.iterdir()) == [KEY_FILE, NAME + SUFFIX]


def test_a_cache_folder_that_is_a_file_is_served_without(tmp_path, caplog):
    place = tmp_path / "cache"
    place.write_text("in the way")
    store = store_of(place)
    assert store.load(NAME) is None
    store.save(NAME, DATA)
    store.finish()
    assert len(warnings_of(caplog)) == 1


WRITER = """
import sys
from pathlib import Path
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore
from compiled_engine import trusted_files
store = EntryStore(Path(sys.argv[1]), StartKey({"flags.x": "1"}))
real = trusted_files.os.replace
def stop(*args, **options):
    print("written", flush=True)
    sys.stdin.read()
    real(*args, **options)
store.save("first", b"first")
trusted_files.os.replace = stop
store.save("second", bytes(1000))
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_read_and_is_swept_by_age(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    writer.kill()
    writer.communicate()
    key = StartKey({"flags.x": "1"})
    folder = tmp_path / "programs" / key.digest
    (left,) = [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    store = EntryStore(tmp_path, key)
    assert store.load("first") == b"first"
    assert store.load("second") is None
    store.save("second", b"whole")
    assert left.exists(), "a write may still be under way"
    old = time.time() - 2 * trusted_files.STALE_TEMPORARY_S
    os.utime(left, (old, old))
    again = EntryStore(tmp_path, key)
    assert again.load("second") == b"whole"
    again.save("third", b"3")
    assert not left.exists()


def _write_many(cache: str, seed: int) -> None:
    store = EntryStore(Path(cache), KEY)
    for turn in range(50):
        store.save(NAME, bytes([seed]) * (1000 + turn))
        data = store.load(NAME)
        assert data is not None
        assert len(set(data)) == 1
    store.finish()
    assert not store.counters.misses


def test_many_writers_at_once_never_spoil_an_entry(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), seed)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    left = [path.name for path in path_of(tmp_path).parent.iterdir()]
    assert sorted(left) == sorted([KEY_FILE, "start.json", NAME + SUFFIX])


def test_finish_notes_what_the_start_used(kept):
    store = store_of(kept)
    store.load(NAME)
    store.load("made")
    store.save("made", DATA)
    store.load("never kept")
    store.finish(["cpp/x.so"])
    expected = StartRecord((NAME, "made"), ("never kept",), ("cpp/x.so",))
    assert read_record(kept, KEY.digest) == expected
    assert [entry_problem(kept, KEY.digest, name) for name in expected.entries] == ["", ""]
    assert entry_problem(kept, KEY.digest, "never kept") == "it is not there"


def test_the_key_beside_the_entries_is_readable(kept):
    text = (path_of(kept).parent / KEY_FILE).read_text()
    assert StartKey.from_json(text) == KEY
    assert StartKey.from_json(text).digest == KEY.digest


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 99, "parts": {}}', '{"format": 1, "parts": {"a": 1}}']
)
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        StartKey.from_json(text)


def test_a_damaged_key_file_does_not_hide_the_reason(kept):
    (path_of(kept).parent / KEY_FILE).write_text("{")
    store = store_of(kept, StartKey({**KEY.parts, "flags.x": "2"}))
    assert store.load(NAME) is None
    assert reasons(store) == ["the cache is empty"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a\0b", "x" * 201])
def test_a_name_that_is_no_file_name_is_our_mistake(tmp_path, name):
    with pytest.raises(ValueError, match="cannot name an entry"):
        store_of(tmp_path).save(name, DATA)


def test_the_store_imports_no_torch():
    code = (
        "import sys, compiled_engine.compile.store, compiled_engine.compile.artifact;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
