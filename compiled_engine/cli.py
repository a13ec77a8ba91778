"""The command line: `compiled-engine COMMAND`, with a module of `commands` for each.

Owns the top-level parser and what errors become; each sub-command is a module of `commands`, which
loads what it needs only when it runs. The one place that joins server and engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from compiled_engine import __version__
from compiled_engine.commands import (
    bench,
    cache,
    explain,
    generate,
    info,
    kernels,
    quantize,
    serve,
    tune,
    warmup,
)
from compiled_engine.commands.flags import EXIT_BAD_CONFIG, FlagParser
from compiled_engine.errors import ConfigError, EngineError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_EPILOG = """\
exit codes:
  0    done; for serve: stopped by SIGTERM or Ctrl-C after the running answers had ended
  1    the work failed (generate, bench, tune), a kernel differs from its reference (kernels check),
       an entry is bad (cache verify), a start would compile (warmup --check)
  2    a flag, model folder, port or environment cannot work; one line says what to change
  3    serve: the engine process died
  128+N  ended at once by a second signal N
"""


def build_parser() -> tuple[FlagParser, dict[str, FlagParser]]:
    """The parser, and the parsers of the sub-commands by name."""
    parser = FlagParser(
        prog="compiled-engine",
        description="An LLM inference engine: plain PyTorch models, compiled.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"compiled-engine {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers: dict[str, FlagParser] = {}
    for name, module in (
        ("serve", serve),
        ("generate", generate),
        ("warmup", warmup),
        ("tune", tune),
        ("quantize", quantize),
        ("info", info),
        ("explain", explain),
    ):
        description = (module.__doc__ or "").partition("\n")[0]
        made = subparsers.add_parser(
            name, help=description, description=description, epilog=_EPILOG
        )
        module.add_arguments(made)
        made.set_defaults(run=module.run)
        parsers[name] = made
    parsers |= bench.add_parsers(subparsers)
    parsers |= kernels.add_parsers(subparsers)
    parsers |= cache.add_parsers(subparsers)
    return parser, parsers


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser, parsers = build_parser()
    args, unknown = parser.parse_known_args(argv)
    kinds = {"bench": "bench", "kernels": "kernels_kind", "cache": "cache_kind"}
    kind = kinds.get(args.command)
    name = args.command if kind is None else f"{args.command} {getattr(args, kind)}"
    parsers[name].refuse_unknown(unknown)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"{parsers[name].prog}: error: {error.message}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    except EngineError as error:
        print(f"{parsers[name].prog}: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
