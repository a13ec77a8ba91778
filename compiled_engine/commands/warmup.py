"""Compile everything a configuration needs, so that a later start finds it in the cache.

Owns the table of pieces. The compiling itself is the engine's own warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.compile.store import EntryStore, StoreCounters
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, EngineError
from compiled_engine.start_times import StartPhase

if TYPE_CHECKING:
    from rich.console import Console

    from compiled_engine.engine import Engine


@dataclass(frozen=True)
class PieceRow:
    """What became of one compiled piece.

    Attributes:
        name: of the piece.
        seconds: until its first call returned.
        cache: "hit" or "miss"; "-" where nothing is kept.
        num_bytes: of what is kept of it.
        reason: why it was compiled; empty for a hit.
    """

    name: str
    seconds: float
    cache: str
    num_bytes: int
    reason: str


def piece_rows(engine: Engine) -> list[PieceRow]:
    """The pieces of an engine's start, in the order in which they were needed."""
    rows = []
    kept = StoreCounters() if engine.driver.store is None else engine.driver.store.counters
    reasons = {miss.name: miss.reason for miss in kept.misses}
    for name, seconds in engine.driver.counters.piece_seconds.items():
        is_hit = name in kept.hit_bytes
        rows.append(
            PieceRow(
                name=name,
                seconds=seconds,
                cache="hit" if is_hit else "miss" if name in reasons else "-",
                num_bytes=kept.hit_bytes.get(name, 0) or kept.saved_bytes.get(name, 0),
                reason=reasons.get(name, ""),
            )
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, what to do with the outcome, and engine settings."""
    add_model_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="TARGET",
        help="write what such a start needs to a new folder, or to FILE.tar, for `cache import`",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile nothing: exit with 1 if a start with these flags would, and say what and why",
    )
    parser.add_argument(
        "--target-arch",
        metavar="ARCH",
        help="compile for a GPU that is not here, such as sm_90a, what can be compiled without it, "
        "and name what cannot; needs no GPU",
    )
    add_config_arguments(parser, EngineConfig)
    parser.add_argument(
        "--jobs",
        type=int,
        dest="compile_jobs",
        default=argparse.SUPPRESS,
        metavar="N",
        help="the same as --compile-jobs",
    )


def run(args: argparse.Namespace) -> int:
    """Warms up, then prints tables and, as the last line, one JSON document."""
    config = config_from_args(EngineConfig, args)
    if config.compile_mode != "first":
        raise ConfigError(
            "--compile-mode eager-first puts off what warmup is for: leave it out",
            param="compile_mode",
        )
    if config.load_format == "auto":  # code does not depend on weights: none are read
        config = replace(config, load_format="dummy")
    if args.check:
        for flag, value in (("--output", args.output), ("--target-arch", args.target_arch)):
            if value is not None:
                raise ConfigError(f"{flag} needs a warm-up, and --check makes none: leave one out")
        return _check(config)
    if args.output is not None and args.output.exists():
        raise ConfigError(f"--output {args.output} is there already: name another")
    if args.target_arch is not None:
        from compiled_engine.commands.warmup_cross import warm_up_for

        return warm_up_for(config, args.target_arch, args.output)
    if args.output is not None and not _keeps_pieces(config):
        raise ConfigError("--output has nothing to write: with these flags no piece is kept")
    return _warm_up(config, args.output)


def _warm_up(config: EngineConfig, output: Path | None) -> int:
    start = time.perf_counter()
    import compiled_engine.engine  # noqa: F401 - what takes time to import, apart from the rest
    from compiled_engine.commands.local import open_engine
    from compiled_engine.commands.progress import PieceProgress

    imports = StartPhase(name="imports", seconds=time.perf_counter() - start)
    engine = open_engine(config, progress_class=PieceProgress)
    seconds = time.perf_counter() - start
    phases, pieces, store = [imports, *engine.start], piece_rows(engine), engine.driver.store
    counters = asdict(engine.driver.refresh())
    _print_outcome(config, pieces, phases, counters)
    document = {
        "command": "warmup",
        "seconds": round(seconds, 3),
        "cache_dir": str(config.cache_dir),
        "key": store.key.digest if store is not None else "",
        "pieces": [asdict(piece) for piece in pieces],
        "phases": [asdict(phase) | {"cache": phase.cache} for phase in phases],
        "counters": counters,
    }
    if output is not None:
        assert store is not None
        document["artifact"] = {"path": str(output), "bytes": _export(config, store, output)}
    print(json.dumps(document))
    return 0


def _export(config: EngineConfig, store: EntryStore, output: Path) -> int:
    """Writes the artifact of a start that is complete; returns its bytes."""
    from compiled_engine.compile.artifact import export_artifact
    from compiled_engine.compile.inventory import kept_starts

    starts = [s for s in kept_starts(config.cache_dir) if s.digest == store.key.digest]
    if not starts:
        raise EngineError(f"{config.cache_dir} kept nothing of this start, see the warnings above")
    return export_artifact(config.cache_dir, starts, output)


def _check(config: EngineConfig) -> int:
    """Says what a start would compile; 1 if anything."""
    from compiled_engine.start_check import check_start

    found = check_start(config)
    for name, reason in found.problems:
        print(f"{name} would be compiled: {reason}")
    if not found.problems:
        print(f"nothing would be compiled: {found.num_sound} entries and files are there and sound")
    document = {
        "command": "warmup --check",
        "cache_dir": str(config.cache_dir),
        "key": found.digest,
        "num_sound": found.num_sound,
        "problems": [{"name": name, "reason": reason} for name, reason in found.problems],
    }
    print(json.dumps(document))
    return 1 if found.problems else 0


def _keeps_pieces(config: EngineConfig) -> bool:
    from compiled_engine.key_parts import keeps_pieces

    return keeps_pieces(config)


def _print_outcome(
    config: EngineConfig,
    pieces: list[PieceRow],
    phases: list[StartPhase],
    counters: dict[str, Any],
) -> None:
    from rich.console import Console

    from compiled_engine.commands.settings_table import print_start

    console = Console(highlight=False, soft_wrap=True)
    _print_table(console, pieces)
    print_start(console, phases)
    if config.enforce_eager:
        console.print("--enforce-eager: nothing is compiled")
    console.print(
        "  ".join(
            f"{name.removeprefix('num_').replace('_', ' ')}: {value}"
            for name, value in counters.items()
            if isinstance(value, int)
        )
    )


def _print_table(console: Console, pieces: list[PieceRow]) -> None:
    from rich.table import Table

    table = Table(title="compiled pieces", title_justify="left", pad_edge=False, box=None)
    table.add_column("piece", no_wrap=True)
    for name in ("seconds", "cache", "KiB"):
        table.add_column(name, justify="right")
    for piece in pieces:
        size = f"{piece.num_bytes / 1024:.0f}" if piece.num_bytes else ""
        table.add_row(piece.name, f"{piece.seconds:.2f}", piece.cache, size)
    console.print(table)
