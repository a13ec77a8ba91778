"""The file that a tuning writes: values with the reason of each, for `--config`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compiled_engine.errors import ConfigError, EngineError
from compiled_engine.settings_file import TUNED, TunedFor
from compiled_engine.tune.choose import Decision

SUFFIXES = (".toml", ".json")
# Given settings that say where or how it was tuned, not what an engine is.
NOT_KEPT = frozenset(
    {
        "model", "config_file", "load_format", "cache_dir", "dump_graphs", "seed", "compile_jobs",
        "compile_mode", "max_total_tokens", "gpu_memory_utilization", "tokenizer",
        "trust_remote_code", "allow_pickle",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is written.

    Attributes:
        given: settings that the user gave, by field.
        decisions: of the others.
        tuned: what they are for.
        notes: lines about kernels.
    """

    given: Mapping[str, Any]
    decisions: Sequence[Decision]
    tuned: TunedFor
    notes: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """What the file sets."""
        chosen = {d.name: d.value for d in self.decisions if d.value is not None}
        return {**self.given, **chosen}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each setting has its value, those that keep their defaults among them."""
        given = dict.fromkeys(self.given, "given to tune")
        return {**{d.name: d.reason for d in self.decisions}, **given}


def check_output(path: Path) -> None:
    """Refuses a file that cannot be written, or is there already.

    Raises:
        ConfigError: says what to change.
    """
    where = f"--output {path}"
    if path.suffix not in SUFFIXES:
        raise _wrong(f"{where}: its name must end with {' or '.join(SUFFIXES)}")
    if path.exists() or path.is_symlink():
        raise _wrong(f"{where} is there already: name another")
    if not path.parent.is_dir():
        raise _wrong(f"{where}: no such folder")
    if not os.access(path.parent, os.W_OK):
        raise _wrong(f"{where}: the folder cannot be written")


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Writes the file at once: nobody ever sees a part of it.

    Raises:
        EngineError: it cannot be written.
    """
    text = as_json(recipe) if path.suffix == ".json" else as_toml(recipe)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EngineError(f"--output {path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def as_toml(recipe: Recipe) -> str:
    """TOML with the reasons as comments; defaults that are kept are comments too."""
    lines = [
        "# Written by `compiled-engine tune`; read by `--config FILE` of `serve` and the others.",
        "# tok/s: tokens of prompts, cached ones too, and of answers; median (least to most).",
        "",
    ]
    values, defaults = recipe.values, {d.name: d.default for d in recipe.decisions}
    for name, reason in recipe.reasons.items():
        lines += [_comment(part) for part in reason.split("; ")]
        if name in values:
            lines.append(f"{name} = {_toml(values[name])}")
        elif defaults[name] is not None:
            lines.append(f"# {name} = {_toml(defaults[name])}")
        else:
            lines.append(f"# {name}: none")
        lines.append("")
    lines += [_comment(note) for note in recipe.notes]
    lines += [""] if recipe.notes else []
    lines.append(f"[{TUNED}]")
    tuned = asdict(replace(recipe.tuned, reasons={}))
    for name, value in tuned.items():
        if not isinstance(value, Mapping):
            lines.append(f"{name} = {_toml(value)}")
    lines += ["", f"[{TUNED}.versions]"]
    lines += [f"{_toml(name)} = {_toml(value)}" for name, value in recipe.tuned.versions.items()]
    return "\n".join(lines) + "\n"


def as_json(recipe: Recipe) -> str:
    """JSON with the reasons in the table of what was tuned."""
    reasons = {**recipe.reasons}
    if recipe.notes:
        reasons["kernels"] = "\n".join(recipe.notes)
    tuned = asdict(replace(recipe.tuned, reasons=reasons))
    values = {name: plain_value(value) for name, value in recipe.values.items()}
    return json.dumps({**values, TUNED: tuned}, indent=1, ensure_ascii=False) + "\n"


def _comment(text: str) -> str:
    return f"# {' '.join(text.split())}"


def plain_value(value: Any) -> Any:
    """A setting as JSON and TOML have it: paths as texts, tuples as lists."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _toml(value: Any) -> str:
    # Texts, numbers, booleans and lists of texts are spelled as in JSON, but for one character.
    return json.dumps(plain_value(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="output")
