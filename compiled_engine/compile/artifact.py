"""A start's compiled code as one file or folder that can be carried to another machine.

An artifact holds files of a cache folder under their own paths, and `manifest.json` with the size
and digest of each. What is in it is code: taking one in is as much as running its maker's program,
which no check here changes. The checks find damage and mistakes. Imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from compiled_engine.cache_folders import CUBINS, KERNELS, LIBRARIES, PRODUCTS, PROGRAMS, TRITON
from compiled_engine.compile.inventory import KeptStart, built_files
from compiled_engine.compile.start_key import StartKey
from compiled_engine.compile.store import KEY_FILE, RECORD_FILE, SUFFIX, entry_problem, read_record
from compiled_engine.errors import ConfigError
from compiled_engine.trusted_files import FolderError, make_folders, opened, write_file

MANIFEST = "manifest.json"
FORMAT = 1
FOLDERS = (PROGRAMS, CUBINS, LIBRARIES, PRODUCTS, KERNELS, TRITON)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
# Kernels that Inductor made are named so; they are inside the entries.
_INDUCTOR_KERNEL = re.compile(r"(__grp__)?triton_")

Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Taken:
    """What an import did.

    Attributes:
        digests: of the start keys.
        num_files: that were written.
        num_bytes: of them.
        kept: files that were here with other contents and were left as they are.
    """

    digests: tuple[str, ...]
    num_files: int
    num_bytes: int
    kept: tuple[str, ...]


def artifact_files(cache_dir: Path, starts: Sequence[KeptStart]) -> list[str]:
    """Files that the starts need, as paths in the cache folder, sorted.

    Raises:
        ConfigError: an entry is damaged; names it.
    """
    found: set[str] = set()
    for start in starts:
        record = read_record(cache_dir, start.digest)
        for path in start.folder.iterdir():
            if path.name.endswith(SUFFIX):
                name = path.name.removesuffix(SUFFIX)
                reason = entry_problem(cache_dir, start.digest, name)
                if reason:
                    raise ConfigError(f"{path} cannot be exported: {reason}")
            if path.name in (KEY_FILE, RECORD_FILE) or path.name.endswith(SUFFIX):
                found.add(path.relative_to(cache_dir).as_posix())
        if record is not None:
            found.update(name for name in record.files if (cache_dir / name).is_file())
        else:  # nobody knows which
            found.update(p.relative_to(cache_dir).as_posix() for p in built_files(cache_dir))
    return sorted(found | set(_triton_files(cache_dir)))


def _triton_files(cache_dir: Path) -> Iterator[str]:
    """What Triton keeps of kernels that are written here."""
    for folder in sorted((cache_dir / TRITON).glob("*/")):
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        if not any(_INDUCTOR_KERNEL.match(name) for name in names):
            yield from (f"{TRITON}/{folder.name}/{name}" for name in names if _PART.fullmatch(name))


def export_artifact(cache_dir: Path, starts: Sequence[KeptStart], target: Path) -> int:
    """Writes what the starts need to `target`: a tar if it ends so, else a folder. Returns bytes.

    Raises:
        ConfigError: an entry is damaged, or the target is there already or cannot be written.
    """
    keys = {start.digest: dict(start.key.parts) for start in starts}
    return _write(cache_dir, artifact_files(cache_dir, starts), keys, target)


def export_files(cache_dir: Path, names: Iterable[str], target: Path) -> int:
    """Writes files of the cache folder that belong to no start yet, as `export_artifact`.

    Each is found by a key of its own, so whoever takes them in need not be of the maker's kind.

    Raises:
        ConfigError: the target is there already or cannot be written.
    """
    return _write(cache_dir, names, {}, target)


def _write(
    cache_dir: Path, names: Iterable[str], keys: dict[str, dict[str, str]], target: Path
) -> int:
    contents = {name: (cache_dir / name).read_bytes() for name in names}
    manifest = {
        "format": FORMAT,
        "keys": keys,
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in contents.items()
        },
    }
    contents = {MANIFEST: json.dumps(manifest, indent=1).encode(), **contents}
    if target.exists():
        raise ConfigError(f"{target} is there already: name another, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".tar":
            _write_tar(target, contents)
        else:
            for name, data in contents.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    return sum(map(len, contents.values()))


def _write_tar(target: Path, contents: dict[str, bytes]) -> None:
    """The same bytes for the same contents, whoever writes them and when."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for name, data in contents.items():
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def import_artifact(
    source: Path, cache_dir: Path, differences: Callable[[StartKey], list[str]]
) -> Taken:
    """Checks an artifact as a whole, then takes its files into the cache folder.

    Args:
        source: a tar or folder that `export_artifact` made.
        cache_dir: of the engine.
        differences: what keeps this installation from using a key.

    Raises:
        ConfigError: it is no artifact, holds what it should not, is damaged, or is of other
            versions; nothing is written then. Or the cache folder cannot be written.
    """
    with _opened_artifact(source) as (names, read):
        manifest = _manifest(source, names, read)
        found = [differences(StartKey(parts)) for parts in manifest["keys"].values()]
        if found and all(found):
            nearest = min(found, key=len)
            raise ConfigError(
                f"{source} was made by another installation and would never be used; it differs in "
                + ", ".join(nearest[:4])
                + (f" and {len(nearest) - 4} more" if len(nearest) > 4 else "")
            )
        contents = {}
        for name, entry in manifest["files"].items():
            data = read(name)
            if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise ConfigError(f"{source}: {name} is damaged")
            contents[name] = data
    try:
        return _take(cache_dir, tuple(manifest["keys"]), contents)
    except (FolderError, OSError) as error:
        raise ConfigError(f"{cache_dir} cannot take the artifact: {error}") from error


def _take(cache_dir: Path, digests: tuple[str, ...], contents: dict[str, bytes]) -> Taken:
    written, kept = 0, []
    # What says that a start is complete comes last.
    for name in sorted(contents, key=lambda name: (name.endswith(f"/{RECORD_FILE}"), name)):
        *folders, file_name = PurePosixPath(name).parts
        make_folders(cache_dir, *folders)
        if folders[0] == TRITON:  # which makes them as the umask says, and asks no more
            _close(cache_dir / TRITON, cache_dir.joinpath(*folders))
        path = cache_dir / name
        if folders[0] == KERNELS and path.exists() and path.read_bytes() != contents[name]:
            kept.append(name)  # this machine's own measurements
            continue
        with opened(cache_dir, *folders) as folder:
            write_file(folder, file_name, contents[name])
        written += 1
    return Taken(digests, written, sum(map(len, contents.values())), tuple(kept))


def _close(*folders: Path) -> None:
    """Takes the right to write from everybody but the owner."""
    for folder in folders:
        folder.chmod(folder.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _manifest(source: Path, names: Iterable[str], read: Read) -> dict[str, Any]:
    """The manifest, once it agrees with what is there and every path is one of ours."""
    present = set(names)
    if MANIFEST not in present:
        raise ConfigError(f"{source} is no artifact: it has no {MANIFEST}")
    try:
        manifest = json.loads(read(MANIFEST))
        is_known = manifest["format"] == FORMAT
        listed = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
        keys = {digest: StartKey(dict(parts)).digest for digest, parts in manifest["keys"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source}: {MANIFEST} cannot be read: {error}") from error
    if not is_known:
        raise ConfigError(f"{source}: its format is {manifest['format']}, known is {FORMAT}")
    for name in listed:
        if not _is_ours(name):
            raise ConfigError(f"{source}: {name!r} is no path of a cache folder")
    for digest, own in keys.items():
        if digest != own:
            raise ConfigError(f"{source}: key {digest} is not what its parts say")
    odd = sorted((present - {MANIFEST}) ^ set(listed))
    if odd:
        raise ConfigError(
            f"{source}: {odd[0]!r} is in the manifest or in the artifact, not in both"
        )
    return manifest


def _is_ours(name: str) -> bool:
    parts = name.split("/")
    depth = {PROGRAMS: 3, TRITON: 3}.get(parts[0], 2)
    return (
        parts[0] in FOLDERS
        and len(parts) == depth
        and all(_PART.fullmatch(part) for part in parts[1:])
    )


@contextmanager
def _opened_artifact(source: Path) -> Iterator[tuple[list[str], Read]]:
    """Names of its files, and how to read one.

    Raises:
        ConfigError: it is neither a folder nor a tar, or holds anything but files and folders.
    """
    if source.is_dir():
        yield _folder_names(source), lambda name: (source / name).read_bytes()
        return
    with _opened_tar(source) as tar:
        members = {}
        try:
            for member in tar:
                if not member.isfile():
                    raise ConfigError(f"{source}: {member.name!r} is no plain file")
                if member.name in members:
                    raise ConfigError(f"{source}: {member.name!r} is there twice")
                members[member.name] = member
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(f"{source} is damaged: {error}") from error

        def read(name: str) -> bytes:
            with suppress(OSError, tarfile.TarError):
                file = tar.extractfile(members[name])
                if file is not None:
                    return file.read()
            raise ConfigError(f"{source}: {name} cannot be read")

        yield list(members), read


def _opened_tar(source: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(source, "r:")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{source} is neither a folder nor a tar file: {error}") from error


def _folder_names(source: Path) -> list[str]:
    found = []
    for base, folders, names in os.walk(source):
        for name in (*folders, *names):
            path = Path(base, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ConfigError(f"{source}: {path.relative_to(source)} is no plain file")
        found += [Path(base, name).relative_to(source).as_posix() for name in names]
    return found
