"""Whether a JSON Schema can be enforced to the letter: what cannot is refused, never ignored.

The grammar library takes any schema and leaves out, without a word, what it cannot express. This
module knows what that is and names the keyword and its place. It needs neither the library nor
torch. Answers may be stricter than the schema (no undeclared properties, properties in the order
of the schema), never looser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from compiled_engine.errors import InvalidRequestError

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_ENUM_VALUES = 5_000
# They are compared with one another.
MAX_ONE_OF = 64

_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_NEVER_ENFORCED = (
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "additionalItems",
    "$dynamicRef",
    "$recursiveRef",
)
_FORMATS = frozenset(
    (
        "date",
        "time",
        "date-time",
        "duration",
        "uuid",
        "email",
        "uri",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
    )
)
# Keyword -> the types that it limits.
_NUMBERS, _STRINGS = ("integer", "number"), ("string",)
_LIMITS: dict[str, tuple[str, ...]] = {
    "minimum": _NUMBERS,
    "maximum": _NUMBERS,
    "exclusiveMinimum": _NUMBERS,
    "exclusiveMaximum": _NUMBERS,
    "multipleOf": _NUMBERS,
    "minLength": _STRINGS,
    "maxLength": _STRINGS,
    "pattern": _STRINGS,
    "format": _STRINGS,
}
_STRUCTURE = frozenset(
    (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "unevaluatedProperties",
        "unevaluatedItems",
    )
)
_CONSTRAINTS = frozenset(
    (*_LIMITS, *_STRUCTURE, "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
)
# In a pattern: what the library ignores, cannot read, or lets out unescaped into JSON.
_BAD_PATTERN = re.compile(
    r"(?P<look>\(\?(?!:)[^)]{0,3})|(?P<escape>\\(?:[bBpPkcnrtfv0-9]|x[01]|u00[01]))"
    r"|(?P<quote>\"|\\\\|\\x22|\\x5[cC]|\\u0022|\\u005[cC])|(?P<control>[\x00-\x1f])"
)


def check_schema(schema: Any, field: str) -> None:
    """Refuses a schema that would not be enforced as it is written.

    Args:
        schema: from JSON.
        field: of the request, for messages.

    Raises:
        InvalidRequestError: names the keyword and its JSON path, or the limit.
    """
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{field} is no JSON Schema: an object is meant", param=field)
    if schema is False:
        raise InvalidRequestError(f"{field} is false: nothing satisfies it", param=field)
    if isinstance(schema, dict):
        _Checker(schema, field).run()


class _Checker:
    def __init__(self, root: dict[str, Any], field: str) -> None:
        self._root = root
        self._field = field
        self._num_nodes = 0

    def run(self) -> None:
        # Still to be checked: (schema, JSON path, depth). No recursion: clients choose the depth.
        waiting: list[tuple[Any, str, int]] = [(self._root, "$", 0)]
        while waiting:
            schema, path, depth = waiting.pop()
            self._num_nodes += 1
            if depth > MAX_DEPTH:
                self._refuse(path, f"the schema is nested deeper than {MAX_DEPTH} levels")
            if self._num_nodes > MAX_NODES:
                self._refuse(path, f"the schema has more than {MAX_NODES} parts")
            if schema is True:
                continue
            if schema is False:
                self._refuse(path, "the schema false is not supported here")
            if not isinstance(schema, dict):
                self._refuse(path, "a schema must be an object")
            self._check(schema, path)
            waiting.extend((part, place, depth + 1) for part, place in _parts(schema, path))

    def _refuse(self, path: str, reason: str) -> NoReturn:
        raise InvalidRequestError(f"{self._field}: {reason} (at {path})", param=self._field)

    def _unsupported(self, path: str, keyword: str, why: str = "") -> NoReturn:
        detail = f": {why}" if why else ""
        self._refuse(f"{path}.{keyword}", f'the keyword "{keyword}" is not supported{detail}')

    def _check(self, schema: dict[str, Any], path: str) -> None:
        for keyword in _NEVER_ENFORCED:
            if keyword in schema:
                self._unsupported(path, keyword)
        if schema.get("uniqueItems"):
            self._unsupported(path, "uniqueItems")
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if schema.get(keyword, False) is not False:
                self._unsupported(path, keyword, "only false is")
        self._check_types(schema, path)
        for keyword in ("$ref", "allOf", "anyOf", "oneOf", "enum", "const"):
            if keyword in schema:
                self._check_alone(schema, path, keyword)
        if "$ref" in schema:
            self._check_ref(schema["$ref"], path)
        self._check_branches(schema, path)
        self._check_object(schema, path)
        self._check_array(schema, path)
        self._check_string(schema, path)
        self._check_number(schema, path)

    def _check_types(self, schema: dict[str, Any], path: str) -> None:
        types = _types(schema)
        for name in types:
            if name not in _TYPES:
                shown = name[:32]
                self._refuse(f"{path}.type", f'"{shown}" is no type; types are {", ".join(_TYPES)}')
        for keyword in _LIMITS:
            if keyword in schema and not types:
                self._unsupported(path, keyword, 'it needs a "type" beside it')

    def _check_alone(self, schema: dict[str, Any], path: str, keyword: str) -> None:
        """The keyword hides every constraint beside it, except a type that its values have."""
        others = (schema.keys() & _CONSTRAINTS) - {keyword}
        if keyword in ("enum", "const"):
            values = schema[keyword] if keyword == "enum" else [schema[keyword]]
            if not isinstance(values, list) or not values:
                self._refuse(f"{path}.{keyword}", "a list of at least one value is meant")
            if len(values) > MAX_ENUM_VALUES:
                self._refuse(f"{path}.{keyword}", f"more than {MAX_ENUM_VALUES} values")
            types = _types(schema)
            if all(_has_type(value, types) for value in values):
                others = others - {"type"}
        elif keyword in ("anyOf", "oneOf") and others == {"type"}:
            branches = schema[keyword] if isinstance(schema[keyword], list) else []
            types = _types(schema)
            found = [self._resolve(branch) for branch in branches]
            if all(b and _types(b) and set(_types(b)) <= set(types) for b in found):
                return
        if others:
            beside = sorted(others)[0]
            self._unsupported(path, beside, f'it has no effect beside "{keyword}"')

    def _check_ref(self, ref: Any, path: str) -> None:
        seen = set()
        while True:
            if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
                self._unsupported(path, "$ref", 'only references that start with "#/" are')
            if ref in seen:
                self._refuse(f"{path}.$ref", "the references lead in a circle")
            seen.add(ref)
            target = _target(self._root, ref)
            if target is None:
                self._refuse(f"{path}.$ref", f"{ref[:64]} does not exist")
            if not isinstance(target, dict) or "$ref" not in target:
                return
            ref = target["$ref"]

    def _resolve(self, schema: Any) -> dict[str, Any] | None:
        """The schema behind references; None where there is none, or another kind."""
        for _ in range(16):
            if not isinstance(schema, dict):
                return None
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = _target(self._root, schema["$ref"])
        return None

    def _check_branches(self, schema: dict[str, Any], path: str) -> None:
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = schema.get(keyword)
            if branches is None:
                continue
            if not isinstance(branches, list) or not branches:
                self._refuse(f"{path}.{keyword}", "a list of at least one schema is meant")
            if keyword == "allOf" and len(branches) > 1:
                self._unsupported(path, keyword, "it may have one branch only")
            if keyword == "oneOf" and not self._are_disjoint(branches):
                self._unsupported(
                    path, keyword, "its branches may overlap; use anyOf, or a type or constant each"
                )

    def _are_disjoint(self, branches: list[Any]) -> bool:
        """No value can satisfy two branches: their types, constants or a required tag differ."""
        if len(branches) > MAX_ONE_OF:
            return False
        found = [self._resolve(branch) for branch in branches]
        kinds = [_kinds(branch) for branch in found if branch is not None]
        if len(kinds) < len(branches):
            return False
        for i, first in enumerate(kinds):
            for j in range(i):
                one, other = found[i], found[j]
                assert one is not None
                assert other is not None
                if first & kinds[j] and not _differ(one, other):
                    return False
        return True

    def _check_object(self, schema: dict[str, Any], path: str) -> None:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            self._refuse(f"{path}.properties", "an object is meant")
        required = schema.get("required", [])
        if not isinstance(required, list):
            self._refuse(f"{path}.required", "a list of names is meant")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                shown = str(name)[:64]
                self._unsupported(path, "required", f'"{shown}" is not among the properties')
        if "propertyNames" in schema and properties:
            self._unsupported(path, "propertyNames", 'it has no effect beside "properties"')
        patterns = schema.get("patternProperties")
        if not patterns:
            return
        if not isinstance(patterns, dict):
            self._refuse(f"{path}.patternProperties", "an object is meant")
        if properties:
            self._unsupported(path, "patternProperties", 'not beside "properties"')
        if schema.get("additionalProperties", False) is not False:
            self._unsupported(path, "patternProperties", 'only with "additionalProperties": false')
        for pattern in patterns:
            self._check_pattern(pattern, f"{path}.patternProperties")

    def _check_array(self, schema: dict[str, Any], path: str) -> None:
        if isinstance(schema.get("items"), list):
            self._unsupported(path, "items", 'a list of schemas is called "prefixItems"')

    def _check_string(self, schema: dict[str, Any], path: str) -> None:
        pattern, kind = schema.get("pattern"), schema.get("format")
        if pattern is not None:
            self._check_pattern(pattern, f"{path}.pattern")
        is_string = "string" in _types(schema)
        if kind is not None and is_string and kind not in _FORMATS:
            known = ", ".join(sorted(_FORMATS))
            shown = str(kind)[:32]
            self._unsupported(path, "format", f'"{shown}" is unknown; known are {known}')
        if not is_string or (pattern is None and kind is None):
            return
        beside = "pattern" if pattern is not None else "format"
        for keyword in ("minLength", "maxLength", "format"):
            if keyword in schema and keyword != beside:
                self._unsupported(path, keyword, f'it has no effect beside "{beside}"')

    def _check_pattern(self, pattern: Any, path: str) -> None:
        if not isinstance(pattern, str):
            self._refuse(path, "a regular expression is meant")
        found = _BAD_PATTERN.search(pattern)
        if found is not None:
            shown = found.group(0)
            self._refuse(path, f'the regular expression uses "{shown}", which is not supported')

    def _check_number(self, schema: dict[str, Any], path: str) -> None:
        if "multipleOf" not in schema:
            return
        if "number" in _types(schema):
            self._unsupported(path, "multipleOf", "for integers only")
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in schema:
                self._unsupported(path, "multipleOf", f'it has no effect beside "{keyword}"')


def _parts(schema: Mapping[str, Any], path: str) -> Iterator[tuple[Any, str]]:
    """The schemas directly inside a schema, with their JSON paths."""
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        value = schema.get(keyword)
        if isinstance(value, dict):
            for name, part in value.items():
                yield part, f"{path}.{keyword}.{name[:64]}"
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        value = schema.get(keyword)
        if isinstance(value, list):
            for index, part in enumerate(value):
                yield part, f"{path}.{keyword}[{index}]"
    names = schema.get("propertyNames")
    if isinstance(names, dict):
        yield {"type": "string", **names}, f"{path}.propertyNames"
    for keyword in ("items", "additionalProperties"):
        value = schema.get(keyword)
        # False means "none" for these, which is enforced.
        if value is not None and value is not False:
            yield value, f"{path}.{keyword}"


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kind = schema.get("type")
    if kind is None:
        return ()
    names = kind if isinstance(kind, list) else [kind]
    return tuple(name if isinstance(name, str) else str(name) for name in names)


def _has_type(value: Any, types: tuple[str, ...]) -> bool:
    return not types or bool(_value_kinds(value) & set(types))


def _value_kinds(value: Any) -> set[str]:
    """Names of the types that a JSON value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema's values can have; an integer is a number too."""
    values = _constants(schema)
    if values is not None:
        return set().union(*(_value_kinds(value) for value in values))
    names = set(_types(schema)) or set(_TYPES)
    if not _types(schema):
        if "properties" in schema:
            names = {"object"}
        elif "items" in schema or "prefixItems" in schema:
            names = {"array"}
    return names | ({"number"} if "integer" in names else set())


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Constants, or those of a property that both require, have nothing in common."""
    if _have_other_constants(one, other):
        return True
    first, second = _required_parts(one), _required_parts(other)
    return any(_have_other_constants(first[tag], second[tag]) for tag in first.keys() & second)


def _required_parts(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Schemas of the properties that a value must have."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {
        name: part
        for name, part in properties.items()
        if name in required and isinstance(part, dict)
    }


def _have_other_constants(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = _constants(one), _constants(other)
    return first is not None and second is not None and not any(v in second for v in first)


def _target(root: Any, ref: Any) -> Any:
    """What a local reference names, or None."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    found = root
    for name in ref[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found
