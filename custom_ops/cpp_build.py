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

from compiled_engine.build_cache import load_or_build
from compiled_engine.cache_folders import LIBRARIES, build_dir, make_room_for_compilers
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
    built: list[ctypes.CDLL] = []

    def build() -> bytes:
        from torch._inductor.codecache import CppCodeCache

        make_room_for_compilers()
        built.append(CppCodeCache.load(source, extra_flags=FLAGS))
        return Path(built[0]._name).read_bytes()

    load_or_build(path, build)
    return built[0] if built else ctypes.CDLL(str(path))


def library_key(source: str) -> str:
    """Key of one library: everything that its bytes depend on."""
    parts = (source, FLAGS, torch.__version__, instruction_sets())
    return hashlib.sha256(repr(parts).encode()).hexdigest()
