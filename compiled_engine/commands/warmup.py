"""Compile everything a configuration needs, so that a later start finds it in the cache.

Owns the table of pieces. The compiling itself is the engine's own warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.config import EngineConfig


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
    """Model and engine settings."""
    add_model_argument(parser)
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Warms up, then prints a table and, as the last line, one JSON document."""
    config = config_from_args(EngineConfig, args)
    from rich.console import Console

    from compiled_engine.commands.local import open_engine

    clock = PieceClock()
    start = time.perf_counter()
    engine = open_engine(config, on_report=clock.report)
    seconds = time.perf_counter() - start
    counters = asdict(engine.driver.refresh())
    console = Console(highlight=False, soft_wrap=True)
    _print_table(console, clock.pieces)
    if config.enforce_eager:
        console.print("--enforce-eager: nothing is compiled")
    console.print(
        "  ".join(
            f"{name.removeprefix('num_').replace('_', ' ')}: {value}"
            for name, value in counters.items()
            if isinstance(value, int)
        )
    )
    document = {
        "command": "warmup",
        "seconds": round(seconds, 3),
        "cache_dir": str(config.cache_dir),
        "pieces": [asdict(piece) | {"cache": piece.cache} for piece in clock.pieces],
        "counters": counters,
    }
    print(json.dumps(document))
    return 0


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
