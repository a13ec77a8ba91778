"""What a cache folder holds: its start keys, and what was built from our sources; checked, pruned.

Imports no torch. Reads keys as they lie there; nothing in an entry is run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compiled_engine.build_cache import file_problem
from compiled_engine.cache_folders import (
    CUBINS,
    INDUCTOR,
    KERNELS,
    LIBRARIES,
    PRODUCTS,
    PROGRAMS,
    TRITON,
)
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import (
    KEY_FILE,
    entry_names,
    entry_problem,
    read_record,
    stored_keys,
)

BUILT = (CUBINS, LIBRARIES, PRODUCTS)
_REMOVED = ".removed-"


@dataclass(frozen=True)
class KeptStart:
    """A start key of a cache folder.

    Attributes:
        folder: of its entries.
        key: of the start.
        num_entries: in the folder.
        num_bytes: of its files.
        used_at: seconds since the epoch.
        is_complete: a start with it came to its end.
    """

    folder: Path
    key: StartKey
    num_entries: int
    num_bytes: int
    used_at: float
    is_complete: bool

    @property
    def digest(self) -> str:
        """Of the key."""
        return self.folder.name


@dataclass(frozen=True)
class Removed:
    """What pruning took away.

    Attributes:
        label: of a key or a file.
        num_bytes: of it.
    """

    label: str
    num_bytes: int


def kept_starts(cache_dir: Path) -> list[KeptStart]:
    """Every start key, last used first."""
    found = []
    for folder, key in stored_keys(cache_dir / PROGRAMS):
        with suppress(OSError):  # removed meanwhile
            found.append(
                KeptStart(
                    folder=folder,
                    key=key,
                    num_entries=len(entry_names(folder)),
                    num_bytes=size_of(folder),
                    used_at=(folder / KEY_FILE).stat().st_mtime,
                    is_complete=read_record(cache_dir, folder.name) is not None,
                )
            )
    return found


def built_files(cache_dir: Path) -> list[Path]:
    """What was built from our sources, sorted."""
    folders = (cache_dir / name for name in BUILT)
    found = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return sorted(path for path in found if not path.name.startswith("."))


def find_problems(cache_dir: Path) -> tuple[int, list[tuple[str, str]]]:
    """How many entries and files are sound, and (path in the folder, why) of the others."""
    num_sound, problems = 0, []
    for name, reason in _checks(cache_dir):
        if reason:
            problems.append((name, reason))
        else:
            num_sound += 1
    return num_sound, problems


def _checks(cache_dir: Path) -> Iterator[tuple[str, str]]:
    programs = cache_dir / PROGRAMS
    readable = {folder.name: key for folder, key in stored_keys(programs)}
    for folder in sorted(programs.iterdir()) if programs.is_dir() else ():
        if folder.name.startswith("."):
            continue
        label, key = f"{PROGRAMS}/{folder.name}", readable.get(folder.name)
        if key is None:
            yield f"{label}/{KEY_FILE}", "it cannot be read"
        elif key.digest != folder.name:
            yield f"{label}/{KEY_FILE}", "it is the key of another folder"
        for name in entry_names(folder):
            yield f"{label}/{name}", entry_problem(cache_dir, folder.name, name)
        record = read_record(cache_dir, folder.name)
        for name in record.entries if record else ():
            if name not in entry_names(folder):
                yield f"{label}/{name}", "it is not there, and a start needs it"
    for path in built_files(cache_dir):
        yield path.relative_to(cache_dir).as_posix(), file_problem(path)
    for path in sorted((cache_dir / KERNELS).glob("*.json")):
        yield path.relative_to(cache_dir).as_posix(), _json_problem(path)


def _json_problem(path: Path) -> str:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""


def prune(
    cache_dir: Path,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    usable: StartKey | None = None,
    compilers: bool = False,
) -> list[Removed]:
    """Removes keys and built files; running engines have read theirs and do not mind.

    Args:
        cache_dir: of the engine.
        older_than_s: those not used for so long.
        max_bytes: the ones longest unused, until keys and built files together take no more.
        usable: keys that differ in one of these parts.
        compilers: what Inductor and Triton keep for themselves.
    """
    items: list[tuple[float, Path, int]] = []
    removed: list[Removed] = []
    for start in kept_starts(cache_dir):
        if usable is not None and not _agrees(start.key, usable):
            removed.append(_remove(cache_dir, start.folder, start.num_bytes))
        else:
            items.append((start.used_at, start.folder, start.num_bytes))
    stats = ((path, path.stat()) for path in built_files(cache_dir))
    items += [(found.st_mtime, path, found.st_size) for path, found in stats]
    items.sort()
    total, now = sum(size for _, _, size in items), time.time()
    for used_at, path, size in items:
        is_old = older_than_s is not None and used_at < now - older_than_s
        if is_old or (max_bytes is not None and total > max_bytes):
            total -= size
            removed.append(_remove(cache_dir, path, size))
    theirs = [cache_dir / name for name in (INDUCTOR, TRITON)] if compilers else []
    removed += [_remove(cache_dir, path, size_of(path)) for path in theirs if path.is_dir()]
    _sweep_removed(cache_dir)
    return removed


def _agrees(key: StartKey, other: StartKey) -> bool:
    return all(key.parts.get(name) == value for name, value in other.parts.items())


def _remove(cache_dir: Path, path: Path, size: int) -> Removed:
    """Takes a file or folder away at once: nobody finds half of it."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{_REMOVED}{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return Removed(path.relative_to(cache_dir).as_posix(), size)


def _sweep_removed(cache_dir: Path) -> None:
    """What a prune that was killed left behind."""
    for folder in (cache_dir, cache_dir / PROGRAMS):
        for path in folder.glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total
