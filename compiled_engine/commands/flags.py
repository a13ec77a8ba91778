"""Command-line flags made from the fields of the config dataclasses, and back.

A field's name, type, default and docstring entry give its flag, so a new field has one at once.
Imports nothing heavy: `--help` must answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from compiled_engine.config import DEFAULT_MODEL, EngineConfig, ServerConfig
from compiled_engine.settings_file import with_file

EXIT_BAD_CONFIG = 2

C = TypeVar("C", EngineConfig, ServerConfig)

# Field -> its flags, where they are not the field's name with dashes. The second names are those
# that vLLM uses for the same thing.
_FLAGS: dict[str, tuple[str, ...]] = {
    "config_file": ("--config",),
    "chunked_prefill_size": ("--chunked-prefill-size", "--max-num-batched-tokens"),
    "disable_passes": ("--disable-pass",),
    "enable_passes": ("--enable-pass",),
    "kernels": ("--kernel",),
}
_METAVARS = {int: "N", float: "X", Path: "DIR", str: "TEXT"}


class FlagParser(argparse.ArgumentParser):
    """Exits with code 2 and one line on a mistake; never guesses an abbreviated flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )

    def error(self, message: str) -> NoReturn:
        """Prints the mistake and exits."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)

    def refuse_unknown(self, unknown: list[str]) -> None:
        """Exits if `unknown` holds anything; names the nearest flag there is."""
        if not unknown:
            return
        flags = [text for text in unknown if text.startswith("-")]
        if not flags:
            self.error(f"{unknown[0]!r} is one argument too many")
        given = flags[0].partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        nearest = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
        hint = f"; the nearest one is {nearest[0]}" if nearest else ""
        self.error(f"unknown flag {given}{hint}")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The optional positional MODEL."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"folder, .gguf file or Hugging Face id (default: {DEFAULT_MODEL})",
    )


def add_config_arguments(
    parser: argparse.ArgumentParser,
    config_class: type[EngineConfig] | type[ServerConfig],
    *,
    only: frozenset[str] | None = None,
) -> None:
    """One flag for each field but `model`, or for those of `only`."""
    title = "engine" if config_class is EngineConfig else "server"
    group = parser.add_argument_group(f"{title} settings")
    hints = typing.get_type_hints(config_class)
    texts = attribute_texts(config_class)
    for entry in _flag_fields(config_class):
        if only is not None and entry.name not in only:
            continue
        group.add_argument(
            *flags_of(entry.name),
            dest=entry.name,
            default=argparse.SUPPRESS,
            **_argument_options(entry, hints[entry.name], texts[entry.name]),
        )


def config_from_args(config_class: type[C], args: argparse.Namespace) -> C:
    """The config of the flags that were given, and for the engine of the file of `--config`.

    All other fields keep their defaults.

    Raises:
        ConfigError: a value is out of range, or the file cannot be used.
    """
    given = {f.name: getattr(args, f.name) for f in fields(config_class) if f.name in args}
    for name in ("disable_passes", "enable_passes", "kernels"):
        if name in given:
            given[name] = tuple(given[name])
    return config_class(**(with_file(given) if config_class is EngineConfig else given))


def flags_of(name: str) -> tuple[str, ...]:
    """Flags of a field, the main one first."""
    return _FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def changed_fields(config: EngineConfig | ServerConfig) -> set[str]:
    """Names of fields whose value is not the default."""
    return {f.name for f in fields(config) if getattr(config, f.name) != _default(f)}


def attribute_texts(described: type) -> Mapping[str, str]:
    """Field name -> its text in the "Attributes:" section of the class docstring."""
    section = (inspect.getdoc(described) or "").partition("Attributes:\n")[2]
    texts: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            texts[name] = entry[2]
        elif line.startswith("     ") and name:
            texts[name] += " " + line.strip()
        elif line and not line.startswith("    "):
            break
    return texts


def _flag_fields(config_class: type[EngineConfig] | type[ServerConfig]) -> Iterator[Field[Any]]:
    return (f for f in fields(config_class) if f.name != "model")


def _default(entry: Field[Any]) -> Any:
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return entry.default


def _argument_options(entry: Field[Any], hint: Any, text: str) -> dict[str, Any]:
    default = _default(entry)
    help_text = text.replace("%", "%%").rstrip(".")
    if hint is bool:
        # Fields that are on by default get a --no- form beside their own.
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        return {"action": action, "help": help_text}
    if default not in (None, ()):
        help_text += f" (default: {str(default).replace('%', '%%')})"
    kind = _without_none(hint)
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind), "help": help_text}
    if typing.get_origin(kind) is tuple:
        return {"action": "append", "metavar": "NAME", "help": f"{help_text}; may be repeated"}
    is_file = entry.name.endswith(("_file", "_config"))
    return {"type": kind, "metavar": "FILE" if is_file else _METAVARS[kind], "help": help_text}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        assert len(kinds) == 1, f"{hint}: a flag has one type"
        return kinds[0]
    return hint
