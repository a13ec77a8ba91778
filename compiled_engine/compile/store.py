"""Where compiled programs are kept between starts: a folder for each start key, a file for each.

Entries are code that the engine runs: folders and files must belong to this user or to root, be no
links, and be writable by nobody else. Whatever is wrong with an entry costs one warning and a
compile, never a start; it is removed if it is seen to be damaged or untrusted, not if it cannot be
read just now. Writes are atomic, so any number of processes may share a folder. Knows
nothing of what an entry holds; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from compiled_engine.cache_folders import PROGRAMS, warn_unkept
from compiled_engine.compile.start_key import StartKey
from compiled_engine.trusted_files import (
    FileIdentity,
    FolderError,
    UntrustedError,
    file_identity,
    make_folders,
    opened,
    read_file,
    remove_file,
    sweep,
    write_file,
)

KEY_FILE = "key.json"
RECORD_FILE = "start.json"
SUFFIX = ".program"
MAGIC = b"ceprog1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Miss:
    """An entry that was asked for and could not be had.

    Attributes:
        name: of the entry.
        reason: in words.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class StartRecord:
    """What a complete start used.

    Attributes:
        entries: names of its entries.
        unkept: names of what is compiled at every start, since it could not be kept.
        files: other files of the cache folder, relative to it.
    """

    entries: tuple[str, ...]
    unkept: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def to_json(self) -> str:
        """A document for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, data: bytes) -> StartRecord:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is no such document.
        """
        document = json.loads(data)
        names = [entry.name for entry in fields(cls)]
        if not isinstance(document, dict) or sorted(document) != sorted(names):
            raise ValueError("no record of a start")
        values = {name: tuple(str(value) for value in document[name]) for name in names}
        return cls(**values)


@dataclass
class StoreCounters:
    """What a store did.

    Attributes:
        num_hits: entries that were found and are sound.
        misses: the others, in order.
        num_dropped: entries that were there and are of no use; among the misses.
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
        self._place = (Path(cache_dir), PROGRAMS, key.digest)
        self.folder = Path(*self._place)
        self.counters = StoreCounters()
        self._can_write = True
        self._can_read = True
        self._is_prepared = False
        self._absent_reason: str | None = None
        self._seen: dict[str, FileIdentity] = {}  # the files that were read

    def load(self, name: str) -> bytes | None:
        """The entry, verified by its digest; None is a miss, which is counted."""
        try:
            with opened(*self._place) as folder:
                self._seen[name] = file_identity(folder, name + SUFFIX)
                data = read_entry(folder, name, self.key.digest)
                self._note_use(folder)
        except FileNotFoundError:
            self._miss(name, self.absent_reason())
            return None
        except FolderError as error:
            self._refuse(str(error))
            self._miss(name, str(error))
            return None
        except UntrustedError as error:
            self._bad(name, str(error))
            return None
        except (OSError, MemoryError) as error:  # of this machine, now: the entry may be good
            reason = f"it cannot be read: {error}"
            logger.warning("%s is not used, and compiled again: %s", self._path(name), reason)
            self._miss(name, reason)
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
            make_folders(*self._place)
            with opened(*self._place) as folder:
                self._prepare(folder)
                write_file(folder, name + SUFFIX, sealed(name, self.key.digest, data))
        except FolderError as error:
            self._refuse(str(error))
            return
        except OSError as error:
            self._can_write = False
            warn_unkept(self._place[0], str(error))
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

    def finish(self, files: Iterable[str] = ()) -> None:
        """Notes what this start used, once it is complete: what a later one will ask for.

        Args:
            files: other files in the cache folder that were used, relative to it.
        """
        kept = {*self.counters.hit_bytes, *self.counters.saved_bytes}
        missed = {miss.name for miss in self.counters.misses}
        used = StartRecord(tuple(sorted(kept)), tuple(sorted(missed - kept)), tuple(sorted(files)))
        if not self._can_write or not kept:
            return
        try:
            with opened(*self._place) as folder:
                data = used.to_json().encode()
                if RECORD_FILE not in os.listdir(folder) or read_file(folder, RECORD_FILE) != data:
                    write_file(folder, RECORD_FILE, data)
        except (UntrustedError, FolderError, OSError) as error:
            logger.warning("%s: what this start used cannot be noted: %s", self.folder, error)

    def absent_reason(self) -> str:
        """Why an entry is not there: which part of the key differs from the nearest one's."""
        if self._absent_reason is None:  # what is saved from then on makes no difference
            if entry_names(self.folder):
                self._absent_reason = "it is not in the cache, though others of this start are"
            else:
                self._absent_reason = miss_reason(self.folder.parent, self.key)
        return self._absent_reason

    def _refuse(self, reason: str) -> None:
        """The folder is not used, neither read nor written; said once."""
        if self._can_read:
            self._can_read = self._can_write = False
            logger.warning("%s is not used: %s", self.folder, reason)

    def _bad(self, name: str, reason: str) -> None:
        self.counters.num_dropped += 1
        logger.warning("%s is not used, and compiled again: %s", self._path(name), reason)
        seen = self._seen.pop(name, None)
        if seen is not None:  # else it was written by this store, or by somebody since
            with suppress(OSError, FolderError), opened(*self._place) as folder:
                remove_file(folder, name + SUFFIX, seen)
        self._miss(name, reason)

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)

    def _miss(self, name: str, reason: str) -> None:
        self.counters.misses.append(Miss(name, reason))

    def _note_use(self, folder: int) -> None:
        """`cache ls` and `cache prune` go by the time of the key's file."""
        with suppress(OSError):
            os.utime(KEY_FILE, dir_fd=folder, follow_symlinks=False)

    def _prepare(self, folder: int) -> None:
        """Once a store, before its first entry: the readable key, and no temporary files."""
        if self._is_prepared:
            return
        self._is_prepared = True
        sweep(folder)
        if KEY_FILE not in os.listdir(folder):
            write_file(folder, KEY_FILE, self.key.to_json().encode())


def sealed(name: str, key_digest: str, data: bytes) -> bytes:
    """An entry's file: it tells whether it is whole, and is of use under its own name only."""
    return MAGIC + _entry_digest(name, key_digest, data) + data


def read_entry(folder: int, name: str, key_digest: str) -> bytes:
    """The data of an entry in an open folder.

    Raises:
        FileNotFoundError: there is none.
        UntrustedError: it is damaged, of another key or name, or may have been written by others.
        OSError: it cannot be read.
    """
    stored = read_file(folder, name + SUFFIX)
    head = len(MAGIC) + _DIGEST_BYTES
    if len(stored) < head or not stored.startswith(MAGIC):
        raise UntrustedError("it is damaged, or no entry of this cache")
    data = stored[head:]
    if _entry_digest(name, key_digest, data) != stored[len(MAGIC) : head]:
        raise UntrustedError("its digest does not fit: it is damaged, or the entry of another name")
    return data


def entry_names(folder: Path) -> list[str]:
    """Names of the entries in a key's folder, sound or not, sorted; none if it is not there."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    names = (name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))
    return sorted(name for name in names if _NAME.fullmatch(name))


def read_record(cache_dir: Path, digest: str) -> StartRecord | None:
    """What the last complete start under a key used; None if that is not known."""
    try:
        with opened(cache_dir, PROGRAMS, digest) as folder:
            return StartRecord.from_json(read_file(folder, RECORD_FILE))
    except (UntrustedError, FolderError, OSError, ValueError):
        return None


def entry_problem(cache_dir: Path, digest: str, name: str) -> str:
    """Why an entry cannot be used; empty if it is sound. Counts, logs and changes nothing."""
    try:
        with opened(cache_dir, PROGRAMS, digest) as folder:
            read_entry(folder, name, digest)
    except FileNotFoundError:
        return "it is not there"
    except (UntrustedError, FolderError, OSError) as error:
        return str(error)
    return ""


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


def _entry_digest(name: str, key_digest: str, data: bytes) -> bytes:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an entry")
    digest = hashlib.sha256(f"{key_digest}\0{name}\0".encode())
    digest.update(data)
    return digest.digest()
