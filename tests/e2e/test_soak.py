"""Many streams with aborts and disconnects: nothing breaks, leaks or changes an answer."""

from __future__ import annotations

import asyncio
import random
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from compiled_engine.models.source import DEFAULT_MODEL
from tests.helpers.serve_process import ServeProcess
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

NUM_STREAMS = 200
FIXED = {"prompt": "a fixed question", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class Soak:
    """`NUM_STREAMS` clients that start, read a while, and leave or finish, until a deadline."""

    def __init__(self, url: str, model: str, seconds: float) -> None:
        self.url, self.model = url, model
        self.deadline = time.monotonic() + seconds
        self.statuses: dict[int, int] = {}
        self.num_left = 0
        self.num_finished = 0

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            before = await self.fixed(session)
            watcher = asyncio.create_task(self.watch(session))
            async with asyncio.TaskGroup() as group:
                for index in range(NUM_STREAMS):
                    group.create_task(self.client(session, random.Random(index)))
            await watcher
            await self.settle(session)
            assert await self.fixed(session) == before

    async def fixed(self, session: aiohttp.ClientSession) -> str:
        body = {"model": self.model, **FIXED}
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200
            return str((await response.json())["choices"][0]["text"])

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Health stays 200 all the time."""
        while time.monotonic() < self.deadline:
            async with session.get(f"{self.url}/health") as response:
                assert response.status == 200
            await asyncio.sleep(0.5)

    async def client(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while time.monotonic() < self.deadline:
            await self.stream(session, rng)

    async def stream(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        shared = "You are a helpful agent. " * rng.choice((0, 2, 8))
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": shared + "x" * rng.randrange(1, 60),
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice((0.0, 0.8)),
            "stream": rng.random() < 0.8,
            "n": rng.choice((1, 1, 1, 2)),
        }
        leave_after = rng.choice((None, None, 0, 1, 3, 10))
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
            if response.status != 200:
                assert response.status == 429, await response.text()
                await asyncio.sleep(float(response.headers["Retry-After"]) * rng.random())
                return
            num_read = 0
            async for _ in response.content:
                num_read += 1
                if leave_after is not None and num_read > leave_after:
                    response.close()  # the client goes away in the middle
                    self.num_left += 1
                    return
            self.num_finished += 1

    async def settle(self, session: aiohttp.ClientSession) -> None:
        """Everything is back at its idle count soon after the last client left."""
        deadline = time.monotonic() + 10
        while True:
            async with session.get(f"{self.url}/metrics") as response:
                text = await response.text()
            busy = {
                name: value
                for name, value in re.findall(r"^(\S+?)(?:\{[^}]*\})? ([0-9.e+]+)$", text, re.M)
                if name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
                and float(value)
            }
            active = re.search(r'^compiled_engine:pages\{.*state="active".*\} (\S+)$', text, re.M)
            assert active is not None, text
            if not busy and float(active[1]) == 0:
                return
            assert time.monotonic() < deadline, (busy, active[0])
            await asyncio.sleep(0.2)


def _soak(model: Path, name: str, log: Path, seconds: float, flags: tuple[str, ...]) -> Soak:
    with ServeProcess(model, log, flags=flags) as server:
        server.wait_for("/ready", 200)
        soak = Soak(server.url, name, seconds)
        asyncio.run(soak.run())
        assert server.stop() == 0
    assert set(soak.statuses) <= {200, 429}
    assert soak.num_left > NUM_STREAMS / 4
    assert soak.num_finished > NUM_STREAMS / 4
    return soak


def test_soak_tiny_model(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    _soak(model, str(model), tmp_path / "log", 20, ("--enforce-eager", "--max-num-seqs", "32"))


@pytest.mark.slow
def test_soak_small_pool_of_smollm2(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "32", "--max-model-len", "1024", "--max-total-tokens", "4096")
    _soak(Path(DEFAULT_MODEL), DEFAULT_MODEL, tmp_path / "log", 60, flags)
