"""Builds this package's C++ sources with Inductor's own C++ compiler settings, and loads them.

What was built is kept in the engine's cache folder, so that a second process loads the library in
milliseconds and without Inductor. Imported only inside launchers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

import torch

from compiled_engine.cache_folders import LIBRARIES, build_dir
from compiled_engine.custom_ops.build_cache import keep_built, load_built
from compiled_engine.device import instruction_sets

CSRC = Path(__file__).parent / "csrc"
FLAGS = ("-mprefer-vector-width=512",)


@functools.cache
def load_cpp_library(file_name: str) -> ctypes.CDLL:
    """Compiles `csrc/<file_name>` if it is not kept; returns the loaded library.

    Raises:
        torch._inductor.exc.CppCompileError: no working C++ compiler; the message holds its output.

    Source: `CppCodeCache.load`, seen in torch 2.11 to 2.14.
    """
    # One translation unit: the key then covers the shared header too.
    source = (CSRC / "vector.h").read_text() + (CSRC / file_name).read_text()
    path = build_dir() / LIBRARIES / f"{library_key(source)}.so"
    if load_built(path) is not None:
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # built where the system's libraries are newer
            path.unlink(missing_ok=True)
    from torch._inductor.codecache import CppCodeCache

    library: ctypes.CDLL = CppCodeCache.load(source, extra_flags=FLAGS)
    keep_built(path, Path(library._name).read_bytes())
    return library


def library_key(source: str) -> str:
    """Key of one library: everything that its bytes depend on."""
    parts = (source, FLAGS, torch.__version__, instruction_sets())
    return hashlib.sha256(repr(parts).encode()).hexdigest()
