"""The attackers of a hostile run, in a process of their own so that they slow no reader.

Posters send bodies of `hostile_bodies` and `hostile_openapi`; others talk to bare sockets. They go
on until the time is over, and count every answer. `hostile_schemathesis` attacks beside them.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from tests.helpers.hostile_bodies import ATTACKS, Attack
from tests.helpers.hostile_openapi import DocumentAttacks
from tests.helpers.hostile_sockets import SOCKET_ATTACKS, Target, crowd

# Everything a client may be told; a 503 would mean that the engine is gone.
STATUSES = frozenset({0, 200, 400, 401, 403, 404, 405, 408, 413, 429})
ANSWER_LIMIT_S = 100.0
MAX_FAULTS = 50


@dataclass(frozen=True)
class AttackPlan:
    """What attackers do. Times are in seconds.

    Attributes:
        port: of the server, on loopback.
        key: the attackers' API key.
        seconds: how long.
        seed: of everything random.
        num_posters: clients that send bodies.
        num_sockets: of each kind of attack on bare sockets.
        num_idle: connections that never say anything.
    """

    port: int
    key: str
    seconds: float
    seed: int = 0
    num_posters: int = 6
    num_sockets: int = 2
    num_idle: int = 2000


@dataclass
class AttackReport:
    """What came back: answers by kind and status (0 for none), and what must not be."""

    statuses: dict[str, dict[int, int]]
    faults: list[str]


def attack(plan: AttackPlan) -> AttackReport:
    """Runs a plan to its end, in this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert hard > plan.num_idle + 200, f"a process may open {hard} files only"
    return asyncio.run(_attack(plan))


async def _attack(plan: AttackPlan) -> AttackReport:
    target = Target(plan.port, plan.key, random.Random(plan.seed))
    deadline = time.monotonic() + plan.seconds
    ended = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        poster = Poster(target, session)
        await poster.prepare()
        async with asyncio.TaskGroup() as group:
            crowding = group.create_task(crowd(target, plan.num_idle, ended))
            async with asyncio.TaskGroup() as busy:
                for index in range(plan.num_posters):
                    # One is enough of those that keep the compiler of grammars busy.
                    send = poster.send_costly if index == 0 else poster.send_any
                    busy.create_task(_repeat(deadline, send))
                for kind in SOCKET_ATTACKS:
                    for _ in range(plan.num_sockets):
                        busy.create_task(_repeat(deadline, _on_socket(kind, target)))
            ended.set()
            await crowding
    return AttackReport(target.statuses, target.faults[:MAX_FAULTS])


async def _repeat(deadline: float, send: Callable[[], Awaitable[None]]) -> None:
    while time.monotonic() < deadline:
        await send()
        await asyncio.sleep(0.01)


def _on_socket(
    kind: Callable[[Target], Awaitable[None]], target: Target
) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        try:
            await kind(target)
        except ConnectionError:
            target.count(kind.__name__.replace("_", " "), 0)

    return send


class Poster:
    """Sends bodies and judges the answers."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self._target, self._session = target, session
        self._base = f"http://127.0.0.1:{target.port}"
        self._kinds = {name: make for name, make in ATTACKS.items() if name != "costly grammar"}

    async def prepare(self) -> None:
        """Reads the description of the routes."""
        headers = {"Authorization": f"Bearer {self._target.key}"}
        async with self._session.get(f"{self._base}/openapi.json", headers=headers) as response:
            self._kinds["by the description"] = DocumentAttacks(await response.json())

    async def send_costly(self) -> None:
        """One grammar that takes long."""
        await self._send("costly grammar", ATTACKS["costly grammar"](self._target.rng))

    async def send_any(self) -> None:
        """One of the other kinds."""
        kind = self._target.rng.choice(list(self._kinds))
        await self._send(kind, self._kinds[kind](self._target.rng))

    async def _send(self, kind: str, attack: Attack) -> None:
        headers = {"Authorization": f"Bearer {self._target.key}"} | attack.headers
        url = URL(self._base + attack.route, encoded=True)
        shown = f"{kind}: {attack.route[:80]} {attack.headers} {attack.body[:600]!r}"
        try:
            async with self._session.post(url, data=attack.body, headers=headers) as response:
                status = response.status
                answer = await self._read(response, attack)
        except TimeoutError:
            self._target.faults.append(f"{shown} -> no answer in {ANSWER_LIMIT_S:g} s")
        except (aiohttp.ClientError, ConnectionError):
            # Such as one that is cut because its body is too large to read.
            self._target.count(kind, 0)
        else:
            self._target.count(kind, status)
            if status not in STATUSES or not _is_sound(status, answer, attack):
                self._target.faults.append(f"{shown} -> {status} {answer[-600:]!r}")

    async def _read(self, response: aiohttp.ClientResponse, attack: Attack) -> bytes:
        if response.status != 200 or attack.leave_after is None:
            return await response.read()
        answer = b""
        for _ in range(2 * attack.leave_after + 1):
            line = await response.content.readline()
            if not line:
                return answer
            answer += line
        response.close()
        return answer


def _is_sound(status: int, answer: bytes, attack: Attack) -> bool:
    """Whether an error has a message, and no stream broke inside the server."""
    if status == 200:
        return b'"server_error"' not in answer and b'"api_error"' not in answer
    if len(attack.route) > 200 or not attack.route.startswith(("/v1/", "/generate", "/tokenize")):
        return True
    try:
        return bool(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        # What cannot be read as HTTP is refused before there is a route.
        return status == 400 and bool(attack.headers) and bool(answer)
