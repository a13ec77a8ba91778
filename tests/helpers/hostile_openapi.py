"""Bodies that follow `/openapi.json`, or nearly: most pass the first checks and go deeper."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.helpers.hostile_bodies import TEXTS, VALID, Attack, any_value

MAX_DEPTH = 8
_INTEGERS = (0, 1, 2, -1, 3, 16, 17, 300, 2**31, 2**63 - 1, 2**63, -(2**63))
_FLOATS = (0.0, 0.5, 1.0, 2.0, -2.0, 1e-300, 1e300, 100.0, 10.5)
_TEXTS = (*TEXTS, "a", "auto", "text", "function", "json_schema", "low", '{"a": 1}')


class DocumentAttacks:
    """Makes a body for one of the generating routes of a document.

    Args:
        document: the decoded `/openapi.json`.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._bodies = {
            route: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for route, operations in document["paths"].items()
            if "requestBody" in operations.get("post", {}) and route in VALID
        }
        assert len(self._bodies) >= 5, sorted(document["paths"])

    def __call__(self, rng: random.Random) -> Attack:
        """One request."""
        route = rng.choice(list(self._bodies))
        body = self._value(rng, self._bodies[route], 0)
        if isinstance(body, dict) and rng.random() < 0.7:
            # Few bodies of nothing but random fields are valid: most keep the needed ones.
            body = {**body, **VALID[route]}
        return Attack(route, json.dumps(body).encode())

    def _value(self, rng: random.Random, schema: dict[str, Any], depth: int) -> Any:
        if depth > MAX_DEPTH or rng.random() < 0.01:
            return any_value(rng, 1)
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._value(rng, self._schemas[name], depth)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return self._value(rng, rng.choice(schema[choice]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        return self._typed(rng, schema, depth)

    def _typed(self, rng: random.Random, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if kind == "object":
            return self._object(rng, schema, depth)
        if kind == "array":
            length = rng.choice((0, 1, 1, 2, 5))
            return [self._value(rng, schema.get("items", {}), depth + 1) for _ in range(length)]
        simple = {
            "integer": rng.choice(_INTEGERS),
            "number": rng.choice(_FLOATS),
            "string": rng.choice(_TEXTS),
            "boolean": rng.random() < 0.5,
            "null": None,
        }
        return simple[kind] if kind in simple else any_value(rng, 2)

    def _object(self, rng: random.Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        needed = schema.get("required", ())
        result = {
            name: self._value(rng, inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in needed or rng.random() < 0.12
        }
        further = schema.get("additionalProperties")
        if isinstance(further, dict):
            for _ in range(rng.randrange(3)):
                result[rng.choice(("7", "8", "-1", "type", "x"))] = self._value(
                    rng, further, depth + 1
                )
        return result
