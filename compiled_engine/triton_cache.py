"""Triton's cache of kernels in a folder that may be moved or copied.

Triton notes of each kernel where its files lie, as whole paths, and compiles it again when they are
not there. They always lie beside the note.
"""

from __future__ import annotations

import json
from pathlib import Path

from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """As Triton's own; files of a kernel are looked for where its note is."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of the kernel's files by name; None if there is no such kernel."""
        note = self.get_file(f"__grp__{filename}")
        if note is None:
            return None
        names = json.loads(Path(note).read_text()).get("child_paths")
        if names is None:
            return None
        paths = {name: self.get_file(name) for name in names}
        return {name: path for name, path in paths.items() if path is not None}
