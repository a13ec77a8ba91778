"""Kernels of the registry: list them, check them against their references, measure them.

`list` says which candidates there are and why one cannot run here; `check` exits with 1 if one
differs from its reference; `bench` measures them beside the device's own ceilings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import FlagParser
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from compiled_engine.custom_ops.family_inputs import Shapes
    from compiled_engine.custom_ops.registry import KernelRegistry
    from compiled_engine.kernels.bench import Timing

_DESCRIPTIONS = {
    "list": "Families, candidates, and why one can or cannot run on the device.",
    "check": "Every candidate against its reference over seeded shapes; exits with 1 if one fails.",
    "bench": "Times, rates and the share of the device's ceiling, measured in the same run.",
}
# Of a table that is not on a terminal.
PLAIN_WIDTH = 200
_DTYPES = ("bfloat16", "float16", "float32")


def add_parsers(subparsers: Any) -> dict[str, FlagParser]:
    """Adds `kernels` with its three kinds; returns their parsers by full name."""
    description = (__doc__ or "").partition("\n")[0]
    kernels = subparsers.add_parser("kernels", help=description, description=description)
    kinds = kernels.add_subparsers(dest="kernels_kind", metavar="KIND", required=True)
    parsers = {}
    for kind, text in _DESCRIPTIONS.items():
        parser = kinds.add_parser(kind, help=text, description=text)
        parsers[f"kernels {kind}"] = parser
        parser.add_argument("--json", action="store_true", help="print one JSON document, no table")
        parser.add_argument(
            "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
        )
        parser.add_argument(
            "--only", default="", metavar="FAMILY", help="one family, or FAMILY.MODE"
        )
    parsers["kernels list"].add_argument(
        "--arch",
        type=int,
        metavar="N",
        help="with --device cuda: compute capability to list for, such as 90; needs no GPU",
    )
    parsers["kernels check"].add_argument(
        "--num-seeds", type=int, default=2, metavar="N", help="of the examples (default: 2)"
    )
    _add_bench(parsers["kernels bench"])
    for kind, run in (("list", run_list), ("check", run_check), ("bench", run_bench)):
        parsers[f"kernels {kind}"].set_defaults(run=run)
    return parsers


def _add_bench(parser: FlagParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="take the shapes of its config.json (default: Qwen3-8B's on a GPU, SmolLM2-135M's on "
        "a CPU)",
    )
    parser.add_argument(
        "--num-tokens",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a step, up to 256 decoded, more as one prompt; may be repeated (default: "
        "1, 8, 32, 128 and 2048 on a GPU, 1 and 32 on a CPU)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="(default: bfloat16, float32 on a CPU)")
    parser.add_argument(
        "--context", type=int, default=1024, metavar="N", help="KV tokens a row (default: 1024)"
    )
    parser.add_argument(
        "--num-repeats", type=int, default=3, metavar="N", help="of each timing (default: 3)"
    )


def run_list(args: argparse.Namespace) -> int:
    """Prints the table of candidates."""
    from compiled_engine.custom_ops.kernels import make_registry
    from compiled_engine.kernels.listing import list_kernels, missing_tools

    registry = make_registry()
    target = _target(args)
    rows = [row for row in list_kernels(registry, target) if _is_asked(args.only, row.place)]
    _check_only(args.only, registry)
    if args.json:
        document = {"target": asdict(target), "missing": missing_tools()}
        print(json.dumps({**document, "kernels": [asdict(row) for row in rows]}))
        return 0
    shown_target = target.device_type + (f" sm_{target.arch}" if target.arch else "")
    _print_table(
        f"kernels, for {shown_target}",
        ("family", "kernel", "band", "runs on", "here", "tags"),
        [
            (
                row.place,
                row.name,
                row.priority,
                row.device,
                row.reason or "yes",
                ", ".join((*row.tags, *([f"plugin {row.origin}"] if row.origin else []))),
            )
            for row in rows
        ],
    )
    for text in missing_tools():
        print(text)
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Prints what each candidate did; 1 if one failed."""
    from compiled_engine.cache_folders import build_dir, place_caches
    from compiled_engine.custom_ops.kernels import make_registry
    from compiled_engine.device import pick_device
    from compiled_engine.kernels.check import FAILED, check_kernels

    place_caches(build_dir())
    if args.num_seeds < 1:
        raise ConfigError(f"--num-seeds is {args.num_seeds}; allowed is at least 1")
    registry = make_registry()
    _check_only(args.only, registry)
    device = pick_device(args.device)
    results = check_kernels(registry, device, only=args.only, num_seeds=args.num_seeds)
    num_failed = sum(result.status == FAILED for result in results)
    if args.json:
        document = {"device": str(device), "num_failed": num_failed}
        print(json.dumps({**document, "results": [asdict(result) for result in results]}))
        return 1 if num_failed else 0
    _print_table(
        f"kernels against their references, on {device}",
        ("family", "kernel", "dtype", "cases", "worst / allowed", "allowed", "status"),
        [
            (
                r.place,
                r.name,
                r.dtype,
                str(r.num_cases or ""),
                f"{r.worst:.2f}" if r.num_cases else "",
                f"{r.limit:.1e}" if r.limit else "equal" if r.num_cases else "",
                f"{r.status} {r.reason}".strip(),
            )
            for r in results
        ],
    )
    whys = {r.place: r.why for r in results if r.why and r.limit}
    print("allowed, relative to the largest value: half a unit in the last place for each rounding")
    for place, why in whys.items():
        print(f"  {place}: {why}")
    num_ok = sum(result.status == "OK" for result in results)
    print(f"{num_ok} OK, {num_failed} failed, {len(results) - num_ok - num_failed} not for here")
    return 1 if num_failed else 0


def run_bench(args: argparse.Namespace) -> int:
    """Measures the ceilings, then every candidate."""
    from compiled_engine.cache_folders import build_dir, place_caches
    from compiled_engine.custom_ops.kernels import make_registry
    from compiled_engine.device import describe_device, pick_device
    from compiled_engine.kernels.bench import Options, bench_kernels, summarize
    from compiled_engine.kernels.ceilings import measure

    place_caches(build_dir())
    registry = make_registry()
    _check_only(args.only, registry)
    device = pick_device(args.device)
    is_cpu = device.type == "cpu"
    num_tokens = tuple(args.num_tokens or ((1, 32) if is_cpu else (1, 8, 32, 128, 2048)))
    for flag, value in (
        ("--num-tokens", min(num_tokens)),
        ("--num-repeats", args.num_repeats),
        ("--context", args.context),
    ):
        if value < 1:
            raise ConfigError(f"{flag} is {value}; allowed is at least 1")
    shapes = _shapes(args, device)
    ceilings = measure(device, shapes.dtype, args.num_repeats)
    options = Options(
        shapes=shapes, num_tokens=num_tokens, only=args.only, num_repeats=args.num_repeats
    )
    timings = bench_kernels(registry, device, ceilings, options)
    name = describe_device(device).name
    if args.json:
        document = {
            "device": name,
            "read_tb_s": ceilings.read / 1e12,
            "matmul_tflop_s": ceilings.matmul / 1e12,
            "shapes": asdict(shapes) | {"dtype": str(shapes.dtype).removeprefix("torch.")},
            "fastest": summarize(timings),
        }
        print(json.dumps({**document, "timings": [asdict(timing) for timing in timings]}))
        return 0
    print(
        f"{name}: reads {ceilings.read / 1e9:.4g} GB/s, multiplies {ceilings.matmul / 1e12:.4g} "
        "TFLOP/s"
    )
    _print_table(
        "times beside the ceilings",
        ("family", "case", "kernel", "us", "GB/s", "TFLOP/s", "share", "bound by"),
        [(t.place, t.case, t.name, *_cells(t)) for t in timings],
    )
    return 0


def _cells(timing: Timing) -> tuple[str, ...]:
    """Numbers of a timing, or why there are none."""
    if timing.us is None:
        return ("-", "", "", "", timing.reason)
    rates = (f"{timing.tb_s * 1e3:.4g}", f"{timing.tflop_s:.3g}", f"{timing.share:.0%}")
    return (f"{timing.us:.2f}", *rates, timing.bound)


def _shapes(args: argparse.Namespace, device: torch.device) -> Shapes:
    """Of the model that is named, else of the device's default."""
    import torch

    from compiled_engine.custom_ops.family_inputs import Shapes

    is_cpu = device.type == "cpu"
    dtype = getattr(torch, args.dtype or ("float32" if is_cpu else "bfloat16"))
    if args.model is None:
        small = Shapes(
            hidden=576, inner=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152
        )
        return replace(small if is_cpu else Shapes(), dtype=dtype, context=args.context)
    from compiled_engine.config import default_cache_dir
    from compiled_engine.models.config import load_model_config
    from compiled_engine.models.source import resolve_model

    folder: Path = resolve_model(args.model, default_cache_dir(), with_weights=False)
    config = load_model_config(folder)
    return Shapes(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        dtype=dtype,
        context=args.context,
    )


def _target(args: argparse.Namespace) -> Any:
    """The device to list for; one that is not here where `--arch` describes it."""
    from compiled_engine.custom_ops.registry import Target
    from compiled_engine.device import pick_device

    if args.arch is None:
        return Target.of(pick_device(args.device))
    if args.device != "cuda":
        raise ConfigError("--arch describes a GPU: it needs --device cuda", param="arch")
    return Target("cuda", check_arch(args.arch), is_described=True)


def check_arch(arch: int) -> int:
    """A compute capability as major * 10 + minor.

    Raises:
        ConfigError: it is none.
    """
    if not 50 <= arch <= 130:
        raise ConfigError(f"--arch is {arch}; allowed is 50 to 130, such as 90", param="arch")
    return arch


def _is_asked(only: str, place: str) -> bool:
    return only in ("", place, place.partition(".")[0])


def _check_only(only: str, registry: KernelRegistry) -> None:
    places = sorted({f"{c.family}.{c.mode}" for c in registry.candidates})
    if not any(_is_asked(only, place) for place in places):
        raise ConfigError(f"--only {only}: no such family; there are {', '.join(places)}")


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        is_last = index == len(columns) - 1
        table.add_column(column, no_wrap=not is_last, overflow="fold" if is_last else "ellipsis")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, PLAIN_WIDTH))
    console.print(table, markup=False)
