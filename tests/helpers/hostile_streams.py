"""Normal streams with known answers, and how evenly they come."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Answer = str | tuple[int, ...]


def p95(values: list[float]) -> float:
    """The value that 95 % do not exceed; 0 of none."""
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0


@dataclass
class Gaps:
    """Seconds between the events of streams, and until the first one."""

    between: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


class NormalStreams:
    """Greedy streams of the operator: even ones as text, odd ones as token ids.

    Args:
        url: of the server.
        key: the operator's API key.
        num_streams: that run at once.
        max_tokens: of each answer.
    """

    def __init__(self, url: str, key: str, num_streams: int, max_tokens: int) -> None:
        self._url, self._max_tokens = url, max_tokens
        self._headers = {"Authorization": f"Bearer {key}"}
        self._num_streams = num_streams
        self.expected: dict[int, Answer] = {}
        self.differences: list[str] = []
        self.num_finished = 0

    async def learn(self, session: aiohttp.ClientSession) -> Gaps:
        """Takes the answers one by one, then all at once for the gaps; both must agree."""
        for index in range(self._num_streams):
            self.expected[index] = await self._stream(session, index, Gaps())
        gaps = Gaps()
        async with asyncio.TaskGroup() as group:
            for index in range(self._num_streams):
                group.create_task(self._checked(session, index, gaps))
        assert not self.differences, self.differences
        return gaps

    async def run(self, session: aiohttp.ClientSession, ended: asyncio.Event) -> Gaps:
        """Asks again and again until `ended`; every answer is compared."""
        gaps = Gaps()

        async def repeat(index: int) -> None:
            while not ended.is_set():
                await self._checked(session, index, gaps)

        async with asyncio.TaskGroup() as group:
            for index in range(self._num_streams):
                group.create_task(repeat(index))
        return gaps

    async def _checked(self, session: aiohttp.ClientSession, index: int, gaps: Gaps) -> None:
        answer = await self._stream(session, index, gaps)
        self.num_finished += 1
        expected = self.expected[index]
        if answer != expected:
            place = sum(
                1
                for _ in itertools.takewhile(
                    lambda p: p[0] == p[1], zip(answer, expected, strict=False)
                )
            )
            self.differences.append(
                f"stream {index} differs from place {place} on: {answer[place : place + 20]!r} "
                f"({len(answer)} long) and not {expected[place : place + 20]!r} ({len(expected)})"
            )

    async def _stream(self, session: aiohttp.ClientSession, index: int, gaps: Gaps) -> Answer:
        prompt = f"question {index}: " + "why? " * (index % 7)
        sampling: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if index % 2:
            route = "/generate"
            sampling["max_new_tokens"] = self._max_tokens
            body = {"text": prompt, "sampling_params": sampling, "stream": True}
        else:
            route = "/v1/completions"
            body = {"prompt": prompt, "max_tokens": self._max_tokens, "stream": True, **sampling}
        parts: list[Any] = []
        before = time.monotonic()
        async with session.post(self._url + route, json=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                (gaps.between if parts else gaps.first).append(now - before)
                before = now
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts.append(event["output_ids"] if index % 2 else event["choices"][0]["text"])
        return tuple(parts[-1]) if index % 2 else "".join(parts)
