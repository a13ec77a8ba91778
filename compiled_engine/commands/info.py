"""Print versions, the device, and what an engine with these flags would choose.

Loads no weights; asks the hub for a model's small files at most.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any

from compiled_engine import __version__
from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.config import EngineConfig

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "aiohttp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model and engine settings."""
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, no table")
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Prints the three parts."""
    config = config_from_args(EngineConfig, args)
    parts = {
        "versions": versions(),
        "device": describe(config),
        "choices": choices(config),
    }
    if args.json:
        print(json.dumps(parts))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for title, part in parts.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in part.items():
            table.add_row(name.replace("_", " "), str(value))
        console.print(table)
        console.print()
    return 0


def versions() -> dict[str, str]:
    """Versions of this package, Python and what it computes with."""
    found = {"compiled-engine": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def describe(config: EngineConfig) -> dict[str, Any]:
    """The device that would be used, and the note if that may surprise."""
    from compiled_engine.device import describe_device, device_note, pick_device

    info = asdict(describe_device(pick_device(config.device)))
    info["memory_gib"] = round(info.pop("total_bytes") / 1024**3, 1)
    units = "multiprocessors" if info["kind"] == "cuda" else "threads"
    info[units] = info.pop("num_units")
    note = device_note(config.device)
    shown = {name: value for name, value in info.items() if value != ""}
    return shown | ({"note": note} if note else {})


def choices(config: EngineConfig) -> dict[str, Any]:
    """What an engine would choose for the values that were left open."""
    from compiled_engine.compile.torch_compat import has_own_kernel
    from compiled_engine.custom_ops.attention import PAGED_ATTENTION
    from compiled_engine.settings import preview_settings

    settings = preview_settings(config)
    buckets = settings.buckets
    has_kernel = has_own_kernel(PAGED_ATTENTION.overload, settings.device.type)
    kernel = f"own {settings.device.type} kernel" if has_kernel else "plain torch"
    return {
        "model": config.model,
        "folder": str(settings.folder),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_len,
        "rows": settings.max_num_seqs,
        "pages": settings.num_pages - 1,
        "page_size_tokens": config.block_size,
        "kv_pool_tokens": (settings.num_pages - 1) * config.block_size,
        "largest_step_tokens": settings.chunked_prefill_size,
        "buckets": f"{len(buckets)}: {buckets[0]} to {buckets[-1]} tokens",
        "attention": f"{PAGED_ATTENTION.overload}: {kernel}",
        "compiled": not config.enforce_eager,
        "overlap": settings.is_overlapped,
        "cache_dir": str(config.cache_dir),
    }
