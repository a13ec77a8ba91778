"""`warmup --target-arch`: tables of what was compiled for a GPU that is not here, and what not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_engine.commands.cache import PLAIN_WIDTH
from compiled_engine.config import EngineConfig
from compiled_engine.errors import EngineError

if TYPE_CHECKING:
    from rich.console import Console

    from compiled_engine.cross_builds import BuildRow
    from compiled_engine.cross_compile import CrossReport
    from compiled_engine.described_gpu import Chip


def warm_up_for(config: EngineConfig, arch: str, output: Path | None) -> int:
    """Compiles, prints the tables and, as the last line, one JSON document.

    Returns:
        0 if everything was compiled that can be without the GPU, 1 if a compiler refused something.

    Raises:
        ConfigError: the architecture is not known, or an option cannot go with it.
    """
    start = time.perf_counter()
    from compiled_engine.commands.progress import PhaseProgress, stderr_console
    from compiled_engine.cross_compile import check_cross, cross_compile
    from compiled_engine.described_gpu import find_chip

    chip = find_chip(arch)
    check_cross(config)
    config = replace(config, device="cuda")
    with PhaseProgress(stderr_console()) as progress:
        found = cross_compile(config, chip, partial(progress.update, "compiling"))
    seconds = time.perf_counter() - start
    _print_outcome(chip, found)
    document = {
        "command": "warmup --target-arch",
        "target_arch": chip.arch,
        "target": asdict(chip),
        "seconds": round(seconds, 3),
        "cache_dir": str(config.cache_dir),
        "versions": found.versions,
        "compiled": [asdict(row) for row in found.built],
        "not_compiled": [asdict(row) for row in found.left],
        "files": len(found.files),
    }
    if output is not None:
        document["artifact"] = {"path": str(output), "bytes": _export(config, found, output)}
    print(json.dumps(document))
    return 0 if found.is_complete else 1


def _export(config: EngineConfig, found: CrossReport, output: Path) -> int:
    from compiled_engine.compile.artifact import export_files

    if not found.files:
        raise EngineError(f"{config.cache_dir} kept nothing of it, see the warnings above")
    return export_files(config.cache_dir, found.files, output)


def _print_outcome(chip: Chip, found: CrossReport) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=PLAIN_WIDTH)
    _print_built(console, f"compiled for {chip.arch}", found.built)
    _print_left(console, found.left)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    console.print(
        f"a start finds these with the same {versions} and the same sources of this package; sizes "
        f"are those of an {chip.name} with {chip.num_multiprocessors} multiprocessors"
    )


def _print_built(console: Console, title: str, rows: Iterable[BuildRow]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in ("part", "kernel"):
        table.add_column(name, no_wrap=True)
    for name in ("compiled", "found", "seconds", "KiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = (str(row.num_compiled), str(row.num_found), f"{row.seconds:.2f}")
        table.add_row(row.kind, row.name, *numbers, f"{row.num_bytes / 1024:.0f}")
    console.print(table)


def _print_left(console: Console, rows: Iterable[BuildRow]) -> None:
    """By reason: there are many pieces."""
    by_reason: dict[str, list[BuildRow]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row)
    for reason, group in by_reason.items():
        names = ", ".join(row.name for row in group)
        console.print(f"not compiled ({group[0].kind}): {names}: {reason}")
