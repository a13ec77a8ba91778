"""Kernels of other packages: candidates that installed distributions add by an entry point.

An entry point of the group `compiled_engine.kernels` is a sequence of `Candidate`, or a function
without arguments that returns one. Each candidate's `launch` is an op of the plugin's own library
with the arguments of the family's op but `impl`, in the same order. A graph calls that op in the
place of ours: nothing is looked up while a step runs. A plugin that cannot be loaded costs a
warning; one that clashes is refused.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch._ops import OpOverload

from compiled_engine.custom_ops import families
from compiled_engine.custom_ops.registry import Candidate
from compiled_engine.errors import ConfigError

GROUP = "compiled_engine.kernels"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plugins:
    """What installed plugins gave.

    Attributes:
        candidates: of all that could be loaded, with their origin.
        failures: (plugin, why) of the others.
    """

    candidates: tuple[Candidate, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()


class _Unusable(Exception):
    """A plugin's candidate is not what it must be; the message says what."""


def load_plugins(ours: Iterable[Candidate]) -> Plugins:
    """Loads every plugin there is; warns of those that cannot be loaded.

    Raises:
        ConfigError: a candidate has the family, mode and name of another one.
    """
    taken = {_place(candidate): "compiled-engine" for candidate in ours}
    candidates: list[Candidate] = []
    failures = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (_label(e), e.value)):
        label = _label(entry)
        try:
            found = _load(entry)
        except Exception as error:  # whatever a package of others raises
            why = f"{type(error).__name__}: {error}" * (not isinstance(error, _Unusable))
            why = why or str(error)
            logger.warning("kernel plugin %s is left out: %s", label, why)
            failures.append((label, why))
            continue
        for candidate in found:
            place = _place(candidate)
            if place in taken:
                raise ConfigError(
                    f"kernel plugin {label}: {'.'.join(place)} is there already, from "
                    f"{taken[place]}; uninstall one of them",
                    param="kernels",
                )
            taken[place] = label
        candidates += found
    return Plugins(tuple(candidates), tuple(failures))


def _load(entry: EntryPoint) -> list[Candidate]:
    value: Any = entry.load()
    given = list(value() if callable(value) else value)
    origin = f"{_label(entry)} {_source_hash(entry)}"
    for candidate in given:
        _check(candidate)
    return [replace(candidate, origin=origin) for candidate in given]


def _check(candidate: object) -> None:
    """Refuses what a graph could not call in the place of the family's op."""
    if not isinstance(candidate, Candidate):
        raise _Unusable(f"{candidate!r} is no Candidate")
    name = f"{candidate.family}.{candidate.mode}.{candidate.name}"
    found = [f for f in families.FAMILIES if (f.family, f.mode) == _place(candidate)[:2]]
    if not found:
        known = ", ".join(sorted(f.place for f in families.FAMILIES))
        raise _Unusable(f"{name}: no such family and mode; there are {known}")
    if not isinstance(candidate.launch, OpOverload):
        raise _Unusable(f"{name}: launch is no op (torch.ops.NAMESPACE.NAME.default)")
    wanted = [(a.name, str(a.type)) for a in _arguments(found[0].op.overload) if a.name != "impl"]
    given = [(a.name, str(a.type)) for a in _arguments(candidate.launch)]
    if given != wanted:
        spelled = ", ".join(f"{kind} {argument}" for argument, kind in wanted)
        raise _Unusable(f"{name}: launch must take ({spelled})")


def _arguments(overload: Any) -> Any:
    return overload._schema.arguments


def _place(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.family, candidate.mode, candidate.name


def _label(entry: EntryPoint) -> str:
    """Distribution and version, or the entry point's name."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.name


def _source_hash(entry: EntryPoint) -> str:
    """Short hash of the module's source, so that an edited plugin is not served old code."""
    module = inspect.getmodule(entry.load()) or __import__(entry.module, fromlist=["_"])
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()[:12]
