"""Random JSON Schemas that a grammar can enforce and that a short answer satisfies.

Nothing in them may go on for ever: a small model likes to write digits without end.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "city", "tags", "items", "price", "note", "kind", "unit", "owner", "ok"]
WORDS = ["red", "green", "blue", "small", "large", "north", "south", "on", "off"]
FORMATS = ["date", "time", "ipv4", "uuid", "date-time"]
PATTERNS = ["^[A-Z][a-z]{2,8}$", "^[0-9]{4}-[0-9]{2}$", "^(yes|no)$", "^#[0-9a-f]{6}$"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object of two to four properties, nested up to three deep; the same for the same seed."""
    rng = random.Random(seed)
    schema = _object(rng, depth=0)
    if rng.random() < 0.2:
        schema["$defs"] = {"leaf": _leaf(rng)}
        schema["properties"]["leaf"] = {"$ref": "#/$defs/leaf"}
        schema["required"].append("leaf")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(2, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth < 3 and rng.random() < 0.2:
        return _object(rng, depth)
    if rng.random() < 0.2:
        items = _leaf(rng) if depth > 1 else _any(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": rng.randint(0, 1), "maxItems": 3}
    if rng.random() < 0.15:
        return {"anyOf": [_leaf(rng), {"type": "null"}]}
    return _leaf(rng)


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-20, 20)
    made: list[dict[str, Any]] = [
        {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 24)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
        {"type": "number", "minimum": low, "maximum": low + 5.5},
        {"type": "boolean"},
        {"enum": rng.sample(WORDS, 3)},
        {"const": rng.choice(WORDS)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": ["boolean", "null"]},
    ]
    return rng.choice(made)
