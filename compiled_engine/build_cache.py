"""Keeps what is built from our CUDA C++ and C++ sources: a file for each, verified before use.

A file is the code and, behind it, the SHA-256 of the code: the loaders of libraries do not mind.
Processes may share the folder. A damaged file is built again; a folder that cannot be written, or
that others can write, costs one warning each time something is built. Imports no torch.
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
    """

    num_hits: int = 0
    num_misses: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    paths: set[Path] = field(default_factory=set)


@functools.cache
def build_totals() -> BuildTotals:
    """The one of this process: libraries are loaded once in it, whoever asks."""
    return BuildTotals()


def load_or_build(path: Path, build: Callable[[], bytes]) -> bytes:
    """The code in a file; if it is not there or not sound, what `build` makes, which is kept."""
    totals = build_totals()
    code = _load(path)
    if code is None:
        start = time.perf_counter()
        code = build()
        totals.seconds += time.perf_counter() - start
        totals.num_misses += 1
        _keep(path, code)
    else:
        totals.num_hits += 1
    totals.num_bytes += len(code)
    totals.paths.add(path)
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
    except (FolderError, OSError) as error:
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
