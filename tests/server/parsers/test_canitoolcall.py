"""Recorded outputs of real model families, from the installed package `canitoolcall`.

Every fixture of a format we parse is parsed under every split. Calls that were cut are handed on in
pieces with finish_reason "length", as OpenAI does; what the fixtures judge is therefore the calls
that ended.
"""

from __future__ import annotations

import pytest
from canitoolcall.checks import compare, expected_as_result
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import ParsedToolCall, ParseResult, Status

from tests.helpers.parsed import Parsed, parse_every_split

FAMILIES = load_families()
NUM_FIXTURES = 342
# Formats without a parser here: a change of this list is a change of what we support.
UNSUPPORTED_MODELS = (
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-ai/DeepSeek-V4.1-Flash",
    "moonshotai/Kimi-K3",
)
UNSUPPORTED_FAMILIES = ("gemma4",)
PARSERS = {
    "qwen3-hermes": ("hermes", "qwen3"),
    "qwen3-xml": ("qwen3_coder", "qwen3"),
    "glm": ("glm45", "glm45"),
    "gpt-oss": ("gpt_oss", "gpt_oss"),
    "kimi": ("kimi_k2", "kimi_k2"),
}
# The list of calls was cut in its second call; the first one is complete and is kept, as the
# fixtures of the other families ask for.
KEPT_FIRST_CALL = "llama/l4-truncated-missing-close-bracket"


def parsers_of(fixture: Fixture) -> tuple[str, str]:
    model = fixture.reference_model
    if fixture.family == "mistral":
        return "mistral", "base" if "x-think-text" in fixture.tags else "mistral"
    if fixture.family == "llama":
        return ("pythonic" if "Llama-4" in model else "llama3_json"), "none"
    if fixture.family == "deepseek":
        return ("deepseek_v31" if model.endswith("V3.1") else "deepseek_v3"), "deepseek_r1"
    return PARSERS[fixture.family]


def supported() -> list[Fixture]:
    return [
        fixture
        for fixture in load_fixtures()
        if fixture.family not in UNSUPPORTED_FAMILIES
        and fixture.reference_model not in UNSUPPORTED_MODELS
    ]


def parsed(fixture: Fixture) -> Parsed:
    tools, reasoning = parsers_of(fixture)
    model = FAMILIES[fixture.family].reference_for(fixture.reference_model)
    prompt = fixture.generation_prompt or (model and model.default_generation_prompt) or ""
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools
    }
    return parse_every_split(fixture.raw_output, tools, reasoning, prompt=prompt, schemas=schemas)


def test_the_package_holds_what_we_count_on():
    assert len(supported()) == NUM_FIXTURES


@pytest.mark.parametrize("fixture", supported(), ids=lambda fixture: fixture.id)
def test_recorded_output_is_parsed_as_expected(fixture):
    found = parsed(fixture)
    calls = tuple(
        ParsedToolCall(call.name, call.arguments) for call in found.calls if call.is_ended
    )
    if fixture.expected is None:
        assert not calls or fixture.id == KEPT_FIRST_CALL
        return
    result = ParseResult(found.content or None, found.reasoning or None, calls)
    # White space around the answer may differ, nothing else.
    assert compare(expected_as_result(fixture.expected), result) in (Status.PASS, Status.SOFT_PASS)
