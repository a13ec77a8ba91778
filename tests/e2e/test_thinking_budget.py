"""Thinking budgets against a real server with the real small model, which is made to think."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from compiled_engine.models.source import DEFAULT_MODEL
from tests.helpers.serve_process import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BUDGET = 12
OPENED = [
    {"role": "user", "content": "Which is larger, 9.8 or 9.11?"},
    {"role": "assistant", "content": "<think>"},
]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
SCHEMA = {
    "type": "object",
    "properties": {"larger": {"type": "number"}},
    "required": ["larger"],
    "additionalProperties": False,
}


class Answer:
    """What one call gave: both texts, why it ended, its tokens and those of reasoning."""

    def __init__(self, message: Any, reason: str, usage: Any) -> None:
        self.reasoning = getattr(message, "reasoning_content", None) or ""
        self.content = message.content or ""
        self.reason = reason
        self.num_tokens = usage.completion_tokens
        self.num_reasoning = usage.completion_tokens_details.reasoning_tokens


async def ask(client: AsyncOpenAI, budget: int | None, **fields: Any) -> Answer:
    """One greedy answer, asked for in one piece and as a stream, which must be alike."""
    extra: dict[str, Any] = {**CONTINUED, "ignore_eos": "response_format" not in fields}
    if budget is not None:
        extra["thinking_token_budget"] = budget
    given: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": OPENED,
        "temperature": 0.0,
        "max_tokens": 60,
        "extra_body": extra,
        **fields,
    }
    whole = await client.chat.completions.create(**given)
    answer = Answer(whole.choices[0].message, whole.choices[0].finish_reason, whole.usage)
    stream = await client.chat.completions.create(**given, stream=True)
    reasoning, content = [], []
    async for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning.append(getattr(delta, "reasoning_content", None) or "")
        content.append(delta.content or "")
    assert ("".join(reasoning), "".join(content)) == (answer.reasoning, answer.content)
    return answer


async def check(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        free = await ask(client, None)
        assert (free.content, free.reason) == ("", "length")
        assert free.num_reasoning == free.num_tokens == 60
        bound = await ask(client, BUDGET)
        assert bound.reasoning
        assert free.reasoning.startswith(bound.reasoning)
        assert len(bound.reasoning) < len(free.reasoning)
        assert bound.content.strip()
        assert BUDGET <= bound.num_reasoning < BUDGET + 8  # and the tokens of the marker
        none = await ask(client, 0)
        assert none.reasoning == ""
        assert none.content.strip()
        json_schema = {"name": "larger", "schema": SCHEMA, "strict": True}
        shaped = await ask(
            client, BUDGET, response_format={"type": "json_schema", "json_schema": json_schema}
        )
        assert shaped.reasoning == bound.reasoning
        assert isinstance(json.loads(shaped.content)["larger"], int | float)
        assert shaped.reason == "stop"
        together = await asyncio.gather(*(ask(client, n) for n in (0, 3, BUDGET, 40)))
        assert together[2].content == bound.content
        texts = [answer.reasoning for answer in together]
        assert all(later.startswith(text) for text, later in itertools.pairwise(texts))


def test_budgets_end_the_thinking_of_the_real_small_model(tmp_path: Path) -> None:
    flags = ("--enforce-eager", "--max-model-len", "1024", "--reasoning-parser", "qwen3")
    with ServeProcess(Path(DEFAULT_MODEL), tmp_path / "log", flags=flags) as server:
        server.wait_for("/ready", 200)
        asyncio.run(check(server.url))
