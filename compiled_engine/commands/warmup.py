"""Compile everything a configuration needs, so that a later start finds it in the cache.

Owns the table of pieces. The compiling itself is the engine's own warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError, EngineError
from compiled_engine.start_times import StartPhase

if TYPE_CHECKING:
    from compiled_engine.compile.store import EntryStore, Miss


@dataclass(frozen=True)
class Piece:
    """One compiled piece of the step.

    Attributes:
        name: as the engine reports it.
        seconds: from its report to the next one.
        num_misses: graphs that Inductor had to generate code for.
        num_hits: graphs that were in the cache.
    """

    name: str
    seconds: float
    num_misses: int
    num_hits: int

    @property
    def cache(self) -> str:
        """Where its code came from."""
        if self.num_misses:
            return "miss"
        return "hit" if self.num_hits else "-"


class PieceClock:
    """Turns the engine's progress reports into pieces, by torch's own totals at each report."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._name: str | None = None
        self._since = 0.0
        self._before: dict[str, int] = {}

    def report(self, phase: str, label: str, done: int, total: int) -> None:
        """The piece before ends, `label` begins; (total, total) is the end of all."""
        if phase != "compiling":
            return
        from compiled_engine.compile.torch_compat import dynamo_counters

        now, totals = time.perf_counter(), dynamo_counters()
        if self._name is not None:
            self.pieces.append(
                Piece(
                    self._name,
                    now - self._since,
                    *(
                        totals[name] - self._before[name]
                        for name in ("num_inductor_compiles", "num_cache_hits")
                    ),
                )
            )
        self._name = None if done == total else label
        self._since, self._before = now, totals


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
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Warms up, then prints tables and, as the last line, one JSON document."""
    config = config_from_args(EngineConfig, args)
    if args.check:
        if args.output is not None:
            raise ConfigError("--output needs a warm-up, and --check makes none: leave one out")
        return _check(config)
    if args.output is not None:
        if not _keeps_pieces(config):
            raise ConfigError("--output has nothing to write: with these flags no piece is kept")
        if args.output.exists():
            raise ConfigError(f"--output {args.output} is there already: name another")
    return _warm_up(config, args.output)


def _warm_up(config: EngineConfig, output: Path | None) -> int:
    start = time.perf_counter()
    import compiled_engine.engine  # noqa: F401 - what takes time to import, apart from the rest
    from compiled_engine.commands.local import open_engine
    from compiled_engine.commands.progress import PieceProgress

    imports = StartPhase(name="imports", seconds=time.perf_counter() - start)
    clock = PieceClock()
    engine = open_engine(config, on_report=clock.report, progress_class=PieceProgress)
    seconds = time.perf_counter() - start
    phases = [imports, *engine.start]
    counters, store = asdict(engine.driver.refresh()), engine.driver.store
    misses = store.counters.misses if store is not None else []
    _print_outcome(config, clock.pieces, phases, misses, counters)
    document = {
        "command": "warmup",
        "seconds": round(seconds, 3),
        "cache_dir": str(config.cache_dir),
        "key": store.key.digest if store is not None else "",
        "pieces": [asdict(piece) | {"cache": piece.cache} for piece in clock.pieces],
        "phases": [asdict(phase) | {"cache": phase.cache} for phase in phases],
        "misses": [asdict(miss) for miss in misses],
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
    pieces: list[Piece],
    phases: list[StartPhase],
    misses: list[Miss],
    counters: dict[str, Any],
) -> None:
    from rich.console import Console

    from compiled_engine.commands.settings_table import print_start

    console = Console(highlight=False, soft_wrap=True)
    _print_table(console, pieces)
    print_start(console, phases)
    for miss in misses:
        console.print(f"{miss.name} was compiled: {miss.reason}")
    if config.enforce_eager:
        console.print("--enforce-eager: nothing is compiled")
    console.print(
        "  ".join(
            f"{name.removeprefix('num_').replace('_', ' ')}: {value}"
            for name, value in counters.items()
            if isinstance(value, int)
        )
    )


def _print_table(console: object, pieces: list[Piece]) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(title="compiled pieces", title_justify="left")
    table.add_column("piece", no_wrap=True)
    for name in ("seconds", "cache", "graphs compiled", "graphs from cache"):
        table.add_column(name, justify="right")
    for piece in pieces:
        table.add_row(
            piece.name,
            f"{piece.seconds:.2f}",
            piece.cache,
            str(piece.num_misses),
            str(piece.num_hits),
        )
    console.print(table)
