"""Files that hold code: read only if nobody else can have written them, and written at once.

A folder is opened once and everything is done through its descriptor, so nobody can put another in
its place meanwhile. Trusted are this user and root; a link is never followed.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A file that a writer left behind is swept when it is older than any write takes.
STALE_TEMPORARY_S = 3600.0
_TEMPORARY = ".tmp"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

# Device, inode, time of the last change in ns, bytes.
FileIdentity = tuple[int, int, int, int]


class UntrustedError(Exception):
    """A file cannot be used; the message says why."""


class FolderError(Exception):
    """Nothing in a folder can be used; the message says why."""


def make_folders(base: Path, *below: str) -> None:
    """Makes `base`, and the folders below it such that nobody else may write them."""
    base.mkdir(parents=True, exist_ok=True)
    for name in below:
        base /= name
        with suppress(FileExistsError):
            base.mkdir(0o755)  # never writable by others, not even for a moment


@contextmanager
def opened(base: Path, *below: str) -> Iterator[int]:
    """The descriptor of the last folder of a path whose folders below `base` are trusted.

    Raises:
        FileNotFoundError: a folder is not there.
        FolderError: one is a link, cannot be opened, or may have been written by others.
    """
    above = None
    try:
        for place, name in enumerate(below):
            path: Path | str = base / name if place == 0 else name
            descriptor = _open_folder(path, above)
            if above is not None:
                os.close(above)
            above = descriptor
        assert above is not None, "no folder to open"
        yield above
    finally:
        if above is not None:
            os.close(above)


def read_file(folder: int, name: str) -> bytes:
    """A file of an open folder.

    Raises:
        FileNotFoundError: there is none.
        UntrustedError: it is a link, no file, or others may have written it.
        OSError: it cannot be read.
    """
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise UntrustedError("it is a symbolic link")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError("it is no file")
        reason = untrusted(found)
        if reason:
            raise UntrustedError(reason)
        return file.read()


def write_file(folder: int, name: str, data: bytes) -> None:
    """Puts a file into an open folder, in one step; readers see the old one or the new one."""
    temporary = f".{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}{_TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o644, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def file_identity(folder: int, name: str) -> FileIdentity:
    """Which file a name in an open folder stands for now; another one that takes its place differs.

    Raises:
        OSError: there is none, or it cannot be looked at.
    """
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def remove_file(folder: int, name: str, identity: FileIdentity) -> None:
    """Removes a file of an open folder, unless another one has taken its place since."""
    with suppress(OSError):
        if file_identity(folder, name) == identity:
            os.unlink(name, dir_fd=folder)


def sweep(folder: int) -> None:
    """Removes from an open folder what writers that were killed left behind."""
    limit = time.time() - STALE_TEMPORARY_S
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(_TEMPORARY):
            with suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < limit:
                    os.unlink(name, dir_fd=folder)


def untrusted(found: os.stat_result) -> str:
    """Why somebody else may have written a file or folder; empty if nobody can have."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to this one nor to root"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write it, and it holds code (chmod go-w closes it)"
    return ""


def _open_folder(path: Path | str, above: int | None) -> int:
    try:
        if stat.S_ISLNK(os.stat(path, dir_fd=above, follow_symlinks=False).st_mode):
            raise FolderError(f"{path} is a symbolic link")
        descriptor = os.open(path, _FOLDER_FLAGS, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FolderError(str(error)) from error
    reason = untrusted(os.fstat(descriptor))
    if reason:
        os.close(descriptor)
        raise FolderError(f"{path}: {reason}")
    return descriptor
