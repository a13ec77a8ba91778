"""The folders inside the engine's cache folder, and the one place that tells compilers of them.

Compilers learn where to keep what they make from environment variables, which they read when they
first need them: `place_caches` must run before. Imports nothing of ours but the config.
"""

from __future__ import annotations

import os
from pathlib import Path

from compiled_engine.config import default_cache_dir

PROGRAMS = "programs"  # compiled pieces, a folder for each start key
INDUCTOR = "inductor"  # Inductor's own; needed only to compile
TRITON = "triton"  # Triton's own
CUBINS = "cubin"  # of our CUDA C++ sources
LIBRARIES = "cpp"  # of our C++ sources
KERNELS = "kernels"  # measurements of kernels
PRODUCTS = "products"  # the library's kernels that were measured fastest

# Where launchers of our own sources keep what they build; set by `place_caches` for its process.
BUILD_VARIABLE = "COMPILED_ENGINE_BUILD_CACHE"


# Every variable that `place_caches` sets.
VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_MANAGER",
    BUILD_VARIABLE,
)


def place_caches(cache_dir: Path) -> None:
    """Has everything that this process and its children compile kept below `cache_dir`."""
    base = Path(cache_dir).absolute()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / INDUCTOR)
    os.environ["TRITON_CACHE_DIR"] = str(base / TRITON)
    os.environ["TRITON_CACHE_MANAGER"] = "compiled_engine.triton_cache:MovableCache"
    os.environ[BUILD_VARIABLE] = str(base)


def build_dir() -> Path:
    """The cache folder that `place_caches` was told last, else the default one."""
    return Path(os.environ.get(BUILD_VARIABLE) or default_cache_dir())
