"""The tables of effective settings, of GPU memory and of a start, on standard error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from compiled_engine.commands.flags import changed_fields, flags_of
from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.start_times import StartPhase

_SECRET_FIELDS = frozenset({"api_key"})
_NONE_IS_NOTHING = frozenset({"api_key", "tokenizer", "served_model_name", "config_file"})


def print_settings(console: Console, *configs: EngineConfig | ServerConfig) -> None:
    """Every setting with its value; those that differ from the default are marked."""
    table = Table(title="settings (* given)", title_justify="left", pad_edge=False, box=None)
    table.add_column("")
    table.add_column("flag", no_wrap=True)
    table.add_column("value", overflow="fold")
    for config in configs:
        changed = changed_fields(config)
        for entry in fields(config):
            name = "MODEL" if entry.name == "model" else flags_of(entry.name)[0]
            value = _shown(entry.name, getattr(config, entry.name))
            table.add_row("*" if entry.name in changed else "", name, value)
    console.print(table)


def print_memory(console: Console, memory: dict[str, int]) -> None:
    """Where the GPU's memory went, by name in bytes; prints nothing where there is none."""
    if not memory:
        return
    table = Table(title="GPU memory", title_justify="left", pad_edge=False, box=None)
    table.add_column("for", no_wrap=True)
    table.add_column("GiB", justify="right")
    for name, size in memory.items():
        table.add_row(name, f"{size / 2**30:.2f}")
    console.print(table)


def print_start(console: Console, phases: Iterable[StartPhase]) -> None:
    """Where the time of a start went, what its caches had, and why they did not have the rest."""
    phases = list(phases)
    table = Table(title="start", title_justify="left", pad_edge=False, box=None)
    table.add_column("phase", no_wrap=True)
    for name in ("seconds", "cache", "hits", "misses", "MiB"):
        table.add_column(name, justify="right")
    for phase in phases:
        has_cache = phase.cache != "-"
        table.add_row(
            phase.name,
            f"{phase.seconds:.2f}",
            phase.cache,
            str(phase.num_hits) if has_cache else "",
            str(phase.num_misses) if has_cache else "",
            f"{phase.num_bytes / 2**20:.1f}" if phase.num_bytes else "",
        )
    console.print(table)
    for phase in phases:
        for reason in phase.reasons:
            console.print(reason, soft_wrap=True, markup=False)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-" if name in _NONE_IS_NOTHING else "auto"
    if name in _SECRET_FIELDS:
        return "(set)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value)
