"""Builds this package's C++ sources with Inductor's own C++ compiler settings, and loads them.

Inductor keys its cache by source and flags, so a second process loads the library in milliseconds.
Imported only inside launchers: it pulls in Inductor.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"


@functools.cache
def load_cpp_library(file_name: str) -> ctypes.CDLL:
    """Compiles `csrc/<file_name>` if its cache entry is missing; returns the loaded library.

    Raises:
        torch._inductor.exc.CppCompileError: no working C++ compiler; the message holds its output.

    Source: `CppCodeCache.load`, seen in torch 2.11 to 2.14.
    """
    from torch._inductor.codecache import CppCodeCache

    # One translation unit: the cache key then covers the shared header too.
    source = (CSRC / "vector.h").read_text() + (CSRC / file_name).read_text()
    return CppCodeCache.load(source, extra_flags=("-mprefer-vector-width=512",))
