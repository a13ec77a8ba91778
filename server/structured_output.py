"""What an answer must look like: the request's several spellings of it to one `GrammarSpec`.

The spellings are OpenAI's (`response_format`), vLLM's newer (`structured_outputs`) and older
(`guided_*`) ones and `structural_tag`. Owns their shapes and limits, and that there is one of them;
`schema_check` says whether a schema can be enforced, the engine whether a grammar can be compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from compiled_engine.errors import InvalidRequestError
from compiled_engine.request import MAX_GRAMMAR_CHARS, GrammarKind, GrammarSpec
from compiled_engine.server.protocol import GenerationRequest
from compiled_engine.server.schema_check import check_schema

MAX_CHOICES = 1000
MAX_TAG_PARTS = 10_000

# Keys of `structured_outputs` that are constraints -> the kind they give.
_STRUCTURED: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint on an answer.

    Attributes:
        spec: for the engine.
        field: of the request, for messages.
    """

    spec: GrammarSpec
    field: str


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """The request's constraint, or None.

    Raises:
        InvalidRequestError: several constraints, a wrong shape, a schema that cannot be enforced,
            or too long a text; names the field.
    """
    found: list[tuple[GrammarKind, Any, str]] = []
    if request.response_format is not None:
        found.extend(_response_format(request.response_format))
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            found.append((kind, value, name))
    if request.structured_outputs is not None:
        found.extend(_structured(request.structured_outputs))
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0][2], found[1][2]
        raise InvalidRequestError(
            f"{first} and {second} are both given; an answer can follow one of them", param=second
        )
    kind, value, field = found[0]
    text = _text(kind, value, field)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{field} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed",
            param=field,
        )
    return StructuredOutput(GrammarSpec(kind, text), field)


def _response_format(value: Mapping[str, Any]) -> list[tuple[GrammarKind, Any, str]]:
    field, kind = "response_format", value.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("json_object", True, field)]
    if kind == "structural_tag":
        return [("structural_tag", value, field)]
    if kind != "json_schema":
        shown = repr(kind)[:64]
        raise InvalidRequestError(
            f"{field}.type is {shown}; allowed are text, json_object, json_schema and "
            "structural_tag",
            param=f"{field}.type",
        )
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise InvalidRequestError(
            f"{field}.json_schema is missing: an object with a name and a schema",
            param=f"{field}.json_schema",
        )
    for name, allowed in (("name", str), ("strict", bool), ("description", str)):
        if not isinstance(inner.get(name), (allowed, type(None))):
            raise InvalidRequestError(
                f"{field}.json_schema.{name} must be of type {allowed.__name__}",
                param=f"{field}.json_schema.{name}",
            )
    # "strict": false asks for less than is given here: the schema is enforced either way.
    return [("json_schema", inner.get("schema", {}), f"{field}.json_schema.schema")]


def _structured(value: Mapping[str, Any]) -> list[tuple[GrammarKind, Any, str]]:
    found: list[tuple[GrammarKind, Any, str]] = []
    for name, part in value.items():
        field = f"structured_outputs.{name[:64]}"
        if part is None or part is False:
            continue
        if name not in _STRUCTURED:
            raise InvalidRequestError(
                f"{field} is not supported; supported are {', '.join(_STRUCTURED)}", param=field
            )
        found.append((_STRUCTURED[name], part, field))
    if not found:
        raise InvalidRequestError(
            "structured_outputs is empty: one of " + ", ".join(_STRUCTURED) + " is needed",
            param="structured_outputs",
        )
    return found


def _text(kind: GrammarKind, value: Any, field: str) -> str:
    """The text of a `GrammarSpec`."""
    if kind == "json_object":
        if value is not True:
            raise InvalidRequestError(f"{field} must be true or false", param=field)
        return ""
    if kind == "json_schema":
        schema = _decoded(value, field)
        check_schema(schema, field)
        return msgspec.json.encode(schema).decode()
    if kind == "structural_tag":
        return msgspec.json.encode(_structural_tag(_decoded(value, field), field)).decode()
    if kind == "choice":
        return _choices(value, field)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{field} must be a text, and not empty", param=field)
    return value


def _decoded(value: Any, field: str) -> Any:
    """A value that may be given as JSON text."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; at most {MAX_GRAMMAR_CHARS} are allowed",
            param=field,
        )
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequestError(f"{field} is no valid JSON: {error}", param=field) from error


def _choices(value: Any, field: str) -> str:
    is_texts = isinstance(value, list) and all(isinstance(c, str) and c for c in value)
    if not is_texts or not value:
        raise InvalidRequestError(
            f"{field} must be a list of texts, none of them empty, and not empty itself",
            param=field,
        )
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"{field} has {len(value)} choices; at most {MAX_CHOICES} are allowed", param=field
        )
    return msgspec.json.encode(value).decode()


def _structural_tag(value: Any, field: str) -> dict[str, Any]:
    """A structural tag in the present form, its schemas checked; an older form is converted."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{field} must be an object", param=field)
    if "format" in value:
        tag = {"type": "structural_tag", "format": value["format"]}
    elif isinstance(value.get("structures"), list):
        parts = value["structures"]
        if not all(isinstance(part, dict) for part in parts):
            raise InvalidRequestError(f"{field}.structures must hold objects", param=field)
        tags = [
            {
                "type": "tag",
                "begin": part.get("begin"),
                "content": {"type": "json_schema", "json_schema": part.get("schema", {})},
                "end": part.get("end"),
            }
            for part in parts
        ]
        triggers = value.get("triggers")
        form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
        tag = {"type": "structural_tag", "format": form}
    else:
        raise InvalidRequestError(f"{field} needs a format", param=field)
    waiting: list[tuple[Any, str]] = [(tag["format"], f"{field}.format")]
    num_parts = 0
    while waiting:
        part, path = waiting.pop()
        num_parts += 1
        if num_parts > MAX_TAG_PARTS:
            raise InvalidRequestError(f"{field} has more than {MAX_TAG_PARTS} parts", param=field)
        if isinstance(part, dict):
            for name, inner in part.items():
                if name == "json_schema":
                    check_schema(inner, f"{path}.json_schema")
                else:
                    waiting.append((inner, f"{path}.{name[:64]}"))
        elif isinstance(part, list):
            waiting.extend((inner, f"{path}[{i}]") for i, inner in enumerate(part))
    return tag
