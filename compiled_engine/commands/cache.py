"""Show, check, prune and carry what earlier starts compiled.

`ls` lists the start keys; `verify` exits with 1 if an entry is damaged; `prune` frees space;
`export` and `import` carry starts to another machine. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.flags import FlagParser
from compiled_engine.config import default_cache_dir
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.compile.inventory import KeptStart
    from compiled_engine.compile.start_key import StartKey

_DESCRIPTIONS = {
    "ls": "Start keys with model, device, versions, entries, size and last use.",
    "verify": "Reads every entry and checks its digest; exits with 1 if one is bad.",
    "prune": "Removes what is old, too much, or of no use to this installation.",
    "export": "Writes what starts need to a tar file or a folder.",
    "import": "Takes in what `export` or `warmup --output` wrote; it is code (--trust-artifact).",
}
_DAY_S = 86400.0
# Of a table that is not on a terminal.
PLAIN_WIDTH = 200
_SHOWN_DIGITS = 12


def add_parsers(subparsers: Any) -> dict[str, FlagParser]:
    """Adds `cache` with its kinds; returns their parsers by full name."""
    description = (__doc__ or "").partition("\n")[0]
    cache = subparsers.add_parser("cache", help=description, description=description)
    kinds = cache.add_subparsers(dest="cache_kind", metavar="KIND", required=True)
    parsers = {}
    for kind, text in _DESCRIPTIONS.items():
        parser = kinds.add_parser(kind, help=text, description=text)
        parser.add_argument(
            "--cache-dir",
            type=Path,
            metavar="DIR",
            default=default_cache_dir(),
            help="the engine's (default: %(default)s)",
        )
        parsers[f"cache {kind}"] = parser
    _add_prune(parsers["cache prune"])
    _add_carry(parsers["cache export"], parsers["cache import"])
    for kind, run in (
        ("ls", run_ls),
        ("verify", run_verify),
        ("prune", run_prune),
        ("export", run_export),
        ("import", run_import),
    ):
        parsers[f"cache {kind}"].set_defaults(run=run)
    return parsers


def _add_prune(parser: FlagParser) -> None:
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="what was not used for so long"
    )
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help="what was longest unused, until keys and built sources take no more than N bytes",
    )
    parser.add_argument(
        "--stale", action="store_true", help="keys of other versions or sources than these here"
    )
    parser.add_argument(
        "--compilers",
        action="store_true",
        help="what Inductor and Triton keep for themselves; starts whose pieces are kept need none "
        "of Inductor's, and compile the Triton kernels of this package again",
    )


def _add_carry(export: FlagParser, take: FlagParser) -> None:
    export.add_argument("target", type=Path, metavar="TARGET", help="a new folder, or FILE.tar")
    export.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="KEY",
        help="first digits of a start key of `cache ls`; may be repeated (default: all)",
    )
    take.add_argument("source", type=Path, metavar="SOURCE", help="a folder or tar file")
    take.add_argument(
        "--trust-artifact",
        action="store_true",
        help="the artifact is code that the engine will run with your rights: say so only if you "
        "made it or trust whoever did",
    )


def run_ls(args: argparse.Namespace) -> int:
    """Prints the table."""
    from compiled_engine.compile.inventory import kept_starts

    starts, usable = kept_starts(args.cache_dir), _portable_key()
    rows = [describe(start, usable) for start in starts]
    _print_rows("start keys", rows)
    total = sum(start.num_bytes for start in starts)
    _print_document("ls", args.cache_dir, keys=rows, num_bytes=total)
    return 0


def describe(start: KeptStart, usable: StartKey) -> dict[str, Any]:
    """One row of `ls`; `usable` holds the parts that a key must share to be of use here."""
    parts = start.key.parts
    layers = parts.get("model.num_layers", "?")
    different = [name for name, value in usable.parts.items() if parts.get(name) != value]
    return {
        "key": start.digest,
        "model": f"{parts.get('model.architecture', '?')} {layers} x "
        f"{parts.get('model.hidden_size', '?')} {parts.get('model.dtype', '')}".strip(),
        "device": parts.get("device.name") or parts.get("device.instructions", "?"),
        "versions": f"{parts.get('engine.version', '?')}, torch {parts.get('versions.torch', '?')}",
        "entries": start.num_entries,
        "bytes": start.num_bytes,
        "complete": start.is_complete,
        "last used": time.strftime("%Y-%m-%d %H:%M", time.localtime(start.used_at)),
        "usable": "yes" if not different else f"no: other {different[0]}",
    }


def run_verify(args: argparse.Namespace) -> int:
    """Prints what is bad; 1 if anything is."""
    from compiled_engine.compile.inventory import find_problems

    num_sound, problems = find_problems(args.cache_dir)
    for name, reason in problems:
        print(f"{args.cache_dir / name}: {reason}")
    print(f"{num_sound} sound, {len(problems)} bad")
    listed = [{"path": name, "reason": reason} for name, reason in problems]
    _print_document("verify", args.cache_dir, num_sound=num_sound, problems=listed)
    return 1 if problems else 0


def run_prune(args: argparse.Namespace) -> int:
    """Prints what was removed."""
    from compiled_engine.compile.inventory import prune

    given = (args.older_than, args.max_bytes, args.stale or None, args.compilers or None)
    if all(value is None for value in given):
        raise ConfigError(
            "nothing to prune by: give --older-than, --max-bytes, --stale or --compilers"
        )
    for flag, value in (("--older-than", args.older_than), ("--max-bytes", args.max_bytes)):
        if value is not None and value < 0:
            raise ConfigError(f"{flag} is {value}; allowed is 0 and more")
    removed = prune(
        args.cache_dir,
        older_than_s=None if args.older_than is None else args.older_than * _DAY_S,
        max_bytes=args.max_bytes,
        usable=_portable_key() if args.stale else None,
        compilers=args.compilers,
    )
    for item in removed:
        print(f"removed {item.label} ({item.num_bytes} bytes)")
    freed = sum(item.num_bytes for item in removed)
    print(f"{len(removed)} removed, {freed} bytes freed")
    document = [{"path": item.label, "bytes": item.num_bytes} for item in removed]
    _print_document("prune", args.cache_dir, removed=document, num_bytes=freed)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Writes the artifact."""
    from compiled_engine.compile.artifact import export_artifact
    from compiled_engine.compile.inventory import kept_starts

    starts = _named(kept_starts(args.cache_dir), args.key, args.cache_dir)
    num_bytes = export_artifact(args.cache_dir, starts, args.target)
    print(f"wrote {args.target}: {len(starts)} start keys, {num_bytes} bytes")
    keys = [start.digest for start in starts]
    _print_document(
        "export", args.cache_dir, target=str(args.target), keys=keys, num_bytes=num_bytes
    )
    return 0


def _named(starts: Sequence[KeptStart], keys: Sequence[str], cache_dir: Path) -> list[KeptStart]:
    """The starts whose keys begin as one of `keys`; all of them if there are none."""
    if not starts:
        raise ConfigError(
            f"{cache_dir} holds no compiled start: run `compiled-engine warmup` first"
        )
    for key in keys:
        found = [start.digest for start in starts if start.digest.startswith(key)]
        if len(found) != 1:
            raise ConfigError(
                f"--key {key} fits {len(found)} keys; there are "
                + ", ".join(start.digest[:_SHOWN_DIGITS] for start in starts)
            )
    return [s for s in starts if not keys or any(s.digest.startswith(key) for key in keys)]


def run_import(args: argparse.Namespace) -> int:
    """Takes the artifact in."""
    if not args.trust_artifact:
        raise ConfigError(
            f"{args.source} holds code that the engine will run with your rights, and nothing in "
            "it can prove who made it: pass --trust-artifact if you made it or trust whoever did"
        )
    from compiled_engine.compile.artifact import import_artifact

    portable = _portable_key()

    def differences(key: StartKey) -> list[str]:
        own = {n: v for n, v in key.parts.items() if n in portable.parts or _is_portable(n)}
        return portable.differences(type(key)(own))

    taken = import_artifact(args.source, args.cache_dir, differences)
    for name in taken.kept:
        print(f"{name} is here with this machine's own measurements, which stay")
    print(f"took {len(taken.digests)} start keys, {taken.num_files} files, {taken.num_bytes} bytes")
    _print_document("import", args.cache_dir, **asdict(taken))
    return 0


def _is_portable(name: str) -> bool:
    """Whether a part says which installation made a key, and not for which model or device."""
    return name == "engine.version" or (
        name.startswith("source.") and not name.startswith("source.remote/")
    )


def _portable_key() -> StartKey:
    """What a key must share with this installation, whatever model, flags and device."""
    from compiled_engine.compile.fingerprint import portable_parts
    from compiled_engine.compile.start_key import StartKey

    return StartKey(portable_parts())


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    if not rows:
        console.print(f"no {title}")
        return
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in rows[0]:
        is_number = name in ("entries", "bytes")
        table.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=is_number or name in ("key", "last used"),
            overflow="fold",
        )
    for row in rows:
        is_complete = "yes" if row["complete"] else "no"
        shown = row | {"key": row["key"][:_SHOWN_DIGITS], "complete": is_complete}
        table.add_row(*map(str, shown.values()))
    console.print(table)


def _print_document(kind: str, cache_dir: Path, **fields: Any) -> None:
    print(json.dumps({"command": f"cache {kind}", "cache_dir": str(cache_dir), **fields}))
