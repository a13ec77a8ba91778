"""Every candidate of the kernel registry, and a registry over them, plugins and options."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compiled_engine.custom_ops import attention_choice, families, gemm, moe_choice, quant_choice
from compiled_engine.custom_ops.kernel_plugins import Plugins, load_plugins
from compiled_engine.custom_ops.registry import (
    Candidate,
    KernelRegistry,
    Objective,
    Tuner,
    check_override,
)
from compiled_engine.errors import ConfigError

CANDIDATES: tuple[Candidate, ...] = (
    *attention_choice.CANDIDATES,
    *gemm.CANDIDATES,
    *moe_choice.CANDIDATES,
    *quant_choice.CANDIDATES,
    *families.CANDIDATES,
)
_FILE_KEYS = ("objective", "kernels")


def make_registry(
    overrides: Iterable[str] = (),
    *,
    config_file: Path | None = None,
    objective: str | None = None,
    tuner: Tuner | None = None,
) -> KernelRegistry:
    """A registry over our candidates and those of installed plugins.

    Args:
        overrides: each "family=name" or "family.mode=name"; they win over the file's.
        config_file: TOML or JSON with `objective` and a table `kernels` of overrides.
        objective: wins over the file's; None takes that, or "latency".
        tuner: measures, for the objective "autotune".

    Raises:
        ConfigError: an override is not of this form or names what there is not, the file is none,
            a plugin's candidate clashes with another.
    """
    plugins = load_plugins(CANDIDATES)
    candidates = (*CANDIDATES, *plugins.candidates)
    chosen: dict[str, str] = {}
    if config_file is not None:
        found = _read(config_file)
        objective = objective or _file_objective(config_file, found)
        chosen = _file_overrides(config_file, found, candidates, plugins)
    for text in overrides:
        place, separator, name = text.partition("=")
        if not (place and separator and name):
            raise ConfigError(
                f"--kernel {text}: the form is FAMILY=NAME, such as attention=torch",
                param="kernels",
            )
        _check(candidates, plugins, place, name, f"--kernel {place}={name}")
        chosen[place] = name
    if objective == Objective.AUTOTUNE and tuner is None:
        raise ConfigError(
            f"--kernel-objective {objective} measures on the device that runs the kernels; none is "
            "here",
            param="kernel_objective",
        )
    return KernelRegistry(candidates, chosen, Objective(objective or "latency"), tuner)


def _read(path: Path) -> dict[str, Any]:
    """The file's keys and values."""
    where = f"--kernel-config {path}"
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise _wrong(f"{where}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise _wrong(f"{where}: is no {kind}: {error}") from error
    if not isinstance(found, dict):
        raise _wrong(f"{where}: holds no table")
    for key in found:
        if key not in _FILE_KEYS:
            raise _wrong(f"{where}: {key}: no such key; there are {', '.join(_FILE_KEYS)}")
    return found


def _file_objective(path: Path, found: Mapping[str, Any]) -> str | None:
    value = found.get("objective")
    known = [objective.value for objective in Objective]
    if value is not None and value not in known:
        raise _wrong(
            f"--kernel-config {path}: objective: {value!r} is none; there are {', '.join(known)}"
        )
    return value


def _file_overrides(
    path: Path, found: Mapping[str, Any], candidates: tuple[Candidate, ...], plugins: Plugins
) -> dict[str, str]:
    kernels = found.get("kernels", {})
    if not isinstance(kernels, dict):
        raise _wrong(f"--kernel-config {path}: kernels: holds no table of FAMILY = NAME")
    chosen: dict[str, str] = {}
    for family, value in kernels.items():
        # In TOML `fused_linear.few = "row"` is a table of modes.
        modes = (
            {f"{family}.{mode}": name for mode, name in value.items()}
            if isinstance(value, dict)
            else {family: value}
        )
        for place, name in modes.items():
            where = f"--kernel-config {path}: kernels.{place}"
            if not isinstance(name, str):
                raise _wrong(f"{where}: {name!r} is no name")
            _check(candidates, plugins, place, name, f"{where} = {name!r}")
            chosen[place] = name
    return chosen


def _check(
    candidates: tuple[Candidate, ...], plugins: Plugins, place: str, name: str, where: str
) -> None:
    """As `check_override`; a plugin that could not be loaded may have had it, and is named."""
    try:
        check_override(candidates, place, name, where)
    except ConfigError as error:
        if plugins.failures:
            failed = "; ".join(f"{plugin}: {why}" for plugin, why in plugins.failures)
            message = f"{error.message}; plugins that could not be loaded: {failed}"
            raise ConfigError(message, param="kernels") from error
        raise


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="kernel_config")
