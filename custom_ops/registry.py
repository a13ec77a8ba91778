"""The kernel registry: which implementation serves an op, and why the others do not.

A family and a mode ("attention", "paged") have candidates. Choosing filters them by device, dtype,
format and shape traits, ranks the rest by the objective, and takes the first; every rejection has a
reason. It happens once, when a graph is traced: the choice is written into the graph, so nothing is
looked up while a step runs. `KernelRegistry` is cheap, holds its own cache and no other state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol

import torch

from compiled_engine.errors import ConfigError

Traits = Mapping[str, int]

# What ops that choose by themselves remember: sizes of steps times kinds of calls.
MAX_DECISIONS = 4096

# Tags that objectives look at; all others are words for people.
LATENCY_TAG = "latency"
THROUGHPUT_TAG = "throughput"
PORTABLE_TAG = "portable"
DETERMINISTIC_TAG = "deterministic"


class Priority(IntEnum):
    """Bands of preference: the highest that can run is taken."""

    REFERENCE = 0
    PORTABLE = 1
    TUNED = 2
    SPECIALIZED = 3


class Objective(StrEnum):
    """What the ranking of candidates that can serve goes by.

    LATENCY: what was measured fastest at the shape, then the band.
    THROUGHPUT: kernels made for many tokens, then as LATENCY.
    PORTABILITY: what asks least of the device; plain torch only where nothing else can serve.
    DETERMINISM: only what gives the same bits for the same input, then as LATENCY.
    AUTOTUNE: what a measurement on this device found fastest for the shape.
    """

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    PORTABILITY = "portability"
    DETERMINISM = "determinism"
    AUTOTUNE = "autotune"


@dataclass(frozen=True)
class Target:
    """What code is made for: device type, and compute capability as major * 10 + minor.

    Of one that is only described, and is not here, the tools that kernels need are taken for
    granted.
    """

    device_type: str
    arch: int = 0
    is_described: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target a device is."""
        if device.type != "cuda":
            return cls(device.type)
        return _cuda_target(device)


@functools.cache
def _cuda_target(device: torch.device) -> Target:
    major, minor = torch.cuda.get_device_capability(device)
    return Target("cuda", 10 * major + minor)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation.

    Attributes:
        family, mode: what it implements.
        name: unique among its family and mode; `--kernel` names it.
        priority: band it is ranked in.
        device_type: "cpu", "cuda", or "" for any.
        min_arch, max_arch: smallest and largest compute capability; 0 is no limit.
        dtypes: of its main operand.
        formats: of a packed operand, where the op has one ("" is plain); empty takes all.
        rejects: shape traits to the reason it cannot serve them, None if it can.
        slower: shape traits to the reason another is faster there, None if none is known; it still
            serves where an option names it.
        tags: "latency", "throughput", "portable" and "deterministic" count in rankings, the rest
            are words for people, shown by `explain`.
        num_kernels: shape traits to the kernels that a call launches; 0 if that is not known.
        launch: the op that a graph calls instead of the family's own, with the same arguments but
            without `impl`; None where the family's op knows the name.
        interpreted: "module:function" of `custom_ops` that runs its Triton kernel on CPU tensors
            with TRITON_INTERPRET=1; empty if there is none.
        origin: distribution and version of a plugin; empty for our own.
    """

    family: str
    mode: str
    name: str
    priority: Priority
    device_type: str = ""
    min_arch: int = 0
    max_arch: int = 0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    formats: tuple[str, ...] = ()
    rejects: Callable[[Traits], str | None] = lambda _: None
    slower: Callable[[Traits], str | None] = lambda _: None
    tags: tuple[str, ...] = ()
    num_kernels: Callable[[Traits], int] = lambda _: 1
    launch: Any = None
    interpreted: str = ""
    origin: str = ""

    def rejection(
        self, target: Target, dtype: torch.dtype, traits: Traits, layout: str = ""
    ) -> str | None:
        """Why it cannot serve, None if it can; `layout` is the packed operand's format."""
        if (reason := self.device_rejection(target)) is not None:
            return reason
        if dtype not in self.dtypes:
            return f"has no version for {dtype}"
        if self.formats and layout not in self.formats:
            return f"has no version for format {layout or 'plain'}"
        return self.rejects(traits)

    def device_rejection(self, target: Target) -> str | None:
        """Why it cannot run on a device at all, None if it can."""
        if self.device_type and self.device_type != target.device_type:
            return f"runs on {self.device_type}, not on {target.device_type}"
        if target.arch < self.min_arch:
            return f"needs sm_{self.min_arch}, this is sm_{target.arch}"
        if self.max_arch and target.arch > self.max_arch:
            return f"was made up to sm_{self.max_arch}, this is sm_{target.arch}"
        return None


def best_of(fitting: Sequence[Candidate], traits: Traits) -> Candidate:
    """The highest in rank for latency; one that is known to be slower only if alone."""
    return max(fitting, key=lambda c: rank(c, traits, Objective.LATENCY))


def rank(candidate: Candidate, traits: Traits, objective: Objective) -> tuple[int, ...]:
    """Sorts candidates that can serve, the best last; AUTOTUNE ranks what was not measured."""
    fastest = (int(candidate.slower(traits) is None), int(candidate.priority))
    if objective is Objective.THROUGHPUT:
        tags = candidate.tags
        return (int(THROUGHPUT_TAG in tags) - int(LATENCY_TAG in tags), *fastest)
    if objective is Objective.PORTABILITY:
        is_kernel = int(candidate.priority > Priority.REFERENCE)
        is_open = int(candidate.max_arch == 0)
        is_portable = int(PORTABLE_TAG in candidate.tags)
        return (is_kernel, is_portable, is_open, -candidate.min_arch, *fastest)
    return fastest


def names_by_tokens(limits: Sequence[tuple[int, str]]) -> str:
    """Spells candidates by the highest number of tokens each serves, as `by_tokens` reads it."""
    kept = [
        (limit, name)
        for (limit, name), following in zip(limits, [*limits[1:], (0, "")], strict=True)
        if name != following[1]
    ]
    return kept[0][1] if len(kept) == 1 else ",".join(f"{limit}={name}" for limit, name in kept)


def by_tokens(impl: str, num_tokens: int) -> str:
    """The name that a list like "8=mma,64=wide" has for a number of tokens; a name is itself.

    A graph whose number of tokens varies carries such a list; the last entry serves all above it.
    """
    if "=" not in impl:
        return impl
    limits = _limits(impl)
    return next((name for limit, name in limits if num_tokens <= limit), limits[-1][1])


@functools.cache
def _limits(impl: str) -> tuple[tuple[int, str], ...]:
    entries = (entry.partition("=") for entry in impl.split(","))
    return tuple((int(limit), name) for limit, _, name in entries)


def objective_rejection(candidate: Candidate, objective: Objective) -> str | None:
    """Why an objective leaves a candidate out, None if it does not."""
    if objective is Objective.DETERMINISM and DETERMINISTIC_TAG not in candidate.tags:
        return "gives no promise of equal bits from run to run"
    return None


@dataclass(frozen=True)
class Choice:
    """What was chosen and why, and the reason for each candidate that was not."""

    candidate: Candidate
    rejected: tuple[tuple[str, str], ...]
    reason: str = ""


@dataclass(frozen=True)
class Measured:
    """The fastest of some candidates by a measurement: its name, and seconds of each by name."""

    winner: str
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Query:
    """What a choice is for.

    Attributes:
        family, mode: of the op.
        target: device.
        dtype: of the op's main operand.
        traits: of the shapes.
        layout: format of a packed operand, "" for plain ones.
    """

    family: str
    mode: str
    target: Target
    dtype: torch.dtype
    traits: Traits
    layout: str = ""

    @property
    def place(self) -> str:
        """Family and mode as `--kernel` spells them."""
        return f"{self.family}.{self.mode}"


class Tuner(Protocol):
    """Measures candidates, or remembers what it measured; see `tuning`."""

    @property
    def generation(self) -> str:
        """Changes when measurements were thrown away: part of a compile cache's key."""

    def measure(
        self, query: Query, fitting: Sequence[Candidate], arguments: Any
    ) -> Measured | None:
        """The fastest for the query; None where it cannot be told. May take seconds.

        `arguments` are the call's, with tensors that have a shape and no values.
        """


class KernelRegistry:
    """Candidates, overrides and the objective.

    Args:
        candidates: all there are; names are unique within family and mode.
        overrides: "family" or "family.mode" -> name of the candidate that must be taken.
        objective: what the ranking goes by.
        tuner: measures; needed for AUTOTUNE.

    Raises:
        ConfigError: an override names a family, mode or candidate there is not.
    """

    def __init__(
        self,
        candidates: tuple[Candidate, ...],
        overrides: Mapping[str, str] | None = None,
        objective: Objective = Objective.LATENCY,
        tuner: Tuner | None = None,
    ) -> None:
        self.candidates = candidates
        self.objective = objective
        self.tuner = tuner
        self._overrides = dict(overrides or {})
        self._choices: dict[tuple[object, ...], Choice] = {}
        for place, name in self._overrides.items():
            check_override(candidates, place, name, f"--kernel {place}={name}")

    def choose(
        self, family: str, mode: str, target: Target, dtype: torch.dtype, traits: Traits
    ) -> Choice:
        """The best candidate that can serve; as `decide`."""
        query = Query(family=family, mode=mode, target=target, dtype=dtype, traits=traits)
        return self.decide(query)

    def decide(self, query: Query, arguments: Any = None) -> Choice:
        """The best candidate that can serve.

        Args:
            query: what for.
            arguments: of the call, for a measurement; without them nothing is measured.

        Raises:
            ConfigError: the one an override asks for cannot, or none can.
        """
        traits = tuple(sorted(query.traits.items()))
        key = (query.place, query.target, query.dtype, query.layout, traits, arguments is None)
        if key not in self._choices:
            self._choices[key] = self._choose(query, arguments)
        return self._choices[key]

    def override(self, family: str, mode: str) -> str | None:
        """The candidate that an option asks for."""
        return self._overrides.get(f"{family}.{mode}", self._overrides.get(family))

    def is_plain(self, family: str, mode: str) -> bool:
        """Nothing is asked for beyond what ops choose by themselves."""
        has_plugin = any(c.origin and (c.family, c.mode) == (family, mode) for c in self.candidates)
        is_default = self.objective is Objective.LATENCY
        return is_default and not has_plugin and self.override(family, mode) is None

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """All of them, sorted: part of a compile cache's key."""
        return tuple(sorted(self._overrides.items()))

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """What decides choices beside our sources: part of a compile cache's key."""
        plugins = sorted(f"{c.family}.{c.mode}.{c.name} {c.origin}" for c in self._plugins())
        is_tuned = self.objective is Objective.AUTOTUNE and self.tuner is not None
        generation = self.tuner.generation if is_tuned and self.tuner else ""
        return (self.overrides, self.objective.value, tuple(plugins), generation)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice made so far, in order."""
        return tuple(self._choices.values())

    def of(self, family: str, mode: str) -> tuple[Candidate, ...]:
        """The candidates of a family and mode."""
        return tuple(c for c in self.candidates if (c.family, c.mode) == (family, mode))

    def _plugins(self) -> list[Candidate]:
        return [c for c in self.candidates if c.origin]

    def _choose(self, query: Query, arguments: Any) -> Choice:
        found = self.of(query.family, query.mode)
        assert found, f"no kernel is registered for {query.place}"
        rejected: dict[str, str] = {}
        fitting = []
        for candidate in found:
            reason = candidate.rejection(query.target, query.dtype, query.traits, query.layout)
            if reason is None:
                fitting.append(candidate)
            else:
                rejected[candidate.name] = reason
        wanted = self.override(query.family, query.mode)
        if wanted is not None and wanted in {c.name for c in found}:
            if wanted in rejected:
                raise ConfigError(
                    f"--kernel {query.place}={wanted}: it {rejected[wanted]}", param="kernels"
                )
            best = next(c for c in fitting if c.name == wanted)
            rejected |= {c.name: "an option asks for another" for c in fitting if c is not best}
            return Choice(best, tuple(rejected.items()), "an option asks for it")
        if not fitting:
            reasons = "; ".join(f"{name} {why}" for name, why in rejected.items())
            raise ConfigError(f"no kernel can serve {query.place}: {reasons}")
        return self._rank(query, fitting, rejected, arguments)

    def _rank(
        self, query: Query, fitting: list[Candidate], rejected: dict[str, str], arguments: Any
    ) -> Choice:
        """The first by the objective."""
        left_out = {
            c.name: reason
            for c in fitting
            if (reason := objective_rejection(c, self.objective)) is not None
        }
        kept = [c for c in fitting if c.name not in left_out]
        if not kept:
            reasons = "; ".join(f"{name} {why}" for name, why in (rejected | left_out).items())
            raise ConfigError(
                f"--kernel-objective {self.objective}: no kernel can serve {query.place}: "
                f"{reasons}",
                param="kernel_objective",
            )
        rejected |= left_out
        is_tuned = self.objective is Objective.AUTOTUNE and self.tuner is not None
        if is_tuned and len(kept) > 1 and arguments is not None:
            assert self.tuner is not None
            measured = self.tuner.measure(query, kept, arguments)
            if measured is not None:
                return _measured_choice(measured, kept, rejected)
        best = max(kept, key=lambda c: rank(c, query.traits, self.objective))
        lower = f"ranks below {best.name}"
        rejected |= {c.name: c.slower(query.traits) or lower for c in kept if c is not best}
        if len(kept) == 1:
            return Choice(best, tuple(rejected.items()), "no other can serve")
        reason = f"{_BECAUSE[self.objective]} ({best.priority.name})"
        return Choice(best, tuple(rejected.items()), reason)


_FASTEST = "the highest band of those not known to be slower"
_BECAUSE = {
    Objective.LATENCY: _FASTEST,
    Objective.THROUGHPUT: "made for many tokens",
    Objective.PORTABILITY: "asks least of the device",
    Objective.DETERMINISM: "gives the same bits for the same input, and is the fastest of these",
    Objective.AUTOTUNE: _FASTEST,
}


def _measured_choice(
    measured: Measured, kept: Sequence[Candidate], rejected: dict[str, str]
) -> Choice:
    best = next(c for c in kept if c.name == measured.winner)

    def told(candidate: Candidate) -> str:
        seconds = measured.seconds.get(candidate.name)
        if seconds is None:
            return "could not be measured"
        return f"was measured at {seconds * 1e6:.2f} us"

    rejected |= {c.name: told(c) for c in kept if c is not best}
    return Choice(best, tuple(rejected.items()), f"measured fastest here: {told(best)[16:]}")


def check_override(candidates: Sequence[Candidate], place: str, name: str, where: str) -> None:
    """Refuses an override of what there is not; `where` begins the message.

    Raises:
        ConfigError: names what there is.
    """
    family, _, mode = place.partition(".")
    found = [c for c in candidates if c.family == family and mode in ("", c.mode)]
    if not found:
        known = ", ".join(sorted({f"{c.family}.{c.mode}" for c in candidates}))
        raise ConfigError(f"{where}: no such kernel family; there are {known}", param="kernels")
    if name not in {c.name for c in found}:
        known = ", ".join(sorted({c.name for c in found}))
        raise ConfigError(f"{where}: no such kernel; {place} has {known}", param="kernels")
