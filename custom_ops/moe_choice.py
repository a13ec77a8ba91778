"""Which implementations serve `route` and `experts`, and why others cannot."""

from __future__ import annotations

from compiled_engine.custom_ops.registry import Candidate, Priority

CANDIDATES: tuple[Candidate, ...] = (
    Candidate(family="route", mode="top_k", name="torch", priority=Priority.REFERENCE),
    Candidate(
        family="experts",
        mode="grouped",
        name="grouped",
        priority=Priority.PORTABLE,
        device_type="cpu",
        tags=("each chosen expert once",),
    ),
    Candidate(
        family="experts",
        mode="grouped",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("every token through every expert",),
    ),
)
