"""Typed look-ups in a quantisation config, with errors that name the field."""

from __future__ import annotations

from typing import Any, NoReturn

from compiled_engine.errors import ConfigError


class Section:
    """One JSON object of a quantisation config; errors name the field."""

    def __init__(self, values: Any, name: str) -> None:
        self.name = name
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is {values!r}; it must be an object", param=name)
        self.values = values

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raises the ConfigError about the field."""
        raise ConfigError(f"{self.name}.{field} {reason}", param="quantization_config")

    def one_of(self, field: str, *allowed: Any) -> Any:
        """The field's value, which must be one of `allowed`; None is "not there"."""
        value = self.values.get(field)
        if value not in allowed:
            named = ", ".join(repr(choice) for choice in allowed if choice is not None)
            self.refuse(field, f"is {value!r}; supported is {named or 'to leave it out'}")
        return value

    def section(self, field: str) -> Section | None:
        """A nested object, or None."""
        value = self.values.get(field)
        return None if value is None else Section(value, f"{self.name}.{field}")

    def names(self, *fields: str) -> tuple[str, ...]:
        """All strings of some lists."""
        found: list[str] = []
        for field in fields:
            value = self.values.get(field) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                self.refuse(field, f"is {value!r}; it must be a list of names")
            found += value
        return tuple(found)

    def only(self, known: str) -> None:
        """Refuses fields that are set and not among the names in `known`."""
        for field, value in self.values.items():
            if value not in (None, False, {}, []) and field not in known.split():
                self.refuse(field, f"is {value!r}; nobody knows here what it means")
