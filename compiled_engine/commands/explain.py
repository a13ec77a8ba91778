"""Explain what would run for MODEL: ops, passes, kernels, why these, bytes, floors and times.

Reads the model's config, no weights; needs no GPU to say what would run on one (`--arch`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import (
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.commands.kernels import check_arch
from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.explain.report import Report
    from compiled_engine.kernels.ceilings import Ceilings

# Settings that change nothing in what a step runs.
_UNUSED = frozenset(
    {
        "tokenizer", "load_format", "max_model_len", "max_total_tokens", "gpu_memory_utilization",
        "enable_prefix_caching", "jump_forward", "enforce_eager", "overlap_schedule",
        "cudagraph_mode", "check_graphs", "scheduler", "device_loop", "max_step_ms", "dump_graphs",
        "seed", "allow_pickle", "num_threads",
    }
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, step, device, outputs, and the engine settings that matter."""
    add_model_argument(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        default=1,
        metavar="N",
        help="tokens of the step: up to --max-num-seqs are decoded, more are a prompt (default: 1)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of KV of each row of a decode step (default: 1024, or the model's longest)",
    )
    parser.add_argument(
        "--arch",
        type=int,
        metavar="N",
        help="with --device cuda: for a GPU of that compute capability, such as 90, here or not",
    )
    for flag, text in (
        ("--read-tb-s", "read bandwidth that floors are taken of, TB/s"),
        ("--matmul-tflops", "rate of 16-bit products that floors are taken of, TFLOP/s"),
    ):
        parser.add_argument(flag, type=float, metavar="X", help=f"{text} (default: measured)")
    parser.add_argument(
        "--no-measure", action="store_true", help="do not time the kernels on a GPU"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, no table")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report with the graph drawn, one file"
    )
    known = {entry.name for entry in fields(EngineConfig)}
    add_config_arguments(parser, EngineConfig, only=frozenset(known - _UNUSED))


def run(args: argparse.Namespace) -> int:
    """Builds the report; prints it and writes the page."""
    config = config_from_args(EngineConfig, args)
    for flag, value, low in (("--tokens", args.tokens, 1), ("--context", args.context, 1)):
        if value is not None and value < low:
            raise ConfigError(f"{flag} is {value}; allowed is at least {low}", param=flag[2:])
    if args.arch is not None and config.device != "cuda":
        raise ConfigError("--arch describes a GPU: it needs --device cuda", param="arch")
    if args.html is not None and not args.html.parent.is_dir():
        raise ConfigError(f"--html {args.html}: no such folder", param="html")
    from compiled_engine.commands.progress import stderr_console
    from compiled_engine.explain.build import Request, explain_model

    request = Request(
        config=config,
        num_tokens=args.tokens,
        context=args.context,
        arch=None if args.arch is None else check_arch(args.arch),
        ceilings=_ceilings(args),
        is_measured=not args.no_measure,
    )
    console = stderr_console()
    with console.status("") as status:
        report = explain_model(request, status.update)
    if args.html is not None:
        _write_page(args.html, report)
    if args.json:
        print(json.dumps(document(report)))
        return 0
    from rich.console import Console

    from compiled_engine.explain.text import PLAIN_WIDTH, print_report

    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=max(out.width, PLAIN_WIDTH))
    print_report(report, out)
    if args.html is not None:
        print(f"page: {args.html}")
    return 0


def document(report: Report) -> dict[str, Any]:
    """The report as JSON, with its sums."""
    made = asdict(report)
    for piece, shown in zip(report.pieces, made["pieces"], strict=True):
        shown |= {
            "num_generated": piece.num_generated,
            "floor_us": piece.floor_us,
            "measured_us": piece.measured_us,
        }
    return {**made, "totals": asdict(report.totals)}


def _write_page(path: Path, report: Report) -> None:
    from compiled_engine.explain.page import render_page

    try:
        path.write_text(render_page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror}") from error


def _ceilings(args: argparse.Namespace) -> Ceilings | None:
    """What the flags say; both or none."""
    given = {"--read-tb-s": args.read_tb_s, "--matmul-tflops": args.matmul_tflops}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        other = next(flag for flag in given if flag not in missing)
        raise ConfigError(f"{other} needs {missing[0]} beside it")
    for flag, value in given.items():
        if not value > 0:
            raise ConfigError(f"{flag} is {value}; it must be above 0")
    from compiled_engine.kernels.ceilings import Ceilings

    return Ceilings(args.read_tb_s * 1e12, args.matmul_tflops * 1e12)
