"""The folders inside the engine's cache folder, and the one place that tells compilers of them.

Compilers learn where to keep what they make from environment variables, which they read when they
first need them: `place_caches` must run before. Where the folder cannot take what compilers write
(it is read-only, or the disk is full), they write to a temporary one; what this process compiled is
lost then, and it serves all the same. Imports nothing of ours but the config.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

from compiled_engine.config import default_cache_dir

logger = logging.getLogger(__name__)

PROGRAMS = "programs"  # compiled pieces, a folder for each start key
INDUCTOR = "inductor"  # Inductor's own; needed only to compile
TRITON = "triton"  # Triton's own
CUBINS = "cubin"  # of our CUDA C++ sources
LIBRARIES = "cpp"  # of our C++ sources
KERNELS = "kernels"  # measurements of kernels
PRODUCTS = "products"  # the library's kernels that were measured fastest

# What compilers write for one start, and some.
LEAST_FREE_BYTES = 128 * 2**20

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


def write_problem(folder: Path) -> str:
    """Why compilers cannot work in a folder, which need not be there yet; empty if they can.

    Looks only: nothing is written.
    """
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.path.isdir(there):
        return f"{there} is no folder"
    found = os.statvfs(there)
    if found.f_flag & os.ST_RDONLY:
        return "it is read-only"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user may not write to {there}"
    free = found.f_bavail * found.f_frsize
    if free < LEAST_FREE_BYTES:
        least = LEAST_FREE_BYTES // 2**20
        return f"no space: {free // 2**20} MiB are free, compilers may need {least}"
    if found.f_files and not found.f_favail:
        return "no space: no more files can be made there"
    return ""


def warn_unkept(cache_dir: Path, reason: str) -> None:
    """Says, once a process, that what is compiled cannot be kept in the cache folder, and why."""
    note = _notes(str(Path(cache_dir).absolute()))
    if not note:
        note.append(reason)
        logger.warning(
            "%s cannot be written (%s): what is compiled or measured now is made again at the next "
            "start; make it writable, free space there, or name another folder with --cache-dir",
            cache_dir, reason,
        )  # fmt: skip


@functools.cache
def _notes(_cache_dir: str) -> list[str]:
    """Reasons that were given for a folder, in this process."""
    return []


def make_room_for_compilers() -> None:
    """To be called before something is compiled: where the cache folder cannot take what compilers
    write, they get a temporary folder until this process ends, and one warning says so."""
    base = Path(os.environ.get(BUILD_VARIABLE, ""))
    places = {"TORCHINDUCTOR_CACHE_DIR": base / INDUCTOR, "TRITON_CACHE_DIR": base / TRITON}
    if any(os.environ.get(name) != str(path) for name, path in places.items()):
        return  # others decide, or that is done already
    reason = next(filter(None, map(write_problem, places.values())), "")
    scratch = _scratch_folder() if reason else None
    if scratch is None:  # if it is the disk, it may suffice; if not, the compiler says what fails
        return
    for name, path in places.items():
        os.environ[name] = str(scratch / path.name)
    (scratch / INDUCTOR).mkdir()
    _link_kernels(base / TRITON, scratch / TRITON)
    warn_unkept(base, reason)


def _scratch_folder() -> Path | None:
    """A folder that goes with this process; None if there is no room for one."""
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError:
        usual = "/dev/shm"
    for place in (usual, "/dev/shm"):
        if not os.path.isdir(place) or write_problem(Path(place)):
            continue
        if not os.statvfs(place).f_flag & os.ST_NOEXEC:  # what compilers make there is run
            made = Path(tempfile.mkdtemp(prefix="compiled-engine-", dir=place))
            atexit.register(_remove, made, os.getpid())
            return made
    return None


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _link_kernels(kept: Path, scratch: Path) -> None:
    """Makes what Triton has kept visible in another folder: what is whole, by links."""
    scratch.mkdir()
    if not kept.is_dir():
        return
    for folder in kept.iterdir():
        if has_kernel(folder):
            (scratch / folder.name).symlink_to(folder)


def has_kernel(folder: Path) -> bool:
    """Whether a folder of Triton's cache holds all of what was compiled."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(name.startswith("__grp__") or name.endswith(".so") for name in names)
