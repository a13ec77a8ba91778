"""The kernel registry: which implementation serves an op, and why the others do not.

A family and a mode ("attention", "decode") have candidates. Choosing filters them by device, dtype
and shape traits, ranks the rest by priority, and takes the first; every rejection has a reason. It
happens once, when a graph is traced: the choice is written into the graph, so nothing is looked up
while a step runs. `KernelRegistry` is cheap, holds its own cache and no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from compiled_engine.errors import ConfigError

Traits = Mapping[str, int]


class Priority(IntEnum):
    """Bands of preference: the highest that can run is taken."""

    REFERENCE = 0
    PORTABLE = 1
    TUNED = 2
    SPECIALIZED = 3


@dataclass(frozen=True)
class Target:
    """What code is made for: device type, and compute capability as major * 10 + minor."""

    device_type: str
    arch: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target a device is."""
        if device.type != "cuda":
            return cls(device.type)
        major, minor = torch.cuda.get_device_capability(device)
        return cls("cuda", 10 * major + minor)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation.

    Attributes:
        family, mode: what it implements.
        name: unique among its family and mode; `--kernel` names it.
        priority: band it is ranked in.
        device_type: "cpu", "cuda", or "" for any.
        min_arch: smallest compute capability.
        dtypes: of its main operand.
        rejects: shape traits to the reason it cannot serve them, None if it can.
        slower: shape traits to the reason another is faster there, None if none is known; it still
            serves where an option names it.
        tags: words for people, shown by `explain`.
    """

    family: str
    mode: str
    name: str
    priority: Priority
    device_type: str = ""
    min_arch: int = 0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    rejects: Callable[[Traits], str | None] = lambda _: None
    slower: Callable[[Traits], str | None] = lambda _: None
    tags: tuple[str, ...] = ()

    def rejection(self, target: Target, dtype: torch.dtype, traits: Traits) -> str | None:
        """Why it cannot serve, None if it can."""
        if self.device_type and self.device_type != target.device_type:
            return f"runs on {self.device_type}, not on {target.device_type}"
        if target.arch < self.min_arch:
            return f"needs sm_{self.min_arch}, this is sm_{target.arch}"
        if dtype not in self.dtypes:
            return f"has no version for {dtype}"
        return self.rejects(traits)


def best_of(fitting: Sequence[Candidate], traits: Traits) -> Candidate:
    """The highest in rank; one that is known to be slower only if there is no other."""
    return max(fitting, key=lambda c: (c.slower(traits) is None, c.priority))


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the reason for each candidate that was not."""

    candidate: Candidate
    rejected: tuple[tuple[str, str], ...]


class KernelRegistry:
    """Candidates and overrides.

    Args:
        candidates: all there are; names are unique within family and mode.
        overrides: "family" or "family.mode" -> name of the candidate that must be taken.

    Raises:
        ConfigError: an override names a family, mode or candidate there is not.
    """

    def __init__(
        self, candidates: tuple[Candidate, ...], overrides: Mapping[str, str] | None = None
    ) -> None:
        self._candidates = candidates
        self._overrides = dict(overrides or {})
        self._choices: dict[tuple[object, ...], Choice] = {}
        for place, name in self._overrides.items():
            self._check_override(place, name)

    def choose(
        self, family: str, mode: str, target: Target, dtype: torch.dtype, traits: Traits
    ) -> Choice:
        """The best candidate that can serve.

        Raises:
            ConfigError: the one an override asks for cannot, or none can.
        """
        key = (family, mode, target, dtype, tuple(sorted(traits.items())))
        if key not in self._choices:
            self._choices[key] = self._choose(family, mode, target, dtype, traits)
        return self._choices[key]

    def override(self, family: str, mode: str) -> str | None:
        """The candidate that an option asks for."""
        return self._overrides.get(f"{family}.{mode}", self._overrides.get(family))

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """All of them, sorted: part of a compile cache's key."""
        return tuple(sorted(self._overrides.items()))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice made so far, in order."""
        return tuple(self._choices.values())

    def _choose(
        self, family: str, mode: str, target: Target, dtype: torch.dtype, traits: Traits
    ) -> Choice:
        found = [c for c in self._candidates if (c.family, c.mode) == (family, mode)]
        assert found, f"no kernel is registered for {family}.{mode}"
        wanted = self.override(family, mode)
        rejected: dict[str, str] = {}
        fitting = []
        for candidate in found:
            reason = candidate.rejection(target, dtype, traits)
            if reason is None:
                fitting.append(candidate)
            else:
                rejected[candidate.name] = reason
        if wanted is not None and wanted in {c.name for c in found}:
            if wanted in rejected:
                raise ConfigError(
                    f"--kernel {family}.{mode}={wanted}: it {rejected[wanted]}", param="kernels"
                )
            best = next(c for c in fitting if c.name == wanted)
            rejected |= {c.name: "an option asks for another" for c in fitting if c is not best}
        else:
            if not fitting:
                reasons = "; ".join(f"{name} {why}" for name, why in rejected.items())
                raise ConfigError(f"no kernel can serve {family}.{mode}: {reasons}")
            best = best_of(fitting, traits)
            lower = f"ranks below {best.name}"
            rejected |= {c.name: c.slower(traits) or lower for c in fitting if c is not best}
        return Choice(best, tuple(rejected.items()))

    def _check_override(self, place: str, name: str) -> None:
        family, _, mode = place.partition(".")
        found = [c for c in self._candidates if c.family == family and mode in ("", c.mode)]
        if not found:
            known = ", ".join(sorted({f"{c.family}.{c.mode}" for c in self._candidates}))
            raise ConfigError(
                f"--kernel {place}={name}: no such kernel family; there are {known}",
                param="kernels",
            )
        if name not in {c.name for c in found}:
            known = ", ".join(sorted({c.name for c in found}))
            raise ConfigError(
                f"--kernel {place}={name}: no such kernel; {place} has {known}", param="kernels"
            )
