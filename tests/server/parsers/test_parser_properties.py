"""Random texts: every parser gives one result for every split, and loses no text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_engine.server.parsers.json_stream import JsonValue
from compiled_engine.server.parsers.registry import TOOL_FORMATS
from tests.helpers.parsed import gathered, parse, strict_json

SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}
# Pieces of all formats: random texts of them come close to calls again and again.
FRAGMENTS = [
    *(marker for entry in TOOL_FORMATS.values() for marker in entry.markers),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "</thi", "<tool", "\n", " ", "x", "é😀"),
    *("<function=f>", "<function=", "</function>", "<parameter=a>", "<parameter=s>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    *('{"name": "f", "arguments": {', '"a": 1', '"s": "', '"}', "}", "}}", "{", "[", "]", ","),
    *("f", "functions.f:0", "function", "```json\n", "to=functions.f ", "assistant", "analysis"),
    *("final", "[f(a=1", "s='x'", ")", '\\"', "\\u00e9", "```", '"', "1.5", "null", ";", "("),
]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=14).map(
    "".join
)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("reasoning", ["none", "qwen3", "kimi_k2", "mistral"])
@pytest.mark.parametrize("tools", [*TOOL_FORMATS, "none"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_any_split_gives_one_result(tools, reasoning, text, cuts):
    if tools == reasoning == "none":
        return
    whole = parse([text], tools, reasoning, schemas=SCHEMAS)
    assert parse(cut(text, cuts), tools, reasoning, schemas=SCHEMAS) == whole
    assert parse(list(text), tools, reasoning, schemas=SCHEMAS) == whole
    # Calls that ended hold JSON.
    assert all(name for name, _ in gathered(whole).ended)


@pytest.mark.parametrize("tools", [name for name in TOOL_FORMATS if name != "gpt_oss"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abc \n<>[]{}\"'|", max_size=60))
def test_text_without_markers_comes_out_whole(tools, text):
    found = gathered(parse(list(text), tools, schemas=SCHEMAS))
    assert (found.content, found.calls) == (text, [])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON, cuts=st.lists(st.integers(0, 10_000), max_size=6), ascii_only=st.booleans())
def test_json_scanner_hands_valid_json_on_unchanged(value, cuts, ascii_only):
    text = json.dumps([value], ensure_ascii=ascii_only)
    scanner = JsonValue()
    out = []
    for piece in cut(text, cuts):
        assert scanner.feed(piece, 0) == len(piece)
        out.append(scanner.take())
    assert scanner.is_done
    assert "".join(out) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet='{}[]",:\\ntrue1-. x\n', max_size=30))
def test_json_scanner_ends_in_valid_json_or_breaks(text):
    scanner = JsonValue()
    scanner.feed(text, 0)
    assert not (scanner.is_done and scanner.is_broken)
    if scanner.is_done:
        strict_json(scanner.take())
