"""Schemas: what is refused and where; what passes is enforced by the grammar library itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.schema_check import MAX_DEPTH, MAX_ENUM_VALUES, MAX_NODES, check_schema

INT, TEXT = {"type": "integer"}, {"type": "string"}


def props(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def tagged(value: str) -> dict[str, Any]:
    return props({"kind": {"const": value}}, required=["kind"])


# (schema, path of the refusal, an instance that the library would let through)
REFUSED: list[tuple[Any, str, Any]] = [
    ({"type": "string", "not": {"enum": ["a"]}}, "$.not", "a"),
    ({"type": "array", "items": INT, "uniqueItems": True}, "$.uniqueItems", [1, 1]),
    (props({"a": INT}, **{"if": {}, "then": {"required": ["b"]}}), "$.if", {"a": 1}),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer"}]}, "$.allOf", 1),
    ({"type": "integer", "maximum": 5, "allOf": [INT]}, "$.maximum", 9),
    (props({"a": INT, "b": INT}, dependentRequired={"a": ["b"]}), "$.dependentRequired", {"a": 1}),
    (props({"a": INT, "b": INT}, dependentSchemas={"a": {}}), "$.dependentSchemas", None),
    ({"type": "array", "items": INT, "contains": {"const": 1}}, "$.contains", [2]),
    ({"oneOf": [INT, {"type": "number"}]}, "$.oneOf", 3),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "$.type", None),
    (props({"a": INT}, anyOf=[props({"b": INT})]), "$.properties", {"b": 1}),
    ({"type": "string", "enum": ["a", 1]}, "$.type", 1),
    ({"type": "string", "enum": ["a", "bbb"], "minLength": 2}, "$.minLength", "a"),
    ({"$defs": {"d": INT}, "$ref": "#/$defs/d", "type": "string"}, "$.type", 3),
    ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "$.maxLength", "aaaaa"),
    ({"type": "string", "format": "date", "maxLength": 3}, "$.maxLength", "2020-01-01"),
    ({"type": "string", "format": "date", "pattern": "^3"}, "$.format", None),
    ({"type": "string", "format": "idn-email"}, "$.format", "abc"),
    (props({"b": INT}, propertyNames={"pattern": "^a"}), "$.propertyNames", {"b": 1}),
    (props({"ab": TEXT}, patternProperties={"^a": INT}), "$.patternProperties", {"ab": "x"}),
    ({"type": "number", "multipleOf": 0.5}, "$.multipleOf", 0.3),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, "$.multipleOf", 4),
    ({"minimum": 5}, "$.minimum", 3),
    ({"minLength": 5}, "$.minLength", "a"),
    (props({"a": INT}, required=["a", "z"]), "$.required", {"a": 1}),
    ({"$ref": "http://x/y"}, "$.$ref", 3),
    ({"$defs": {"q": {"$anchor": "q", "type": "integer"}}, "$ref": "#q"}, "$.$ref", "s"),
    ({"type": "string", "pattern": "^(?=b)a"}, "$.pattern", "a"),
    ({"type": "string", "pattern": "^(?i)a"}, "$.pattern", None),
    ({"type": "string", "pattern": '^"$'}, "$.pattern", None),
    ({"type": "string", "pattern": r"^\\$"}, "$.pattern", None),
    ({"type": "string", "pattern": r"^\x22$"}, "$.pattern", None),
    ({"type": "string", "pattern": r"\bx"}, "$.pattern", None),
    ({"type": "array", "items": [INT]}, "$.items", None),
    (props({"a": {"items": {"type": "frob"}}}), "$.properties.a.items.type", None),
    (props({"a": {"anyOf": [INT, {"not": {}}]}}), "$.properties.a.anyOf[1].not", {"a": 3}),
    ({"$ref": "#"}, "$.$ref", None),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref", None),
    ({"$ref": "#/$defs/none"}, "$.$ref", None),
    (props({"a": False}), "$.properties.a", None),
    ({"enum": []}, "$.enum", None),
    ({"enum": list(range(MAX_ENUM_VALUES + 1))}, "$.enum", None),
    (props({"a": 5}), "$.properties.a", None),
    ({"type": "object", "properties": 5}, "$.properties", None),
    ({"type": "object", "required": 5}, "$.required", None),
    ({"type": "object", "required": [[]]}, "$.required", None),
    ({"type": [[]]}, "$.type", None),
    ({"anyOf": []}, "$.anyOf", None),
    ({"type": "object", "patternProperties": 3}, "$.patternProperties", None),
    ({"unevaluatedProperties": {"type": "integer"}}, "$.unevaluatedProperties", None),
]


@pytest.mark.parametrize(("schema", "path", "_"), REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, path, _):
    with pytest.raises(InvalidRequestError) as caught:
        check_schema(schema, "guided_json")
    assert caught.value.param == "guided_json"
    assert path in caught.value.message
    if path.startswith("$."):
        assert f"(at {path})" in caught.value.message


# (schema, valid instances, invalid ones)
PASSED: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, {"a": [None]}], []),
    ({"type": "object"}, [{"a": 1}, {}], [3]),
    (props({"a": INT, "b": TEXT}, required=["a"]), [{"a": 1}, {"a": 1, "b": ""}], [{"b": ""}]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 1.5]),
    ({"type": "number", "exclusiveMaximum": 1.5}, [1.4, -3], [1.5, 2]),
    ({"type": "integer", "multipleOf": 3}, [3, 9], [4]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["d", ""]),
    ({"type": "string", "format": "date"}, ["2020-02-03"], ["soon"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["1"]),
    ({"type": ["integer", "null"], "minimum": 3}, [None, 3], [2, "x"]),
    ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c"]),
    ({"enum": [1, "x", None, {"a": [1]}]}, [1, None, {"a": [1]}], [2, {"a": [2]}]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, ["a", None], [3]),
    ({"type": ["integer", "string"], "anyOf": [INT, TEXT]}, [3, "a"], [None]),
    ({"oneOf": [INT, TEXT]}, [3, "a"], [None]),
    ({"oneOf": [tagged("x"), tagged("y")]}, [{"kind": "x"}], [{"kind": "z"}]),
    ({"allOf": [{"type": "integer", "minimum": 3}]}, [3], [1]),
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"type": "array", "prefixItems": [INT, TEXT], "items": False}, [[1, "a"]], [["a", 1]]),
    (
        {"type": "object", "patternProperties": {"^a.*$": INT}, "additionalProperties": False},
        [{"ab": 1}],
        [{"b": 1}, {"a": "x"}],
    ),
    ({"type": "object", "additionalProperties": INT}, [{"q": 1}], [{"q": "x"}]),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, [{"aa": 1}], [{"b": 1}]),
    (
        {
            "$defs": {
                "node": props({"v": INT, "c": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
            },
            "$ref": "#/$defs/node",
        },
        [{"v": 1, "c": [{"v": 2, "c": []}]}],
        [{"v": 1, "c": [{"v": "x"}]}],
    ),
    ({"type": "integer", "format": "int32", "title": "Age", "examples": [3]}, [3], ["x"]),
]


@pytest.fixture(scope="module")
def compiler():
    """One token for each byte."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [bytes([i]) for i in range(256)] + [b""],
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=257,
        stop_token_ids=[256],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def accepts(compiler, schema: Any, instance: Any) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(("schema", "valid", "invalid"), PASSED)
def test_what_passes_is_enforced(compiler, schema, valid, invalid):
    check_schema(schema, "guided_json")
    assert [accepts(compiler, schema, each) for each in valid] == [True] * len(valid)
    assert [accepts(compiler, schema, each) for each in invalid] == [False] * len(invalid)


def test_refusals_are_still_needed(compiler):
    """Where the library has learnt to enforce a keyword, its refusal can go."""
    for schema, path, instance in REFUSED:
        if instance is not None:
            assert accepts(compiler, schema, instance), f"{path} is enforced now"


def test_size_and_depth_are_limited():
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError, match="deeper"):
        check_schema(deep, "f")
    wide = props({str(i): {} for i in range(MAX_NODES)})
    with pytest.raises(InvalidRequestError, match="parts"):
        check_schema(wide, "f")
    for value in (5, "x", None, [], False):
        with pytest.raises(InvalidRequestError):
            check_schema(value, "f")
    with pytest.raises(InvalidRequestError, match="overlap"):
        check_schema({"oneOf": [{"const": i} for i in range(100)]}, "f")
