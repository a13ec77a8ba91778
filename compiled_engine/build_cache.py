"""Keeps what is built from our CUDA C++ and C++ sources: a file for each, verified before use.

A file is the code and, behind it, the SHA-256 of the code: the loaders of libraries do not mind.
Processes may share the folder. A damaged file is built again; a folder that cannot be written costs
one warning, one that others can write a warning each time something is built. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from compiled_engine.cache_folders import warn_unkept
from compiled_engine.trusted_files import (
    FolderError,
    UntrustedError,
    make_folders,
    opened,
    read_file,
    sweep,
    write_file,
)

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass
class BuildTotals:
    """What this process built and loaded so far.

    Attributes:
        num_hits: files that were kept.
        num_misses: files that were built.
        num_bytes: of code, of both.
        seconds: spent on building.
        paths: of all.
        on_built: called with the seconds of each build, when it has ended.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    paths: set[Path] = field(default_factory=set)
    on_built: Callable[[float], None] | None = None

    def note_found(self, path: Path, num_bytes: int) -> None:
        """Something was kept."""
        self.num_hits += 1
        self.num_bytes += num_bytes
        self.paths.add(path)

    def note_built(self, path: Path, num_bytes: int, seconds: float) -> None:
        """Something had to be built."""
        self.num_misses += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.paths.add(path)
        if self.on_built is not None:
            self.on_built(seconds)


@functools.cache
def build_totals() -> BuildTotals:
    """The one of this process: libraries are loaded once in it, whoever asks."""
    return BuildTotals()


@functools.cache
def triton_totals() -> BuildTotals:
    """The same of Triton kernels that are written here; Triton keeps them."""
    return BuildTotals()


def load_or_build(path: Path, build: Callable[[], bytes]) -> bytes:
    """The code in a file; if it is not there or not sound, what `build` makes, which is kept."""
    totals = build_totals()
    code = _load(path)
    if code is None:
        start = time.perf_counter()
        code = build()
        totals.note_built(path, len(code), time.perf_counter() - start)
        _keep(path, code)
    else:
        totals.note_found(path, len(code))
    return code


def file_problem(path: Path) -> str:
    """Why a kept file cannot be used; empty if it is sound."""
    try:
        with opened(path.parent.parent, path.parent.name) as folder:
            unsealed(read_file(folder, path.name))
    except FileNotFoundError:
        return "it is not there"
    except (UntrustedError, FolderError, OSError) as error:
        return str(error)
    return ""


def _load(path: Path) -> bytes | None:
    try:
        with opened(path.parent.parent, path.parent.name) as folder:
            code = unsealed(read_file(folder, path.name))
            with suppress(OSError):  # `cache prune` goes by it
                os.utime(path.name, dir_fd=folder)
            return code
    except FileNotFoundError:
        return None
    except (UntrustedError, FolderError, OSError) as error:
        warnings.warn(f"{path} is not used, and built again: {error}", stacklevel=4)
        return None


def _keep(path: Path, code: bytes) -> None:
    try:
        make_folders(path.parent.parent, path.parent.name)
        with opened(path.parent.parent, path.parent.name) as folder:
            sweep(folder)
            write_file(folder, path.name, sealed(code))
    except OSError as error:
        warn_unkept(path.parent.parent, str(error))
    except FolderError as error:
        warnings.warn(
            f"{path} cannot be kept ({error}): the next start builds it again", stacklevel=4
        )


def sealed(code: bytes) -> bytes:
    """The bytes of a file that holds `code`."""
    return code + hashlib.sha256(code).digest()


def unsealed(stored: bytes) -> bytes:
    """The code in a file's bytes.

    Raises:
        UntrustedError: they are not what was written.
    """
    code, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != digest:
        raise UntrustedError("it is damaged")
    return code
