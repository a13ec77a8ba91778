"""Conversations of coding agents: a long first turn, short later ones, pauses for tool calls.

All share a system prompt and the descriptions of the tools. Each turn sends the whole conversation
again, the model's answers in it, so that all but the new part can come from the prefix cache; what
came is in the server's own usage. Between two turns the client waits, as a tool would take its
time. A real server and one aiohttp client for each conversation; tokens are seeded random ids, so
that lengths are exact, and answers go back as the ids the server gave.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from compiled_engine.bench.stats import RequestRecord, percentile
from compiled_engine.config import DEFAULT_MODEL
from perf.model_shapes import SHAPES
from perf.rows import Measured, Outcome
from perf.servers import ServerProcess
from perf.start import prepared

NAME = "agentic"
TIMEOUT_S = 600.0
VOCAB_SIZE = 40_000
SEED = 0
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What conversations are like; lengths in tokens.

    Attributes:
        shared: system prompt and tools, equal in all.
        first: own part of the first turn, as a task with files to read.
        later: what each later turn adds, as a tool's result.
        turns: of a conversation.
        output: of each answer.
        pause_s: between an answer and the next turn.
        pairs: (conversations, how many at the same time).
    """

    shared: int
    first: int
    later: int
    turns: int
    output: int
    pause_s: float
    pairs: tuple[tuple[int, int], ...]


CPU_SIZES = Sizes(
    shared=512,
    first=1024,
    later=96,
    turns=6,
    output=48,
    pause_s=0.3,
    pairs=((2, 1), (4, 2), (8, 4)),
)
# Source: the agentic workload of TokenSpeed's own benchmarks, on one GPU: first turns of about
# 50 000 tokens, later ones of about 800, 10 turns, 500 output tokens.
GPU_SIZES = Sizes(
    shared=4000,
    first=46_000,
    later=800,
    turns=10,
    output=500,
    pause_s=2.0,
    pairs=((4, 1), (8, 2), (8, 4)),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `perf run` was told.

    Attributes:
        model: folder, GGUF file, id, or the name of a shape of `model_shapes`, which takes the
            sizes for a GPU.
    """

    model: str = DEFAULT_MODEL


@dataclass
class Turn:
    """One turn of one conversation; `index` counts from 0."""

    index: int
    record: RequestRecord
    answer: list[int] = field(default_factory=list)


def run(options: Options, note: Note) -> Outcome:
    """Measures; raises SystemExit if the server does not start or a request fails."""
    sizes = GPU_SIZES if options.model in SHAPES else CPU_SIZES
    longest = sizes.shared + sizes.first + sizes.turns * (sizes.later + sizes.output)
    with tempfile.TemporaryDirectory() as place:
        model, flags = prepared(options.model, Path(place))
        command = [sys.executable, "-m", "compiled_engine.cli", "serve", model]
        command += ["--port", "{port}", *flags]
        if sizes is GPU_SIZES:
            command += ["--max-model-len", str(longest + 16)]
        measured = []
        note("starting the server")
        with ServerProcess("ours", command, ready_path="/ready") as server:
            small = replace(sizes, first=32, turns=2, pause_s=0.0)
            asyncio.run(converse(server.url, small, 1, 1, seed=SEED))
            for number, at_once in sizes.pairs:
                begin = time.perf_counter()
                turns = asyncio.run(
                    converse(server.url, sizes, number, at_once, seed=SEED + at_once)
                )
                seconds = time.perf_counter() - begin
                measured += rows(turns, at_once, seconds)
                note(f"{number} conversations, {at_once} at once: {seconds:.1f} s")
    return Outcome(measured=[replace(row, model=options.model) for row in measured], seed=SEED)


async def converse(
    url: str, sizes: Sizes, num_conversations: int, at_once: int, *, seed: int
) -> list[Turn]:
    """Holds the conversations, so many at a time; the turns of all.

    Raises:
        SystemExit: a request failed.
    """
    shared = _tokens(random.Random(SEED), sizes.shared)
    places = asyncio.Semaphore(at_once)
    turns: list[Turn] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def hold(number: int) -> None:
            drawn = random.Random(f"{seed} {number}")
            prompt = shared + _tokens(drawn, sizes.first)
            async with places:
                for index in range(sizes.turns):
                    if index:
                        await asyncio.sleep(sizes.pause_s)
                        prompt = prompt + _tokens(drawn, sizes.later)
                    turn = await ask(session, url, prompt, sizes.output, index)
                    prompt = prompt + turn.answer
                    turns.append(turn)

        async with asyncio.TaskGroup() as group:
            for number in range(num_conversations):
                group.create_task(hold(number))
    return turns


def _tokens(drawn: random.Random, count: int) -> list[int]:
    return [drawn.randrange(10, VOCAB_SIZE) for _ in range(count)]


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], output_len: int, index: int
) -> Turn:
    """One streamed turn.

    Raises:
        SystemExit: the server refused it, or gave another number of tokens.
    """
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    turn = Turn(index, RequestRecord(sent_s=time.perf_counter()))
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                take(json.loads(line[6:]), turn, time.perf_counter())
    turn.record.end_s = time.perf_counter()
    if len(turn.answer) != output_len:
        raise SystemExit(f"{len(turn.answer)} tokens instead of {output_len}")
    return turn


def take(chunk: dict[str, Any], turn: Turn, now_s: float) -> None:
    """Takes one chunk of a turn's stream."""
    if "error" in chunk:
        raise SystemExit(f"the server failed: {chunk['error']}")
    record = turn.record
    for choice in chunk["choices"]:
        ids = choice.get("token_ids") or []
        if ids:
            record.chunk_times_s.append(now_s)
            turn.answer += ids
    usage = chunk.get("usage")
    if usage:
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
        record.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def rows(turns: Sequence[Turn], at_once: int, seconds: float) -> list[Measured]:
    """What one pair gave: times of first and later turns apart, rates, and the share cached."""

    def row(metric: str, unit: str, values: Sequence[float], case: str = "") -> Measured:
        return Measured(metric=metric, unit=unit, batch=at_once, case=case, values=values)

    measured = []
    for case, records in (
        ("first turn", [t.record for t in turns if t.index == 0]),
        ("later turns", [t.record for t in turns if t.index > 0]),
    ):
        ttfts = [ttft for r in records if (ttft := r.ttft_ms) is not None]
        measured.append(row("agentic_ttft_ms", "ms", ttfts, case))
        measured.append(row("agentic_ttft_p95_ms", "ms", [percentile(ttfts, 95)], case))
    records = [turn.record for turn in turns]
    later = [turn.record for turn in turns if turn.index > 0]
    tpots = [tpot for r in records if (tpot := r.tpot_ms) is not None]
    cached = sum(r.num_cached_tokens for r in later) / sum(r.num_prompt_tokens for r in later)
    total = sum(r.num_prompt_tokens + r.num_output_tokens for r in records)
    output = sum(r.num_output_tokens for r in records)
    mean_tpot = sum(tpots) / len(tpots)
    return [
        *measured,
        row("agentic_tpot_ms", "ms", tpots),
        row("agentic_user_tok_s", "tokens/s", [1e3 / mean_tpot]),
        row("agentic_total_tok_s", "tokens/s", [total / seconds]),
        row("agentic_output_tok_s", "tokens/s", [output / seconds]),
        row("agentic_cached_share", "ratio", [cached]),
        row("agentic_s", "s", [seconds]),
    ]
