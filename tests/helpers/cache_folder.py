"""Cache folders as starts leave them, made without compiling anything."""

from __future__ import annotations

from pathlib import Path

from compiled_engine import build_cache
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import EntryStore

CODE = b"\x7fELF" + bytes(500)


def keep(cache: Path, key: StartKey, **entries: bytes) -> None:
    """A start with this key made these entries, and one library from our sources."""
    store = EntryStore(cache, key)
    for name, data in entries.items():
        store.load(name)
        store.save(name, data)
    build_cache.load_or_build(cache / "cpp" / "lib.so", lambda: CODE)
    store.finish(["cpp/lib.so"])


def halve(path: Path) -> None:
    """Damages a file."""
    path.write_bytes(path.read_bytes()[:-3])


def files_of(folder: Path) -> set[str]:
    """Every file below a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
