"""Kernels by measurement: times the candidates of an op on this device and keeps the winners.

What was measured lies in the compile cache's folder, in one file a device, set of versions and
state of our sources; an entry is for one op, dtype and bucket of shapes (the number of tokens
rounded up to a power of two). Writes are atomic and merge with those of other processes. A damaged
file costs one warning and a new measurement.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from compiled_engine.cache_folders import warn_unkept
from compiled_engine.compile.torch_compat import real_tensors
from compiled_engine.custom_ops import families
from compiled_engine.custom_ops.kernel_family import KernelFamily, num_bytes
from compiled_engine.custom_ops.registry import (
    Candidate,
    Measured,
    Objective,
    Query,
    rank,
)
from compiled_engine.custom_ops.timing import calls_ms

FORMAT = 1
NUM_REPEATS = 5
# A higher ranked candidate is kept unless another is faster by more than this: times vary.
MARGIN = 0.03
# Calls get inputs of their own, in all more than the cache of a device holds.
OUT_OF_CACHE_BYTES = 256e6
MAX_COPIES = 8

logger = logging.getLogger(__name__)


class KernelTuner:
    """Measures once for a device and remembers.

    Args:
        folder: where the files lie; made when the first one is written.

    Attributes:
        num_known: questions that the file answered.
        num_measured: those that took a measurement.
        seconds: that these took.
        asked: what they were about, as `bucket_key` spells it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, Measured] = {}
        self._generation = ""
        self.num_known = 0
        self.num_measured = 0
        self.seconds = 0.0
        self.asked: set[str] = set()

    @property
    def entries(self) -> Mapping[str, Measured]:
        """Everything the file holds, of every model, by `bucket_key`."""
        if not self._generation:
            self._load()
        return self._entries

    @property
    def generation(self) -> str:
        """Of the file: made anew when there was none or it was damaged."""
        if not self._generation:
            self._load()
        return self._generation

    @cached_property
    def path(self) -> Path:
        """The file of this device, these versions and these sources."""
        parts = (FORMAT, device_name(), versions(), source_hash())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return self._folder / f"{digest[:24]}.json"

    def measure(
        self, query: Query, fitting: Sequence[Candidate], arguments: Any
    ) -> Measured | None:
        """The fastest candidate for the query, from the file or by a measurement."""
        family = next(f for f in families.FAMILIES if f.place == query.place)
        key = bucket_key(query, fitting, family)
        self.asked.add(key)
        if not self._generation:
            self._load()
        if key not in self._entries:
            device = torch.device(query.target.device_type)
            if device.type == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            start = time.perf_counter()
            with real_tensors():
                seconds = measure_candidates(family, fitting, arguments, device)
            self.num_measured += 1
            self.seconds += time.perf_counter() - start
            if not seconds:
                return None
            ranked = sorted(
                (c for c in fitting if c.name in seconds),
                key=lambda c: rank(c, query.traits, Objective.LATENCY),
                reverse=True,
            )
            self._store(key, Measured(fastest([c.name for c in ranked], seconds), seconds))
        else:
            self.num_known += 1
        return self._entries[key]

    def _load(self) -> None:
        self._generation, self._entries = self._read()
        if not self._generation:
            with self._locked() as can_write:
                # Another process may have been faster.
                self._generation, self._entries = self._read(is_quiet=True)
                if not self._generation:
                    self._generation = uuid.uuid4().hex
                    if can_write:
                        self._write()

    def _read(self, *, is_quiet: bool = False) -> tuple[str, dict[str, Measured]]:
        """Generation and entries of the file; none if it is not there or damaged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            entries = {
                key: Measured(str(entry["winner"]), {n: float(s) for n, s in entry["s"].items()})
                for key, entry in found["entries"].items()
            }
            if any(entry.winner not in entry.seconds for entry in entries.values()):
                raise ValueError("a winner that was not measured")
            return str(found["generation"]), entries
        except FileNotFoundError:
            return "", {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not is_quiet:
                logger.warning(
                    "%s: kernel measurements cannot be read (%s): kernels are measured anew",
                    self.path,
                    error,
                )
            return "", {}

    def _store(self, key: str, measured: Measured) -> None:
        with self._locked() as can_write:
            generation, others = self._read(is_quiet=True)
            if generation == self._generation:
                self._entries = others | self._entries
            # Another process may have measured meanwhile: one answer for all.
            self._entries.setdefault(key, measured)
            if can_write:
                self._write()

    def _write(self) -> None:
        entries = {
            key: {"winner": m.winner, "s": dict(m.seconds)} for key, m in self._entries.items()
        }
        document = {
            "generation": self._generation,
            "device": device_name(),
            "versions": versions(),
            "entries": entries,
        }
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:  # a full disk
            warn_unkept(self._folder.parent, str(error))
            with suppress(OSError):
                temporary.unlink()

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Alone with the file; False where it cannot be written anyway."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_suffix(".lock"), "w")  # noqa: SIM115 - closed below
        except OSError as error:
            warn_unkept(self._folder.parent, str(error))
            yield False
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield True


def fastest(names: Sequence[str], seconds: dict[str, float]) -> str:
    """The first of `names`, best ranked first, that none is faster than by more than `MARGIN`."""
    limit = min(seconds.values()) * (1 + MARGIN)
    return next(name for name in names if seconds[name] <= limit)


def bucket_key(query: Query, fitting: Sequence[Candidate], family: KernelFamily) -> str:
    """What an entry of the file is for, readable: op, dtype, bucket of shapes, candidates."""
    traits = dict(query.traits)
    num_tokens = traits.get(family.varying, 0)
    if num_tokens > 1:
        traits[family.varying] = 1 << (num_tokens - 1).bit_length()
    shown = ", ".join(f"{name}={int(value)}" for name, value in sorted(traits.items()))
    names = ", ".join(sorted(f"{c.name} {c.origin}".strip() for c in fitting))
    dtype = str(query.dtype).removeprefix("torch.")
    return f"{query.place} {dtype} {query.layout}; {shown}; {names}"


def measure_candidates(
    family: KernelFamily, candidates: Sequence[Candidate], arguments: Any, device: torch.device
) -> dict[str, float]:
    """Median seconds of each candidate that could be run, on inputs shaped as `arguments`."""
    given = family.real_inputs(arguments, device)
    size = sum(num_bytes(value) for value in given.values())
    copies = max(2, min(MAX_COPIES, int(OUT_OF_CACHE_BYTES // max(1, size))))
    if device.type == "cpu":
        copies = 2
    sets = [given] + [
        {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        for _ in range(copies - 1)
    ]
    seconds = {}
    for candidate in candidates:
        calls: list[Callable[[], Any]] = [partial(family.run, candidate, each) for each in sets]
        try:
            with torch.no_grad():
                taken = calls_ms(calls, device, num_repeats=NUM_REPEATS)
        except Exception as error:  # one kernel that cannot be built must not cost the others
            logger.warning(
                "%s.%s cannot be measured: %s: %s",
                family.place, candidate.name, type(error).__name__, error,
            )  # fmt: skip
            continue
        # Other work on a CPU makes calls slower, never faster.
        best = min(taken) if device.type == "cpu" else statistics.median(taken)
        seconds[candidate.name] = best * 1e-3
    if device.type == "cuda":
        del sets, given
        torch.cuda.empty_cache()
    return seconds


def device_name() -> str:
    """The device that is measured, and how much of it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {platform.processor()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """What kernels are built with."""
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", "cuda-bindings"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def source_hash() -> str:
    """Hash of every source of our kernels."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h"):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
