"""The spellings of structured output, and what becomes of a refusal by the engine."""

from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest

from compiled_engine.errors import InvalidRequestError
from compiled_engine.request import MAX_GRAMMAR_CHARS, GrammarSpec, SamplingParams
from compiled_engine.server.protocol import ChatRequest, CompletionRequest
from compiled_engine.server.validation import parse_request, validate_sampling
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.server_harness import Server, with_server

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
SCHEMA_TEXT = msgspec.json.encode(SCHEMA).decode()
TAG = {"type": "const_string", "value": "x"}
TAG_TEXT = msgspec.json.encode({"type": "structural_tag", "format": TAG}).decode()


def grammar_of(kind=ChatRequest, **fields) -> GrammarSpec | None:
    raw = msgspec.json.encode({"prompt": "a", "messages": USER, **fields})
    request, _ = parse_request(raw, kind)
    sampling = validate_sampling(request, SamplingParams(), max_n=4, max_tokens=None)
    assert bool(sampling.grammar_field) == (sampling.params.grammar is not None)
    return sampling.params.grammar


def json_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


ACCEPTED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
    ({"response_format": json_schema(SCHEMA)}, GrammarSpec("json_schema", SCHEMA_TEXT)),
    (
        {"response_format": json_schema(SCHEMA, strict=True, description="d")},
        GrammarSpec("json_schema", SCHEMA_TEXT),
    ),
    (
        {"response_format": json_schema(SCHEMA, strict=False)},
        GrammarSpec("json_schema", SCHEMA_TEXT),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        GrammarSpec("structural_tag", TAG_TEXT),
    ),
    ({"guided_json": SCHEMA}, GrammarSpec("json_schema", SCHEMA_TEXT)),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", SCHEMA_TEXT)),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a","b"]')),
    ({"guided_grammar": 'root ::= "a"'}, GrammarSpec("grammar", 'root ::= "a"')),
    ({"structural_tag": {"format": TAG}}, GrammarSpec("structural_tag", TAG_TEXT)),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", SCHEMA_TEXT)),
    ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
    ({"structured_outputs": {"regex": "a", "choice": None}}, GrammarSpec("regex", "a")),
    ({"structured_outputs": {"choice": ["x"]}}, GrammarSpec("choice", '["x"]')),
    ({"structured_outputs": {"grammar": "g"}}, GrammarSpec("grammar", "g")),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}},
        GrammarSpec("structural_tag", TAG_TEXT),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), ACCEPTED)
def test_every_spelling_becomes_a_grammar(fields, expected):
    for kind in (ChatRequest, CompletionRequest):
        assert grammar_of(kind, **fields) == expected


def test_older_structural_tags_are_converted():
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f"],
    }
    made = grammar_of(response_format=older)
    assert made is not None
    form = json.loads(made.text)["format"]
    assert form["triggers"] == ["<f"]
    assert form["tags"][0]["content"] == {"type": "json_schema", "json_schema": SCHEMA}


NOT = {"type": "string", "not": {}}
WRONG = [
    ({"response_format": {"type": "frob"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": json_schema(NOT)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema(5)}, "response_format.json_schema.schema"),
    ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_json": "not json"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": NOT}, "guided_json"),
    ({"guided_json": {"type": "frob"}}, "guided_json"),
    ({"guided_json": json.dumps({"enum": ["x" * 40] * 4000})}, "guided_json"),
    ({"guided_json": {"enum": ["x" * 40] * 4000}}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_choice": ["a"] * 1001}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"frob": 5}}, "structured_outputs.frob"),
    ({"structured_outputs": {"json_object": 3}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structural_tag": {}}, "structural_tag"),
    ({"structural_tag": "["}, "structural_tag"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(**fields)
    assert caught.value.param == param


def test_schemas_inside_structural_tags_are_checked():
    inner = {"type": "json_schema", "json_schema": NOT}
    tag = {"format": {"type": "sequence", "elements": [TAG, inner]}}
    with pytest.raises(InvalidRequestError, match=r'"not".*elements|elements.*"not"'):
        grammar_of(structural_tag=tag)


def test_a_refusal_by_the_engine_is_a_400_before_any_chunk():
    engine = FakeEngine()
    engine.fail_with, engine.refuses = "two repetitions in a row", True

    async def body(server: Server):
        for path, prompt in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            for stream in (False, True):
                for n in (1, 2):
                    request = {**prompt, "guided_regex": "a**", "stream": stream, "n": n}
                    status, answer = await server.post(path, request)
                    assert status == 400, answer
                    assert answer["error"]["message"] == "two repetitions in a row"
                    assert answer["error"]["param"] == "guided_regex"
                    assert answer["error"]["type"] == "invalid_request_error"

    with_server(body, engine=engine)


def _nested(levels: int) -> bytes:
    return b'{"items":' * levels + b"{}" + b"}" * levels


HEAVY = [
    (b'"guided_json":' + _nested(400), "guided_json"),
    (b'"guided_json":' + _nested(5000), None),
    (b'"guided_json":{"enum":[' + b",".join(b'"v%d"' % i for i in range(100_000)) + b"]}", None),
    (b'"guided_json":{"description":"' + b"x" * 20_000_000 + b'"}', "guided_json"),
    (b'"guided_json":{"$ref":"#"}', "guided_json"),
    (b'"guided_json":{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}', "guided_json"),
    (b'"guided_regex":"' + b"(" * 200_000 + b'"', "guided_regex"),
]


def test_heavy_schemas_are_refused_before_they_reach_the_engine_and_hold_up_nobody():
    """64 at once, while a stream runs."""

    async def one(server: Server, fields: bytes, param: str | None):
        raw = b'{"prompt":"a",' + fields + b"}"
        status, answer = await server.post("/v1/completions", raw)
        assert status == 400, answer
        assert param in (None, answer["error"]["param"])
        assert answer["error"]["message"]

    async def body(server: Server):
        gaps = []
        is_done = asyncio.Event()

        async def beat() -> None:
            while not is_done.is_set():
                started = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - started)

        beating = asyncio.create_task(beat())
        light = [case for case in HEAVY if len(case[0]) < 10_000_000]
        await asyncio.gather(*(one(server, *case) for case in HEAVY))
        await asyncio.gather(*(one(server, *light[i % len(light)]) for i in range(64)))
        is_done.set()
        await beating
        # The client of this test shares the loop, and its bodies are megabytes.
        assert max(gaps) < 2.0
        assert server.engine.submitted == []
        tree = {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "left": {"$ref": "#/$defs/tree"},
                        "right": {"$ref": "#/$defs/tree"},
                    },
                }
            },
            "$ref": "#/$defs/tree",
        }
        status, _ = await server.post("/v1/completions", {"prompt": "a", "guided_json": tree})
        assert status == 200

    with_server(body)
