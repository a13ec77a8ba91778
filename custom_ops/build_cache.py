"""Keeps what is built from our CUDA C++ and C++ sources: a file for each, verified before use.

A file is the code and, behind it, the SHA-256 of the code: the loaders of libraries do not mind.
Processes may share the folder. A damaged file is built again; a folder that cannot be written, or
that others can write, costs one warning each time something is built. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
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


def load_built(path: Path) -> bytes | None:
    """The code in a file, None if it must be built; notes that it was used."""
    try:
        with opened(path.parent.parent, path.parent.name) as folder:
            code = unsealed(read_file(folder, path.name))
            with suppress(OSError):  # a folder that is only read
                os.utime(path.name, dir_fd=folder)
            return code
    except FileNotFoundError:
        return None
    except (UntrustedError, FolderError, OSError) as error:
        warnings.warn(f"{path} is not used, and built again: {error}", stacklevel=3)
        return None


def keep_built(path: Path, code: bytes) -> None:
    """Keeps the code of a file that `load_built` did not find."""
    try:
        make_folders(path.parent.parent, path.parent.name)
        with opened(path.parent.parent, path.parent.name) as folder:
            sweep(folder)
            write_file(folder, path.name, sealed(code))
    except (FolderError, OSError) as error:
        warnings.warn(
            f"{path} cannot be kept ({error}): the next start builds it again", stacklevel=3
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
