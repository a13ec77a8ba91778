"""Write a quantised copy of a model, in a published layout that `serve` reads back.

Owns the flags. What is written, and how, is `models.quant_writer`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from compiled_engine.commands.flags import add_model_argument
from compiled_engine.config import DeviceName, EngineConfig, Quantization, default_cache_dir

# Formats of weights; how activations are made of 4 bits is not a part of what is written.
_FORMATS = tuple(name for name in get_args(Quantization) if name not in ("auto", "nvfp4_w4a4"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, format and output folder."""
    add_model_argument(parser)
    parser.add_argument(
        "--format", required=True, choices=_FORMATS, help="of the weights of linear layers"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="empty folder, made if missing"
    )
    parser.add_argument(
        "--quantize-lm-head", action="store_true", help="the output projection in that format too"
    )
    parser.add_argument(
        "--device",
        choices=get_args(DeviceName),
        default="auto",
        help='where the numbers are made; "auto" is the NVIDIA GPU if there is one',
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin weights, which can run code"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        default=default_cache_dir(),
        help="converted models (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Quantises and writes."""
    from compiled_engine.commands.progress import PhaseProgress, stderr_console
    from compiled_engine.device import pick_device
    from compiled_engine.models.quant_writer import quantize_checkpoint
    from compiled_engine.settings import find_model

    config = EngineConfig(
        model=args.model,
        device=args.device,
        allow_pickle=args.allow_pickle,
        cache_dir=args.cache_dir,
    )
    device = pick_device(config.device)
    console = stderr_console()
    with PhaseProgress(console) as progress:
        folder = find_model(config, progress.update)
        left = quantize_checkpoint(
            folder,
            args.output,
            args.format,
            quantizes_head=args.quantize_lm_head,
            device=device,
            allow_pickle=args.allow_pickle,
            progress=lambda done, total, name: progress.update("quantising", name, done, total),
        )
    if left:
        console.print(f"left as they are, their columns do not divide: {', '.join(left)}")
    console.print(f"wrote {args.output}: compiled-engine serve {args.output}")
    return 0
