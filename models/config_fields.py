"""Typed look-ups in the JSON files of a model folder, with errors that name file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from compiled_engine.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: a model folder needs a {path.name}", param="model"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", param="model")
    return value


class Fields:
    """Typed look-ups in one JSON object, with errors that name the file and the field.

    An absent field and one that is null are the same.

    Args:
        values: the object.
        path: of the file, for messages.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raises the ConfigError about the field."""
        raise ConfigError(f"{self.path}: {field} {reason}", param=field)

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.values.get(field)
        if value is None:
            if default is None:
                self.refuse(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(field, f"is {value!r}; it must be a whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.values.get(field)
        if value is None:
            if default is None:
                self.refuse(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(field, f"is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, f"is {value!r}; it must be true or false")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """Whole numbers: one or a list of them; none if absent."""
        value = self.values.get(field)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        for item in listed:
            if isinstance(item, bool) or not isinstance(item, int):
                self.refuse(field, f"is {value!r}; it must be a whole number or a list of them")
        return tuple(listed)
