"""Request fields that ask for an answer's form: malformed, explosive, and harmless ones."""

from __future__ import annotations

from typing import Any


def _schema(schema: Any) -> dict[str, Any]:
    inner = {"name": "n", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    """Each definition has the next one twice: small text, 2 ** levels leaves."""
    definitions: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(1, levels):
        ref = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {
            "type": "object",
            "properties": {"a": ref, "b": ref},
            "required": ["a", "b"],
        }
    return {"$defs": definitions, "$ref": f"#/$defs/d{levels - 1}"}


WRONG_GRAMMARS: tuple[dict[str, Any], ...] = (
    *(
        {"guided_regex": regex}
        for regex in ("foo**", "(", ")", "[z-a]", "(?<=x)y", "\\p{Foo}", "a{5,2}", "", "\\", "[")
    ),
    *({"guided_regex": regex} for regex in ("(" * 20_000, "a{99999999999}", "(?P<a", "\\1(a)")),
    *(
        {"guided_grammar": text}
        for text in (
            *("root ::= undefined", "", "root ::=", "root ::= root", "::=", 'root ::= "', "\x00"),
            'root ::= root "a"',
            'root ::= dead\ndead ::= dead "b" | dead',
            'root ::= "a" dead\ndead ::= dead "b"',
            "root ::= " + "(" * 5000,
            'a ::= "b"',
            'root ::= "a" root ::= "b"',
            'root ::= [\\x{FFFFFFFF}-\\x{0}] "\\u12"',
        )
    ),
    *(
        {"guided_json": schema}
        for schema in (
            *("not json", 5, [], {"type": "frob"}, {"$ref": "#"}, {"type": "object", "not": {}}),
            *({"$ref": "#/$defs/none"}, {"$ref": "http://127.0.0.1:1/x"}, {"enum": []}),
            *({"type": []}, {"properties": 5}, {"required": "a"}, {"items": 7}, {"anyOf": []}),
            {"type": "string", "pattern": "("},
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"type": "integer", "minimum": 9, "maximum": 1},
            {"type": "integer", "minimum": 1e300},
            {"type": "array", "minItems": -1},
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"type": "object", "properties": {"\ud800": {"type": "integer"}}},
            "[" * 50_000,
        )
    ),
    *({"guided_choice": choice} for choice in ([], [""], "a", [1], None, ["a"] * 2000)),
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"structural_tag": {"format": {"type": "frob"}}},
    {"structural_tag": {"format": {"type": "triggered_tags", "triggers": [], "tags": []}}},
    {"structural_tag": {"structures": [{}], "triggers": [5]}},
    {"structural_tag": "{"},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": {"frob": 1}},
    {"response_format": {"type": "frob"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {}},
    _schema(5),
    _schema(_deep(250)),
)
COSTLY_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "((a{1,200}b?){1,200}c?){1,200}" * 20},
    {"guided_regex": "(((((a?){50}){50}){50}){50}){50}"},
    {"guided_regex": "(a|a|b|ab|ba)*" * 300 + "c"},
    {"guided_regex": "[^a]{0,100000}b"},
    {"guided_regex": "(" + "|".join(f"w{index}x*" for index in range(9000)) + "){3}"},
    {"guided_grammar": 'root ::= a a a a\na ::= b b b b\nb ::= "x"{1,5000} | "y"{1,5000} b'},
    {"guided_grammar": "root ::= " + " | ".join(["root root"] * 500 + ['"a"'])},
    {"guided_grammar": 'root ::= root? root? "a"'},
    {
        "guided_grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}" for i in range(40))
        + '\nr40 ::= "a" | ""'
    },
    _schema(_doubling(40)),
    _schema(_deep(60)),
    _schema({"type": "array", "items": _doubling(14), "minItems": 50, "maxItems": 5000}),
    _schema({"type": "string", "minLength": 100_000, "maxLength": 200_000}),
    _schema({"type": "string", "pattern": "^(([a-z]{1,64}\\.){1,64}){1,64}$"}),
    _schema({"enum": [f"value {index}" for index in range(5000)]}),
    _schema({"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(400)]}),
    _schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(800)}}),
)
CHEAP_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "[ab]{3}"},
    {"guided_grammar": 'root ::= "a" root | "b"'},
    {"response_format": {"type": "json_object"}},
    _schema({"type": "integer", "minimum": 0, "maximum": 9}),
    _schema({}),
)
