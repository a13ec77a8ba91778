"""Measure: `latency` and `throughput` of an engine in this process, `serve` against a server.

Owns the flags and the output: a table, and as the last line of standard output one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import (
    FlagParser,
    add_config_arguments,
    add_model_argument,
    attribute_texts,
    config_from_args,
)
from compiled_engine.config import EngineConfig, config_to_json
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_DESCRIPTIONS = {
    "latency": "Prefill and decode step times of an engine in this process, at batch sizes.",
    "throughput": "Tokens per second of an engine in this process, all requests at once.",
    "serve": "Load a running server: TTFT, TPOT, ITL, E2EL, tokens per second, cache hits.",
}


def add_parsers(subparsers: Any) -> dict[str, FlagParser]:
    """Adds `bench` with its three kinds; returns their parsers by full name."""
    description = (__doc__ or "").partition("\n")[0]
    bench = subparsers.add_parser("bench", help=description, description=description)
    kinds = bench.add_subparsers(dest="bench", metavar="KIND", required=True)
    parsers = {}
    for kind, text in _DESCRIPTIONS.items():
        parsers[f"bench {kind}"] = kinds.add_parser(kind, help=text, description=text)
    _add_latency(parsers["bench latency"])
    _add_throughput(parsers["bench throughput"])
    _add_serve(parsers["bench serve"])
    return parsers


def _add_latency(parser: FlagParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        action="append",
        metavar="N",
        help="requests at once; may be repeated (default: 1 and 8)",
    )
    _add_count(parser, "--input-len", 128, "prompt tokens of each request")
    _add_count(parser, "--output-len", 32, "tokens of each answer")
    _add_count(parser, "--num-repeats", 3, "repeats that count, after one that does not")
    add_config_arguments(parser, EngineConfig)
    parser.set_defaults(run=run_latency)


def _add_throughput(parser: FlagParser) -> None:
    add_model_argument(parser)
    _add_count(parser, "--num-requests", 64, "requests in all")
    _add_count(parser, "--input-len", 128, "prompt tokens of each request")
    _add_count(parser, "--output-len", 64, "tokens of each answer")
    add_config_arguments(parser, EngineConfig)
    parser.set_defaults(run=run_throughput)


def _add_serve(parser: FlagParser) -> None:
    from compiled_engine.bench.load_config import LoadConfig

    texts = attribute_texts(LoadConfig)
    for entry in fields(LoadConfig):
        assert entry.default is not MISSING
        options: dict[str, Any] = {"dest": entry.name, "default": entry.default}
        options["help"] = texts[entry.name].rstrip(".")
        flag = f"--{entry.name.replace('_', '-')}"
        if isinstance(entry.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        kind = str if entry.default is None else type(entry.default)
        if entry.default is not None:
            options["help"] += f" (default: {entry.default})"
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument(flag, type=kind, metavar=metavar, **options)
    parser.set_defaults(run=run_serve)


def run_latency(args: argparse.Namespace) -> int:
    """Step times."""
    config = config_from_args(EngineConfig, args)
    batch_sizes = args.batch_size or [1, 8]
    _check_counts(args, "input_len", "output_len", "num_repeats")
    if min(batch_sizes) < 1:
        raise ConfigError(f"--batch-size is {min(batch_sizes)}; allowed is at least 1")
    from compiled_engine.bench.offline import measure_latency
    from compiled_engine.bench.report import print_document, print_table
    from compiled_engine.commands.local import open_engine

    engine = open_engine(config)
    rows = []
    with _progress("repeats", len(batch_sizes) * args.num_repeats) as on_done:
        for batch_size in batch_sizes:
            row = measure_latency(
                engine,
                batch_size,
                input_len=args.input_len,
                output_len=args.output_len,
                num_repeats=args.num_repeats,
                seed=config.seed,
                on_done=on_done,
            )
            rows.append(row)
    print_table(
        f"step times, {args.input_len} prompt tokens",
        ("requests", "prefill p50, ms", "decode p50, ms", "p95", "p99", "decode tokens / s"),
        [
            (
                str(row.batch_size),
                f"{row.prefill_ms.p50:.1f}",
                f"{row.decode_ms.p50:.2f}",
                f"{row.decode_ms.p95:.2f}",
                f"{row.decode_ms.p99:.2f}",
                f"{row.decode_tokens_per_s:.1f}",
            )
            for row in rows
        ],
    )
    print_document(_document("latency", config, rows=[asdict(row) for row in rows]))
    return 0


def run_throughput(args: argparse.Namespace) -> int:
    """Tokens per second."""
    config = config_from_args(EngineConfig, args)
    _check_counts(args, "num_requests", "input_len", "output_len")
    from compiled_engine.bench.offline import measure_throughput
    from compiled_engine.bench.report import print_document, print_table
    from compiled_engine.commands.local import open_engine

    engine = open_engine(config)
    with _progress("requests", args.num_requests) as on_done:
        result = measure_throughput(
            engine,
            num_requests=args.num_requests,
            input_len=args.input_len,
            output_len=args.output_len,
            seed=config.seed,
            on_done=on_done,
        )
    rows = [(name.replace("_", " "), f"{value:.6g}") for name, value in asdict(result).items()]
    print_table("throughput", ("", "value"), rows)
    print_document(_document("throughput", config, **asdict(result)))
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """A load on a server; exit code 1 if a request failed."""
    import asyncio

    from compiled_engine.bench.load import run_load
    from compiled_engine.bench.load_config import LoadConfig
    from compiled_engine.bench.report import print_document, print_load
    from compiled_engine.bench.stats import summarize_load

    config = LoadConfig(**{f.name: getattr(args, f.name) for f in fields(LoadConfig)})
    with _progress("requests", config.num_requests) as on_done:
        records = asyncio.run(run_load(config, on_done=lambda _: on_done()))
    summary = summarize_load(records)
    print_load(summary)
    shown = asdict(config)
    del shown["api_key"]
    print_document({"bench": "serve", "config": shown, **asdict(summary)})
    return 1 if summary.num_failed else 0


def _add_count(parser: FlagParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
    )


def _check_counts(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}; allowed is at least 1", param=name
            )


def _document(kind: str, config: EngineConfig, **result: Any) -> dict[str, Any]:
    return {"bench": kind, "config": json.loads(config_to_json(config)), **result}


@contextmanager
def _progress(unit: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error if that is a terminal; the block calls what it gets for each unit."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from compiled_engine.commands.progress import stderr_console

    console = stderr_console()
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda: bar.advance(task)
