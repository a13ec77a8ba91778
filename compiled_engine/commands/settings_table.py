"""The tables of effective settings and of GPU memory, on standard error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table

from compiled_engine.commands.flags import changed_fields, flags_of
from compiled_engine.config import EngineConfig, ServerConfig

_SECRET_FIELDS = frozenset({"api_key"})


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


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-" if name in ("api_key", "tokenizer", "served_model_name") else "auto"
    if name in _SECRET_FIELDS:
        return "(set)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value)
