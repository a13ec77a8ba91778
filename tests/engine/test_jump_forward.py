"""Text that a grammar forces is appended at once: the same answers in fewer steps."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from compiled_engine.engine import Engine
from compiled_engine.faults import Fault
from compiled_engine.jump_forward import MIN_FORCED, TextEncoder
from compiled_engine.request import GrammarSpec, Request, SamplingParams, ThinkingBudget
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import assert_idle, tiny_engine
from tests.helpers.grammar_runs import Answer, run_grammars, spec
from tests.helpers.tiny_model import write_tiny_model

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_current_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "location_name": {"type": "string", "pattern": "^[a-z]{0,6}$"},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location_name", "temperature_unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
# Forced at the very beginning, in the middle and up to the end.
WRAPPED = 'Answer: ([0-9]{3}, which is all|[a-z]{2} and the rest of it) \\.\\.\\.done'


def asked(grammar: GrammarSpec | None, seed: int = 0, **options) -> SamplingParams:
    defaults = {"temperature": 1.0, "max_tokens": 220, "seed": seed}
    return SamplingParams(**{**defaults, **options}, grammar=grammar)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def plain(folder) -> Engine:
    return tiny_engine(folder, enable_jump_forward=False)


@pytest.fixture(scope="module")
def first(folder) -> Engine:
    return tiny_engine(folder)


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request, first) -> Engine:
    return engine_like(first, overlap_schedule=request.param)


def engine_like(first: Engine, **options) -> Engine:
    """Another engine, which shares the compiled grammars of `first`."""
    made = tiny_engine(first.settings.folder, **options)
    made.loop._grammars._service = first.loop._grammars._service
    return made


def run_pair(
    engine: Engine, plain: Engine, params: list[SamplingParams], **options
) -> tuple[list[Answer], int, int]:
    """Answers, tokens that took no step, and steps saved; the same ids as token by token."""
    stats = engine.loop.stats
    before = stats.num_jumped_tokens, stats.num_steps, plain.loop.stats.num_steps
    answers = run_grammars(engine, params, **options)
    expected = run_grammars(plain, params, **options)
    for found, want in zip(answers, expected, strict=True):
        assert (found.tokens, found.reason) == (want.tokens, want.reason)
    steps = stats.num_steps - before[1], plain.loop.stats.num_steps - before[2]
    return answers, stats.num_jumped_tokens - before[0], steps[1] - steps[0]


def test_same_answers_in_fewer_steps(engine, plain, tokenizer):
    answers, num_jumped, num_saved = run_pair(engine, plain, [asked(spec("json_schema", CALL))])
    answer = json.loads(tokenizer.decode(answers[0].tokens))
    jsonschema.validate(answer, CALL)
    # The two quotes behind names stand for the last tokens, which are sampled.
    assert num_jumped > len("get_current_weather location_name temperature_unit")
    # Each token that was not sampled is a step less.
    assert num_saved == pytest.approx(num_jumped, abs=4)
    assert plain.loop.stats.num_jumped_tokens == 0
