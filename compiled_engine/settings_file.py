"""Settings of the engine out of a file: what `--config` reads and `tune` writes.

A TOML or JSON file with fields of `EngineConfig` by name, and a table `tuned` that says what the
values were measured for. What is given beside the file wins over it. No torch.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError

TUNED = "tuned"
# Fields that a file cannot have, and what to do instead. No file may allow code to run.
_ELSEWHERE = {
    "model": "give it as MODEL",
    "config_file": "a file cannot name another",
    "trust_remote_code": "only the flag --trust-remote-code can allow that",
    "allow_pickle": "only the flag --allow-pickle can allow that",
}


@dataclass(frozen=True, kw_only=True)
class TunedFor:
    """What the values of a file were measured for: its table `tuned`.

    Attributes:
        model: name of the model.
        model_digest: of its shape and format; neither its path nor its weights.
        device: as the vendor calls it; of a CPU the number of threads too.
        workload: name of what was run.
        date: of the measurement.
        versions: of what ran.
        reasons: field -> why it has its value; where the file's format has no comments.
    """

    model: str
    model_digest: str
    device: str
    workload: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingsFile:
    """What a file says.

    Attributes:
        values: fields of `EngineConfig`, with the types they have there.
        tuned: what they were measured for; None where the file does not say.
    """

    values: dict[str, Any]
    tuned: TunedFor | None


def read_settings_file(path: Path) -> SettingsFile:
    """Reads and checks a file; one whose name ends with `.json` as JSON, any other as TOML.

    Raises:
        ConfigError: it cannot be read, or holds a key or a type that no setting has.
    """
    where = f"--config {path}"
    found = _parse(path, where)
    tuned = found.pop(TUNED, None)
    hints = typing.get_type_hints(EngineConfig)
    values = {}
    for name, value in found.items():
        if name in _ELSEWHERE:
            raise _wrong(f"{where}: {name}: {_ELSEWHERE[name]}")
        if name not in hints:
            known = ", ".join(sorted(set(hints) - set(_ELSEWHERE)))
            raise _wrong(
                f"{where}: {name}: no such setting of the engine (the server's are flags only); "
                f"there are {known}, and the table {TUNED}"
            )
        values[name] = _converted(value, hints[name], f"{where}: {name}")
    return SettingsFile(values, None if tuned is None else _tuned(tuned, f"{where}: {TUNED}"))


def with_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that were given, and those of the file in `config_file` that were not.

    Raises:
        ConfigError: as `read_settings_file`.
    """
    path = given.get("config_file")
    if path is None:
        return dict(given)
    path = Path(path)
    return {**read_settings_file(path).values, **given, "config_file": path}


def _parse(path: Path, where: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _wrong(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{where}: is no UTF-8 text: {error}") from error
    is_json = path.suffix == ".json"
    try:
        if is_json:
            found = json.loads(text)
        else:
            import tomllib

            found = tomllib.loads(text)
    except ValueError as error:
        raise _wrong(f"{where}: is no {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(f"{where}: holds no table of settings")
    return found


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A value of the file as the field wants it."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value not in allowed:
            raise _wrong(f"{where}: {value!r} is none of {', '.join(allowed)}")
        return value
    if get_origin(hint) is tuple:
        if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise _wrong(f"{where}: {value!r} is no list of names")
        return tuple(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not hint:  # a bool is no int here
        raise _wrong(f"{where}: {value!r} is no {_KINDS[hint]}")
    return value


_TABLES = ("versions", "reasons")  # of `TunedFor`
_KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}


def _tuned(found: Any, where: str) -> TunedFor:
    if not isinstance(found, dict):
        raise _wrong(f"{where}: is no table")
    known = [entry.name for entry in fields(TunedFor)]
    for name, value in found.items():
        if name not in known:
            raise _wrong(f"{where}.{name}: no such key; there are {', '.join(known)}")
        is_table = name in _TABLES
        texts = value.values() if is_table and isinstance(value, dict) else [value]
        if is_table != isinstance(value, dict) or not all(isinstance(text, str) for text in texts):
            raise _wrong(
                f"{where}.{name}: {value!r} is no {'table of texts' if is_table else 'text'}"
            )
    missing = [name for name in ("model", "model_digest", "device") if name not in found]
    if missing:
        raise _wrong(f"{where}: {', '.join(missing)} missing")
    return TunedFor(**found)


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="config_file")
