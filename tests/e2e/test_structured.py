"""Structured output of the real small model: every answer validates, and others pay little."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compiled_engine.engine import Engine
from compiled_engine.models.source import DEFAULT_MODEL
from compiled_engine.request import SamplingParams
from compiled_engine.server.schema_check import check_schema
from compiled_engine.tokenizer import Tokenizer
from tests.helpers import bfcl
from tests.helpers.engines import tiny_engine
from tests.helpers.grammar_runs import Answer, run_grammars, spec
from tests.helpers.questions import chat_prompt
from tests.helpers.schemas import random_schema

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Generated ones, and as many parameters of tools.
NUM_SCHEMAS = int(os.environ.get("COMPILED_ENGINE_TEST_SCHEMAS", "100"))
BATCH = 20
MAX_TOKENS = 600
NUM_ROWS, NUM_TOKENS = 16, 48
MIN_RATIO = 0.85
NUM_REPEATS = 5


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(Path(DEFAULT_MODEL), max_model_len=1024, block_size=16)


@pytest.fixture(scope="module")
def tokenizer(engine: Engine) -> Tokenizer:
    return Tokenizer.from_folder(engine.settings.folder)


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, BATCH))
def test_answers_validate_against_their_schemas(
    engine: Engine, tokenizer: Tokenizer, first: int
) -> None:
    schemas = [random_schema(seed) for seed in range(first, min(first + BATCH, NUM_SCHEMAS))]
    asked = [f"Fill in this JSON: {', '.join(schema['properties'])}" for schema in schemas]
    _check_answers(engine, tokenizer, schemas, asked, first)


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, BATCH))
def test_arguments_validate_against_the_schemas_of_tools(
    engine: Engine, tokenizer: Tokenizer, first: int
) -> None:
    chosen = bfcl.tools(NUM_SCHEMAS)[first : first + BATCH]
    asked = [f"{tool.question}\nCall {tool.name} with JSON arguments." for tool in chosen]
    _check_answers(engine, tokenizer, [tool.schema for tool in chosen], asked, first)


def _check_answers(
    engine: Engine,
    tokenizer: Tokenizer,
    schemas: list[dict[str, Any]],
    asked: list[str],
    seed: int,
) -> None:
    """Every answer ends by itself and is an instance of its schema."""
    for schema in schemas:
        check_schema(schema, "schema")
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=seed + i,
            max_tokens=MAX_TOKENS,
            grammar=spec("json_schema", schema),
        )
        for i, schema in enumerate(schemas)
    ]
    prompts = [chat_prompt(tokenizer, question) for question in asked]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema, answer in zip(schemas, run_grammars(engine, params, prompts=prompts), strict=True):
        assert answer.error is None, (schema, answer.error)
        text = tokenizer.decode(answer.tokens)
        assert answer.reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema, format_checker=checker)


def _tokens_per_s(engine: Engine, params: list[SamplingParams], prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    answers: list[Answer] = run_grammars(engine, params, prompts=prompts)
    taken = time.perf_counter() - start
    assert all(len(answer.tokens) == NUM_TOKENS for answer in answers)
    return NUM_ROWS * NUM_TOKENS / taken


def test_half_the_rows_with_grammars_keep_most_of_the_throughput(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    long = {"type": "string", "minLength": 400, "maxLength": 800}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": long}}
    schema["required"] = ["a", "b"]
    free = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    bound = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, grammar=spec("json_schema", schema)
    )
    prompts = [chat_prompt(tokenizer, f"Write about the number {i}.") for i in range(NUM_ROWS)]
    kinds = {"mixed": [bound, free] * (NUM_ROWS // 2), "plain": [free] * NUM_ROWS}
    _tokens_per_s(engine, kinds["mixed"], prompts)
    ratios = []
    # By turns, in either order: a machine that slows down meanwhile slows both.
    for repeat in range(NUM_REPEATS):
        order = ("plain", "mixed") if repeat % 2 else ("mixed", "plain")
        rates = {kind: _tokens_per_s(engine, kinds[kind], prompts) for kind in order}
        ratios.append(rates["mixed"] / rates["plain"])
    ratio = statistics.median(ratios)
    shown = ", ".join(f"{each:.3f}" for each in sorted(ratios))
    print(f"throughput with 8 of 16 rows under a grammar: {ratio:.3f} of that without ({shown})")
    assert ratio >= MIN_RATIO
