"""Arguments that the model writes as plain text, key by key, turned into JSON by the tool's schema.

Owns types: text of a parameter that can only be a string is handed on as it comes; anything else
waits for its end and becomes what the schema allows.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

_MAX_DEPTH = 8
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_STRING = frozenset({"string"})


class ArgumentWriter:
    """Writes one JSON object, member by member.

    Args:
        emit: takes each piece of the object's text.
        schema: JSON schema of the arguments; empty if it is not known.
    """

    def __init__(self, emit: Callable[[str], None], schema: Mapping[str, Any]) -> None:
        self._emit = emit
        self._schema = schema
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._held: list[str] = []

    def can_begin(self, key: str) -> bool:
        """Whether the schema has the key, and it was not written yet."""
        return key in (self._schema.get("properties") or {}) and key not in self._keys

    def begin(self, key: str) -> None:
        """Starts the value of `key`."""
        separator = ", " if self._keys else "{"
        self._keys.add(key)
        self._types = types_of((self._schema.get("properties") or {}).get(key), self._schema)
        self._emit(f"{separator}{_quoted(key)}: ")
        self._held.clear()
        if self._types == _STRING:
            self._emit('"')

    def add(self, text: str) -> None:
        """Adds text to the value."""
        if not text:
            return
        if self._types == _STRING:
            self._emit(_quoted(text)[1:-1])
        else:
            self._held.append(text)

    def end(self) -> None:
        """Ends the value."""
        if self._types == _STRING:
            self._emit('"')
        else:
            self._emit(as_json("".join(self._held), self._types))

    def close(self) -> None:
        """Ends the object."""
        self._emit("}" if self._keys else "{}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON type names that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if "enum" in schema and isinstance(schema["enum"], list):
        return frozenset(_type_name(value) for value in schema["enum"])
    if "const" in schema:
        return frozenset({_type_name(schema["const"])})
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_of(_resolve(reference, root), root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, list):
            return frozenset().union(*(types_of(part, root, depth + 1) for part in parts))
    return frozenset()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root
    if not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def as_json(text: str, types: frozenset[str]) -> str:
    """JSON of a value whose text is plain: as one of `types` if it can be read so.

    Without types, text that is JSON stays JSON and all other text becomes a string.
    """
    bare = text.strip()
    found = _read(bare)
    if found is not None:
        kind = _type_name(found[0])
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        if fits:
            return found[1]
    return _quoted(text)


def _read(text: str) -> tuple[Any, str] | None:
    """The value that `text` spells, and its JSON; None where it spells none."""
    text = _PYTHON_NAMES.get(text, text)
    try:
        return json.loads(text, parse_constant=_refuse_constant), text
    except (ValueError, RecursionError):
        pass
    if text[:1] not in ("{", "[", "("):
        return None
    try:
        value = ast.literal_eval(text)
        value = list(value) if isinstance(value, tuple) else value
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
