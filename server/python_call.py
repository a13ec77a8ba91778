"""The arguments of a call that is written in Python, as a part of a structural tag.

Owns how an object schema becomes keyword arguments. Values are JSON, which the parser of such calls
reads beside Python's own literals; a plain boolean is written as Python does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.parsers.machine import MAX_NAME_CHARS

Format = dict[str, Any]

_NAME = re.compile(rf"[A-Za-z_]\w{{0,{MAX_NAME_CHARS - 1}}}")
_CALL_NAME = re.compile(rf"[A-Za-z_][\w.]{{0,{MAX_NAME_CHARS - 1}}}")
# What an object can be asked for and a list of keyword arguments cannot say.
_UNSAID = (
    *("anyOf", "oneOf", "allOf", "$ref", "enum", "const", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
)
_DEFINITIONS = ("$defs", "definitions")
_SAYS_NOTHING = frozenset(("type", "title", "description", "default", "examples"))
_END: Format = {"type": "const_string", "value": ")"}


def rest_of_call(
    name: str, schema: Mapping[str, Any], field: str, value: Callable[[Any], Format]
) -> Format:
    """What stands behind `NAME(`: required arguments, then others, each in the schema's order.

    Args:
        name: of the function.
        schema: of its arguments, checked by `schema_check`; arguments it does not name are not
            allowed.
        field: of the request that holds the schema.
        value: makes the format of a value from its schema.

    Raises:
        InvalidRequestError: it cannot be written in Python, or not be enforced so.
    """
    if not _CALL_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"the function {name[:64]!r} cannot be called in Python, as this model does: its name "
            "must be of letters, digits, dots and _",
            param="tools",
        )
    for keyword in _UNSAID:
        if keyword in schema:
            raise InvalidRequestError(
                f"{field}: {keyword} cannot be enforced for calls in Python, as this model writes "
                "them (at $)",
                param=field,
            )
    properties = schema.get("properties") or {}
    required = list(dict.fromkeys(schema.get("required") or ()))
    items = {key: _argument(key, part, schema, field, value) for key, part in properties.items()}
    others = [items[key] for key in properties if key not in required]
    behind = [_optional(_behind_comma(item)) for item in others]
    if required:
        first, *more = (items[key] for key in required)
        return _sequence(first, *map(_behind_comma, more), *behind, _END)
    starts = [_sequence(item, *behind[i + 1 :], _END) for i, item in enumerate(others)]
    return {"type": "or", "elements": [*starts, _END]} if starts else _END


def _argument(
    key: str,
    schema: Any,
    root: Mapping[str, Any],
    field: str,
    value: Callable[[Any], Format],
) -> Format:
    if not _NAME.fullmatch(key):
        raise InvalidRequestError(
            f"{field}: the property {key[:64]!r} cannot be an argument in Python, as this model "
            "writes calls",
            param=field,
        )
    name: Format = {"type": "const_string", "value": f"{key}="}
    if _is_plain_boolean(schema):
        words = [{"type": "const_string", "value": word} for word in ("True", "False")]
        return _sequence(name, {"type": "or", "elements": words})
    if isinstance(schema, Mapping):
        for reference in _references(schema):
            if not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)):
                raise InvalidRequestError(
                    f"{field}: $ref {reference[:64]!r} must point into $defs for calls in Python, "
                    "as this model writes them",
                    param=field,
                )
        # References are looked up from the root of the schema they stand in.
        schema = {**schema, **{name: root[name] for name in _DEFINITIONS if name in root}}
    return _sequence(name, value(schema))


def _is_plain_boolean(schema: Any) -> bool:
    return (
        isinstance(schema, Mapping)
        and schema.get("type") == "boolean"
        and _SAYS_NOTHING.issuperset(schema)
    )


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _behind_comma(item: Format) -> Format:
    return _sequence({"type": "const_string", "value": ", "}, item)


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}
