"""Normal streams beside attackers of every kind: none changes a token or stalls, nothing leaks.

A form of 30 seconds is part of the default tier; the long one with 64 normal streams, of
`COMPILED_ENGINE_TEST_HOSTILE_S` seconds (600 if that is not set), is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.helpers.hostile_attack import AttackPlan, AttackReport, attack
from tests.helpers.hostile_bodies import MODEL_NAME
from tests.helpers.hostile_schemathesis import attack_by_schemathesis
from tests.helpers.hostile_streams import Gaps, NormalStreams, p95
from tests.helpers.serve_process import ServeProcess
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

ATTACKERS = (attack, attack_by_schemathesis)
LONG_S = float(os.environ.get("COMPILED_ENGINE_TEST_HOSTILE_S", "600"))
OPERATOR_KEY, ATTACKER_KEY = "operator-key", "attacker-key"
FIXED = {"prompt": "a fixed question", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "compiled_engine:pages")
IDLE += ("compiled_engine:unfinished_requests", "compiled_engine:queued_prompt_tokens")
USUAL_FILE_LIMIT = 1024
MAX_GAP_GROWTH_S = 1.0
SETTLE_S = 20.0


@dataclass(frozen=True)
class Form:
    """Size of a run.

    Attributes:
        seconds: that attackers go on.
        num_streams: normal ones at once.
        num_attacker_requests: unfinished sequences that the attackers' key may have.
        max_growth_bytes: of each process's resident memory, from the middle of the run on. Large
            bodies and the cache of grammars are at their full size by then, unless it is short.
    """

    seconds: float
    num_streams: int
    num_attacker_requests: int
    max_growth_bytes: int


class HostileRun:
    """One run against a served model; `check` says what must hold."""

    def __init__(self, server: ServeProcess, form: Form) -> None:
        self.server, self.form = server, form
        self.streams = NormalStreams(server.url, OPERATOR_KEY, form.num_streams, max_tokens=60)
        self.processes = [psutil.Process(server.process.pid), server.engine()]
        self.resident: list[tuple[int, ...]] = []
        self.quiet, self.hostile = Gaps(), Gaps()
        self.report = AttackReport({}, [])
        self.log_start = 0

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self.quiet = await self.streams.learn(session)
            before = await self.fixed(session)
            plan = AttackPlan(self.server.port, ATTACKER_KEY, self.form.seconds)
            context = multiprocessing.get_context("spawn")
            ended = asyncio.Event()
            with ProcessPoolExecutor(len(ATTACKERS), context) as pool:
                loop = asyncio.get_running_loop()
                attacking = asyncio.gather(
                    *(loop.run_in_executor(pool, attacker, plan) for attacker in ATTACKERS)
                )
                attacking.add_done_callback(lambda _: ended.set())
                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(self.streams.run(session, ended))
                    group.create_task(self.watch(session, ended))
                self.hostile = await reading
                for report in await attacking:
                    self.report.statuses.update(report.statuses)
                    self.report.faults.extend(report.faults)
            await self.settle(session)
            self.note_memory()
            assert await self.fixed(session) == before

    async def fixed(self, session: aiohttp.ClientSession) -> str:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        url = f"{self.server.url}/v1/completions"
        async with session.post(url, json=FIXED, headers=headers) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["text"])

    async def watch(self, session: aiohttp.ClientSession, ended: asyncio.Event) -> None:
        """Health stays 200 all the time; takes memory down."""
        while not ended.is_set():
            async with session.get(f"{self.server.url}/health") as response:
                assert response.status == 200, await response.text()
            self.note_memory()
            await asyncio.sleep(0.5)

    def note_memory(self) -> None:
        self.resident.append(tuple(process.memory_info().rss for process in self.processes))

    async def settle(self, session: aiohttp.ClientSession) -> None:
        """Rows, pages and permits are back at their idle count soon after the last client left."""
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            async with session.get(f"{self.server.url}/metrics") as response:
                text = await response.text()
            values = re.findall(r"^(\S+?)(\{[^}]*\})? ([0-9.e+]+)$", text, re.M)
            busy = [
                (name, labels, value)
                for name, labels, value in values
                if (name in IDLE and float(value))
                and (name != "compiled_engine:pages" or 'state="active"' in labels)
            ]
            assert len([name for name, _, _ in values if name in IDLE]) >= len(IDLE), text
            if not busy:
                return
            assert asyncio.get_running_loop().time() < deadline, busy
            await asyncio.sleep(0.2)

    def growth(self) -> list[int]:
        """Resident memory at the end less that after half the run, bytes, by process."""
        middle = self.resident[len(self.resident) // 2]
        return [last - first for first, last in zip(middle, self.resident[-1], strict=True)]

    def figures(self) -> str:
        """What was sent and seen, for people."""
        lines = [f"{kind}: {by_status}" for kind, by_status in sorted(self.report.statuses.items())]
        for name, gaps in (("quiet", self.quiet), ("hostile", self.hostile)):
            lines.append(
                f"{name}: gaps p95 {p95(gaps.between) * 1e3:.1f} ms, largest "
                f"{max(gaps.between) * 1e3:.0f} ms; first event p95 {p95(gaps.first) * 1e3:.0f} ms"
            )
        memory = [[round(part / 2**20) for part in point] for point in self.resident]
        lines.append(f"{self.streams.num_finished} normal streams; resident MiB {memory[::8]}")
        lines.append(f"memory growth MiB {[round(part / 2**20, 1) for part in self.growth()]}")
        return "\n".join(lines)

    def check(self) -> None:
        assert not self.streams.differences, self.streams.differences[:5]
        assert not self.report.faults, "\n".join(self.report.faults[:20])
        assert p95(self.hostile.between) < p95(self.quiet.between) + MAX_GAP_GROWTH_S
        assert all(process.is_running() for process in self.processes)
        assert self.server.engine().pid == self.processes[1].pid
        assert max(self.growth()) < self.form.max_growth_bytes, self.resident
        assert "Traceback" not in self.server.log
        assert "starting the engine process again" not in self.server.log


@contextlib.contextmanager
def _usual_file_limit() -> Iterator[None]:
    """Processes started here may open as few files as most systems allow at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(USUAL_FILE_LIMIT, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _attack(tmp_path: Path, form: Form) -> HostileRun:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    keys = tmp_path / "keys"
    keys.write_text(f"attacker {ATTACKER_KEY}\n")
    num_rows = form.num_streams + form.num_attacker_requests
    flags = ("--enforce-eager", "--max-num-seqs", str(num_rows), "--api-key", OPERATOR_KEY)
    flags += ("--api-key-file", str(keys), "--chunked-prefill-size", "64")
    flags += ("--max-requests-per-key", str(form.num_attacker_requests))
    flags += ("--served-model-name", MODEL_NAME)
    with _usual_file_limit():
        server = ServeProcess(model, tmp_path / "log", flags=flags)
    with server:
        server.wait_for("/ready", 200)
        run = HostileRun(server, form)
        asyncio.run(run.run())
        print(run.figures())
        run.check()
        assert server.stop() == 0
    return run


def test_hostile_run_of_30_seconds(tmp_path: Path) -> None:
    run = _attack(tmp_path, Form(30, 16, 16, 128 << 20))
    assert len(run.report.statuses) >= 15
    answers = run.report.statuses["schemathesis"]
    assert {200, 400} <= answers.keys(), answers


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 300)
def test_hostile_run_of_10_minutes(tmp_path: Path) -> None:
    _attack(tmp_path, Form(LONG_S, 64, 32, 96 << 20))
