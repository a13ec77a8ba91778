"""Where compiled programs are kept between starts: a folder for each start key, a file for each.

Entries are code that the engine runs: folders and files must belong to this user or to root, be no
links, and be writable by nobody else. Whatever is wrong with an entry costs one warning and a
compile, never a start. Writes are atomic, so any number of processes may share a folder. Knows
nothing of what an entry holds; imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from compiled_engine.compile.start_key import StartKey

FOLDER = "programs"
KEY_FILE = "key.json"
SUFFIX = ".program"
MAGIC = b"ceprog1\n"
# A file that a writer left behind is swept when it is older than any write takes.
STALE_TEMPORARY_S = 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_TEMPORARY = ".tmp"

logger = logging.getLogger(__name__)


class EntryError(Exception):
    """An entry cannot be used; the message says why."""


class FolderError(Exception):
    """No entry of a folder can be used; the message says why."""


@dataclass(frozen=True)
class Miss:
    """An entry that was asked for and could not be had.

    Attributes:
        name: of the entry.
        reason: in words.
    """

    name: str
    reason: str


@dataclass
class StoreCounters:
    """What a store did.

    Attributes:
        num_hits: entries that were found and are sound.
        misses: the others, in order.
        num_dropped: entries that were there and could not be used; among the misses.
        num_saved: entries that were written.
        bytes_read: of the hits.
        bytes_written: of the saved ones.
        hit_bytes: size by name of the hits.
        saved_bytes: size by name of the saved ones.
    """

    num_hits: int = 0
    misses: list[Miss] = field(default_factory=list)
    num_dropped: int = 0
    num_saved: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    hit_bytes: dict[str, int] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)


class EntryStore:
    """The entries of one start key.

    Args:
        cache_dir: the engine's cache folder; nothing is made in it before the first `save`.
        key: of this start.
    """

    def __init__(self, cache_dir: Path, key: StartKey) -> None:
        self.key = key
        self.folder = Path(cache_dir) / FOLDER / key.digest
        self.counters = StoreCounters()
        self._can_write = True
        self._can_read = True
        self._is_prepared = False
        self._absent_reason: str | None = None

    def load(self, name: str) -> bytes | None:
        """The entry, verified by its digest; None is a miss, which is counted and logged."""
        try:
            with _opened(self.folder) as folder:
                data = read_entry(folder, name, self.key.digest)
                self._note_use(folder)
        except FileNotFoundError:
            self._miss(name, self.absent_reason())
            return None
        except FolderError as error:
            self._refuse(str(error))
            self._miss(name, str(error))
            return None
        except (EntryError, OSError) as error:
            self._bad(name, str(error))
            return None
        self.counters.num_hits += 1
        self.counters.bytes_read += len(data)
        self.counters.hit_bytes[name] = len(data)
        return data

    def save(self, name: str, data: bytes) -> None:
        """Keeps an entry. A folder that cannot be written costs one warning, once a store."""
        if not self._can_write:
            return
        try:
            self._make_folder()
            with _opened(self.folder) as folder:
                self._prepare(folder)
                write_file(folder, name + SUFFIX, sealed(name, self.key.digest, data))
        except FolderError as error:
            self._refuse(str(error))
            return
        except OSError as error:
            self._can_write = False
            logger.warning(
                "%s cannot be written (%s): what is compiled now is compiled again at the next "
                "start",
                self.folder, error,
            )  # fmt: skip
            return
        self.counters.num_saved += 1
        self.counters.bytes_written += len(data)
        self.counters.saved_bytes[name] = len(data)

    def drop(self, name: str, reason: str) -> None:
        """An entry that was loaded turned out to be of no use: it becomes a miss and is removed."""
        size = self.counters.hit_bytes.pop(name, None)
        if size is not None:
            self.counters.num_hits -= 1
            self.counters.bytes_read -= size
        self._bad(name, reason)

    def has(self, name: str) -> bool:
        """Whether a sound entry is there; counts and logs nothing."""
        try:
            with _opened(self.folder) as folder:
                read_entry(folder, name, self.key.digest)
        except (EntryError, FolderError, OSError):
            return False
        return True

    def names(self) -> list[str]:
        """Names of the entries in the folder, sound or not, sorted."""
        return entry_names(self.folder)

    def absent_reason(self) -> str:
        """Why an entry is not there: which part of the key differs from the nearest one's."""
        if self.folder.is_dir():
            return "not in the cache, though other pieces of this start are"
        if self._absent_reason is None:
            self._absent_reason = miss_reason(self.folder.parent, self.key)
        return self._absent_reason

    def _refuse(self, reason: str) -> None:
        """The folder is not used, neither read nor written; said once."""
        if self._can_read:
            self._can_read = self._can_write = False
            logger.warning("%s is not used: %s", self.folder, reason)

    def _bad(self, name: str, reason: str) -> None:
        path = self.folder / (name + SUFFIX)
        self.counters.num_dropped += 1
        logger.warning("%s is not used, and compiled again: %s", path, reason)
        with suppress(OSError):
            path.unlink()
        self._miss(name, reason)

    def _miss(self, name: str, reason: str) -> None:
        self.counters.misses.append(Miss(name, reason))
        logger.info("compile cache: %s is a miss: %s", name, reason)

    def _note_use(self, folder: int) -> None:
        """`cache ls` and `cache prune` go by the time of the key's file."""
        with suppress(OSError):
            os.utime(KEY_FILE, dir_fd=folder, follow_symlinks=False)

    def _make_folder(self) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.folder.parent, self.folder):
            with suppress(FileExistsError):
                path.mkdir(mode=0o755)
                path.chmod(0o755)  # whatever the umask allows: nobody else may write

    def _prepare(self, folder: int) -> None:
        """Once a store, before its first entry: the readable key, and no temporary files."""
        if self._is_prepared:
            return
        self._is_prepared = True
        _sweep(folder)
        if KEY_FILE not in os.listdir(folder):
            write_file(folder, KEY_FILE, self.key.to_json().encode())


def sealed(name: str, key_digest: str, data: bytes) -> bytes:
    """An entry's file: it tells whether it is whole, and is of use under its own name only."""
    return MAGIC + _entry_digest(name, key_digest, data) + data


def read_entry(folder: int, name: str, key_digest: str) -> bytes:
    """The data of an entry in an open folder.

    Raises:
        FileNotFoundError: there is none.
        EntryError: it is damaged, of another key or name, or may have been written by others.
        OSError: it cannot be read.
    """
    stored = read_file(folder, name + SUFFIX)
    head = len(MAGIC) + _DIGEST_BYTES
    if len(stored) < head or not stored.startswith(MAGIC):
        raise EntryError("it is damaged, or no entry of this cache")
    data = stored[head:]
    if _entry_digest(name, key_digest, data) != stored[len(MAGIC) : head]:
        raise EntryError("its digest does not fit: it is damaged, or the entry of another name")
    return data


def read_file(folder: int, file_name: str) -> bytes:
    """A file of an open folder that only its owner can have written.

    Raises:
        FileNotFoundError: there is none.
        EntryError: it is a link, no file, or others may have written it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    if stat.S_ISLNK(os.stat(file_name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise EntryError("it is a symbolic link")
    with open(os.open(file_name, flags, dir_fd=folder), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise EntryError("it is no file")
        _check_owner(found)
        return file.read()


def write_file(folder: int, file_name: str, data: bytes) -> None:
    """Puts a file into an open folder, whole or not at all."""
    temporary = f".{file_name}.{os.getpid()}.{uuid.uuid4().hex[:8]}{_TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o644, dir_fd=folder), "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        os.replace(temporary, file_name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def entry_names(folder: Path) -> list[str]:
    """Names of the entries in a key's folder, sound or not, sorted; none if it is not there."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    names = (name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def stored_keys(programs: Path) -> Iterator[tuple[Path, StartKey]]:
    """Folders of `programs` with their keys, last used first; those without a readable key not."""
    found = []
    for path in programs.glob(f"*/{KEY_FILE}"):
        with suppress(OSError, ValueError):
            found.append((path.stat().st_mtime, path.parent, StartKey.from_json(path.read_text())))
    for _, folder, key in sorted(found, key=lambda entry: entry[:2], reverse=True):
        yield folder, key


def miss_reason(programs: Path, key: StartKey) -> str:
    """Which parts of `key` differ from the nearest key under `programs`."""
    nearest = min(
        (key.differences(other) for _, other in stored_keys(programs)), key=len, default=None
    )
    if nearest is None:
        return "the cache is empty"
    if not nearest:
        return "nothing is kept under this key"
    more = f" and {len(nearest) - 4} more" if len(nearest) > 4 else ""
    return f"the nearest key in the cache differs in {', '.join(nearest[:4])}{more}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a key's folder, once nobody else can have written it.

    Raises:
        FileNotFoundError: there is none.
        FolderError: it, or the folder above it, is a link or may have been written by others.
    """
    programs = _open_folder(path.parent, None)
    try:
        own = _open_folder(path.name, programs)
    finally:
        os.close(programs)
    try:
        yield own
    finally:
        os.close(own)


def _open_folder(path: Path | str, above: int | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if stat.S_ISLNK(os.stat(path, dir_fd=above, follow_symlinks=False).st_mode):
            raise FolderError(f"{path} is a symbolic link")
        descriptor = os.open(path, flags, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FolderError(str(error)) from error
    try:
        _check_owner(os.fstat(descriptor))
    except EntryError as error:
        os.close(descriptor)
        raise FolderError(f"{path}: {error}") from error
    return descriptor


def _check_owner(found: os.stat_result) -> None:
    """Raises EntryError if somebody else could have put code there."""
    if found.st_uid not in (os.geteuid(), 0):
        raise EntryError(f"it belongs to user {found.st_uid}, not to this one nor to root")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EntryError("others may write it, and it holds code (chmod go-w closes it)")


def _sweep(folder: int) -> None:
    """Removes what writers that were killed left behind."""
    limit = time.time() - STALE_TEMPORARY_S
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(_TEMPORARY):
            with suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < limit:
                    os.unlink(name, dir_fd=folder)


def _entry_digest(name: str, key_digest: str, data: bytes) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an entry")
    digest = hashlib.sha256(f"{key_digest}\0{name}\0".encode())
    digest.update(data)
    return digest.digest()
