"""Tool calls against a real server with the real small model, whose template knows no tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from compiled_engine.models.source import DEFAULT_MODEL
from tests.helpers.serve_process import ServeProcess

pytestmark = pytest.mark.e2e

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}


async def _ask(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        fields = {
            "model": DEFAULT_MODEL,
            "messages": [{"role": "user", "content": "Write a long poem about the sea."}],
            "tools": [WEATHER, NOW],
            "temperature": 0.0,
            "max_tokens": 200,
        }
        named = {"type": "function", "function": {"name": "get_weather"}}
        answer = await client.chat.completions.create(**fields, tool_choice=named)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"city", "days"}
        assert 1 <= arguments["days"] <= 9
        assert answer.choices[0].finish_reason == "tool_calls"
        parts, names = [], []
        stream = await client.chat.completions.create(**fields, tool_choice=named, stream=True)
        async for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                names += [part.function.name] if part.function.name else []
                parts.append(part.function.arguments)
        assert names == ["get_weather"]
        assert json.loads("".join(parts)) == arguments
        forced = await client.chat.completions.create(
            **fields, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = forced.choices[0].message.tool_calls
        assert call.function.name in ("get_weather", "now")
        free = await client.chat.completions.create(**fields, tool_choice="none")
        assert free.choices[0].message.tool_calls is None
        assert free.choices[0].message.content


def test_named_and_required_calls_are_enforced(tmp_path: Path) -> None:
    flags = ("--enforce-eager", "--max-model-len", "2048")
    with ServeProcess(Path(DEFAULT_MODEL), tmp_path / "log", flags=flags) as server:
        server.wait_for("/ready", 200)
        asyncio.run(_ask(server.url))
