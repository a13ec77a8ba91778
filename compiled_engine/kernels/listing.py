"""Every candidate of every kernel family, and why it can or cannot run on a device."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_engine.custom_ops.families import FAMILIES
from compiled_engine.custom_ops.registry import Candidate, KernelRegistry, Target
from compiled_engine.custom_ops.toolchain import gluon_reason, has_nvrtc


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate.

    Attributes:
        place: family and mode.
        name: of the candidate.
        priority: its band.
        device: "cpu", "cuda" or "any", with its range of compute capability.
        dtypes: it has versions for.
        tags: words about it.
        origin: plugin it comes from; empty for our own.
        reason: why it cannot run on the target; empty if it can.
    """

    place: str
    name: str
    priority: str
    device: str
    dtypes: tuple[str, ...]
    tags: tuple[str, ...]
    origin: str
    reason: str


def list_kernels(registry: KernelRegistry, target: Target) -> list[Row]:
    """A row a candidate, families in their order, the best band first."""
    rows = []
    for family in FAMILIES:
        found = registry.of(family.family, family.mode)
        rows += [_row(c, target) for c in sorted(found, key=lambda c: -c.priority)]
    return rows


def missing_tools() -> list[str]:
    """Tools that some candidates need and that are not here."""
    found = [] if has_nvrtc() else ["CUDA C++ kernels need the package cuda-bindings"]
    reason = gluon_reason()
    return found if reason is None else [*found, f"Gluon kernels: {reason}"]


def _row(candidate: Candidate, target: Target) -> Row:
    device = candidate.device_type or "any"
    if candidate.min_arch or candidate.max_arch:
        device += f" sm_{candidate.min_arch}" + (
            f" to sm_{candidate.max_arch}" if candidate.max_arch else "+"
        )
    return Row(
        place=f"{candidate.family}.{candidate.mode}",
        name=candidate.name,
        priority=candidate.priority.name,
        device=device,
        dtypes=tuple(str(d).removeprefix("torch.") for d in candidate.dtypes),
        tags=candidate.tags,
        origin=candidate.origin,
        reason=candidate.device_rejection(target) or "",
    )
