"""An asyncio load generator against any server with OpenAI's `/v1/completions`. No torch.

Prompts are lists of token ids, so their lengths are exact. Owns arrivals and timing; what the
numbers mean is in `stats`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec

from compiled_engine.bench.load_config import FIRST_TOKEN_ID, LoadConfig
from compiled_engine.bench.stats import RequestRecord
from compiled_engine.errors import ConfigError

_MAX_ERROR_CHARS = 200


class _Chunk(msgspec.Struct):
    """What is looked at in a chunk of a stream."""

    choices: list[msgspec.Raw] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


def make_prompts(config: LoadConfig) -> list[list[int]]:
    """Token ids of every prompt: the shared prefix, then random ids of its own."""
    random_ids = random.Random(config.seed)

    def draw(count: int) -> list[int]:
        return [random_ids.randrange(FIRST_TOKEN_ID, config.vocab_size) for _ in range(count)]

    prefix = draw(config.shared_prefix_len)
    own = config.input_len - config.shared_prefix_len
    return [prefix + draw(own) for _ in range(config.num_requests)]


async def run_load(
    config: LoadConfig, *, on_done: Callable[[RequestRecord], None] | None = None
) -> list[RequestRecord]:
    """Sends every request and waits for its answer; a failure is recorded, never raised.

    Raises:
        ConfigError: the server cannot be reached at all or names no model.
    """
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(total=config.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        model = config.model or await _first_model(session, config.url)
        places = asyncio.Semaphore(config.concurrency)
        records: list[RequestRecord] = []

        async def send(prompt: list[int]) -> None:
            try:
                record = await _send(session, config, model, prompt)
            finally:
                places.release()
            records.append(record)
            if on_done is not None:
                on_done(record)

        async with asyncio.TaskGroup() as group:
            async for prompt in _arrivals(config):
                await places.acquire()
                group.create_task(send(prompt))
    return records


async def _arrivals(config: LoadConfig) -> AsyncIterator[list[int]]:
    """Prompts at the times they arrive; a late one does not move those after it."""
    gaps = random.Random(config.seed + 1)
    due = time.perf_counter()
    for prompt in make_prompts(config):
        yield prompt
        if config.request_rate:
            due += gaps.expovariate(config.request_rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConfigError(f"{url} cannot be reached: {error}", param="url") from error
    if response.status != 200:
        raise ConfigError(
            f"{url}/v1/models answered {response.status}: {text[:_MAX_ERROR_CHARS]}", param="url"
        )
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models names no model", param="url") from error


async def _send(
    session: aiohttp.ClientSession, config: LoadConfig, model: str, prompt: list[int]
) -> RequestRecord:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": config.output_len,
        "temperature": config.temperature,
        "ignore_eos": True,
        "stream": config.stream,
    }
    if config.stream:
        body["stream_options"] = {"include_usage": True}
    record = RequestRecord(sent_s=time.perf_counter())
    try:
        async with session.post(f"{config.url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = await response.text()
                record.error = f"HTTP {response.status}: {text[:_MAX_ERROR_CHARS]}"
            elif config.stream:
                await _read_stream(response, record)
            else:
                answer = await response.json()
                record.chunk_times_s.append(time.perf_counter())
                _take_usage(record, answer.get("usage"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
        record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    record.end_s = time.perf_counter()
    if record.error is None and record.num_output_tokens != config.output_len:
        record.error = f"{record.num_output_tokens} tokens instead of {config.output_len}"
    return record


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    """Notes the arrival of each chunk with a choice; the server sends none without a token."""
    rest = b""
    async for data in response.content.iter_any():
        now_s = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if _take_line(line.strip().removeprefix(b"data: "), record, now_s):
                return
    record.error = "the stream broke off before [DONE]"


def _take_line(line: bytes, record: RequestRecord, now_s: float) -> bool:
    """Takes one line of a stream, without its prefix; returns whether it was the last one."""
    if not line:
        return False
    if line == b"[DONE]":
        return True
    chunk = _CHUNK.decode(line)
    if chunk.error is not None:
        shown = chunk.error.get("message") if isinstance(chunk.error, dict) else None
        record.error = str(shown or chunk.error)[:_MAX_ERROR_CHARS]
        return True
    if chunk.choices:
        record.chunk_times_s.append(now_s)
    _take_usage(record, chunk.usage)
    return False


def _take_usage(record: RequestRecord, usage: dict[str, Any] | None) -> None:
    if usage is None:
        return
    record.num_prompt_tokens = usage["prompt_tokens"]
    record.num_output_tokens = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    record.num_cached_tokens = details.get("cached_tokens") or 0
