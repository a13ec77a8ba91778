"""Tools and questions of the Berkeley Function Calling Leaderboard, from the package `bfcl-eval`.

Only its data files are read; installing its dependencies is not needed. Their types are Python's
names, which `as_json_schema` turns into JSON Schema's.
"""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("simple_python", "multiple", "live_simple", "live_multiple")
MAX_QUESTION_CHARS = 400
# A small model may write without end where nothing bounds it; a client would bound it as well.
MAX_STRING_CHARS, MAX_ITEMS, MAX_INTEGER = 24, 2, 10**6
_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "int": "integer",
    "bool": "boolean",
    "str": "string",
    "String": "string",
}
_KEPT = ("description", "enum")


@dataclass(frozen=True)
class Tool:
    """One tool with a question that it answers."""

    name: str
    question: str
    schema: dict[str, Any]


def data_folder() -> Path:
    """Where the package keeps its data; it is found without importing it."""
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None, "bfcl-eval is not installed: pip install --no-deps bfcl-eval"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "data"


def tools(count: int, seed: int = 0) -> list[Tool]:
    """That many tools of different names and schemas; the same for the same seed."""
    found: dict[str, Tool] = {}
    for name in FILES:
        for line in (data_folder() / f"BFCL_v4_{name}.json").read_text().splitlines():
            entry = json.loads(line)
            question = entry["question"][0][-1]["content"]
            for tool in entry["function"]:
                schema = as_json_schema(tool["parameters"])
                if len(question) <= MAX_QUESTION_CHARS and schema["properties"]:
                    found[json.dumps(schema)] = Tool(tool["name"], question, schema)
    return random.Random(seed).sample(sorted(found.values(), key=lambda tool: tool.name), count)


def as_json_schema(given: dict[str, Any]) -> dict[str, Any]:
    """The schema in JSON Schema's words, with strings, integers and lists bounded."""
    kind = _TYPES.get(given.get("type", "any"), given.get("type", "any"))
    kept = {key: given[key] for key in _KEPT if key in given}
    if kind == "any":
        return {**kept, "type": ["string", "boolean"], "maxLength": MAX_STRING_CHARS}
    schema: dict[str, Any] = {"type": kind, **kept}
    if kind == "object":
        properties = given.get("properties") or {}
        schema["properties"] = {name: as_json_schema(p) for name, p in properties.items()}
        schema["required"] = [n for n in given.get("required") or [] if n in properties]
        schema["additionalProperties"] = False
    elif kind == "array":
        # The choices given for a list are those of its items.
        choices = {"enum": schema.pop("enum")} if "enum" in schema else {}
        items = {**(given.get("items") or {}), **choices}
        schema["items"] = as_json_schema(items)
        schema["maxItems"] = MAX_ITEMS
    elif "enum" in schema:
        pass
    elif kind == "string":
        schema["maxLength"] = MAX_STRING_CHARS
    elif kind in ("integer", "number"):
        schema |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    return schema
