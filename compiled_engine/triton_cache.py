"""Triton's cache of kernels in a folder that may be moved or copied, and what was in it.

Triton notes of each kernel where its files lie, as whole paths, and compiles it again when they are
not there. They always lie beside the note. Where the folder cannot be written, new kernels go to a
temporary one. Kernels that Inductor wrote are not counted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from compiled_engine.build_cache import triton_totals
from compiled_engine.cache_folders import has_kernel, make_room_for_compilers

_INDUCTOR_KERNEL = re.compile(r"triton_")


class MovableCache(FileCacheManager):
    """As Triton's own; files of a kernel are looked for where its note is."""

    _asked_at: float | None = None  # since when a kernel is being compiled

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if not (override or dump or has_kernel(Path(knobs.cache.dir, key))):
            make_room_for_compilers()
        super().__init__(key, override, dump)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of the kernel's files by name; None if there is no such kernel."""
        found = self._find(filename)
        if not _INDUCTOR_KERNEL.match(filename):
            if found is not None and filename in found:
                triton_totals().note_found(self._note_of(filename), _size(found.values()))
            else:
                self._asked_at = time.perf_counter()
        return found

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Notes which files belong together: those of a kernel that has just been compiled."""
        path = super().put_group(filename, group)
        if self._asked_at is not None:
            seconds = time.perf_counter() - self._asked_at
            triton_totals().note_built(self._note_of(filename), _size(group.values()), seconds)
            self._asked_at = None
        return path

    def _find(self, filename: str) -> dict[str, str] | None:
        note = self.get_file(f"__grp__{filename}")
        if note is None:
            return None
        names = json.loads(Path(note).read_text()).get("child_paths")
        if names is None:
            return None
        paths = {name: self.get_file(name) for name in names}
        return {name: path for name, path in paths.items() if path is not None}

    def _note_of(self, filename: str) -> Path:
        return Path(self._make_path(f"__grp__{filename}"))


def _size(paths: Iterable[str]) -> int:
    return sum(Path(path).stat().st_size for path in paths)
