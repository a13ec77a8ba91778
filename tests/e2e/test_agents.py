"""Agents that share a long system prompt, against a real server with the real small model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from compiled_engine.models.source import DEFAULT_MODEL
from tests.helpers.serve_process import ServeProcess

pytestmark = pytest.mark.e2e

SYSTEM = " ".join(
    f"Rule {i}: agent number {i} answers question {i * 7 % 101} about topic {i * 13 % 89} first."
    for i in range(40)
)
NUM_AGENTS = 8


async def _ask(client: AsyncOpenAI, name: str) -> tuple[float, int, int]:
    """Seconds to the first token, prompt tokens, cached tokens of one short chat."""
    start = time.perf_counter()
    stream = await client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"I am agent {name}. What shall I do?"},
        ],
        max_tokens=4,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first = 0.0
    async for chunk in stream:
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - start
        if chunk.usage:
            usage = chunk.usage
    details = usage.prompt_tokens_details
    assert details is not None
    return first, usage.prompt_tokens, details.cached_tokens or 0


async def _all(url: str) -> tuple[list[tuple[float, int, int]], tuple[float, int, int]]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        burst = await asyncio.gather(*(_ask(client, f"{i}") for i in range(NUM_AGENTS)))
        later = min([await _ask(client, f"later {i}") for i in range(3)])
        return list(burst), later


def test_burst_computes_the_system_prompt_once_and_later_ones_start_fast(tmp_path: Path) -> None:
    with ServeProcess(
        Path(DEFAULT_MODEL), tmp_path / "log", flags=("--enforce-eager", "--max-model-len", "2048")
    ) as server:
        server.wait_for("/ready", 200)
        burst, later = asyncio.run(_all(server.url))
    num_prompt = min(tokens for _, tokens, _ in burst)
    assert num_prompt > 800
    cached = sorted(tokens for *_, tokens in burst)
    # One agent computes the prompt; the others find every whole page that they share with it.
    assert cached[0] == 0
    assert all(tokens >= num_prompt - 48 for tokens in cached[1:])
    assert later[2] >= num_prompt - 48
    first_of_all = min(seconds for seconds, *_ in burst)
    assert first_of_all >= 5 * later[0]
