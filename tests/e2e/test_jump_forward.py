"""Tool calls of the real small model with forced text appended at once, and token by token."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from compiled_engine.engine import Engine
from compiled_engine.models.source import DEFAULT_MODEL
from compiled_engine.request import SamplingParams
from compiled_engine.tokenizer import Tokenizer
from tests.helpers import bfcl
from tests.helpers.engines import tiny_engine
from tests.helpers.grammar_runs import Answer, run_grammars, spec
from tests.helpers.questions import chat_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOOLS = 40
MAX_TOKENS = 400
MIN_SAVED = 0.15


def call_schema(tool: bfcl.Tool) -> dict[str, Any]:
    properties = {"name": {"const": tool.name}, "arguments": tool.schema}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def answers_of(engine: Engine, tokenizer: Tokenizer, schemas: list[dict[str, Any]]) -> list[Answer]:
    """Greedy answers; every one ends by itself and is an instance of its schema."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, grammar=spec("json_schema", schema))
        for schema in schemas
    ]
    asked = [f"{t.question}\nCall {t.name} as JSON." for t in bfcl.tools(NUM_TOOLS)]
    prompts = [chat_prompt(tokenizer, question) for question in asked]
    start = time.perf_counter()
    answers = run_grammars(engine, params, prompts=prompts)
    print(f"{time.perf_counter() - start:.1f} s for {len(schemas)} calls")
    for schema, answer in zip(schemas, answers, strict=True):
        text = tokenizer.decode(answer.tokens)
        assert answer.reason == "stop", (schema, text, answer.error)
        jsonschema.validate(json.loads(text), schema)
    return answers


def test_tool_calls_are_the_same_but_for_how_forced_text_is_cut() -> None:
    options: dict[str, Any] = {"max_model_len": 1024, "block_size": 16}
    engine = tiny_engine(Path(DEFAULT_MODEL), **options)
    plain = tiny_engine(Path(DEFAULT_MODEL), jump_forward="off", **options)
    tokenizer = Tokenizer.from_folder(engine.settings.folder)
    schemas = [call_schema(tool) for tool in bfcl.tools(NUM_TOOLS)]
    found = answers_of(engine, tokenizer, schemas)
    expected = answers_of(plain, tokenizer, schemas)
    num_same = 0
    for have, want in zip(found, expected, strict=True):
        if have.tokens == want.tokens:
            num_same += 1
            continue
        # Where they part, the same text is cut in another way.
        pairs = zip(have.tokens, want.tokens, strict=False)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        texts = sorted((tokenizer.token_bytes(one), tokenizer.token_bytes(other)), key=len)
        assert texts[1].startswith(texts[0]), texts
    num_tokens = sum(len(answer.tokens) for answer in found)
    num_jumped = engine.loop.stats.num_jumped_tokens
    num_steps = sum(len(set(answer.steps)) for answer in found)
    assert num_steps == num_tokens - num_jumped
    before = sum(len(answer.tokens) for answer in expected)
    print(
        f"{num_same} of {len(found)} calls have the same tokens; {num_tokens} tokens in "
        f"{num_steps} steps, {num_jumped / num_tokens:.1%} fewer; token by token {before}"
    )
    assert num_jumped / num_tokens >= MIN_SAVED
