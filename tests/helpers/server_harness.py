"""Runs the real application on a free port inside the test's event loop.

One harness for all server tests: `with_server` starts it, gives an aiohttp session and the base
address to an async test body, and stops it.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from compiled_engine.config import ServerConfig
from compiled_engine.server.app import make_app
from compiled_engine.server.sockets import bind_socket
from compiled_engine.server.state import STATE, ServerState
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine

MODEL = "test/model"


class Server:
    """A running server.

    Attributes:
        url: base address.
        session: an aiohttp session without base address.
        app: the application itself.
        state: the server's own state, for assertions.
        engine: the fake engine.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, app: web.Application, engine: FakeEngine
    ) -> None:
        self.url = url
        self.session = session
        self.app = app
        self.state: ServerState = app[STATE]
        self.engine = engine

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        """Status and body, as JSON where it is JSON."""
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await _body(response)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and body; `body` is sent as JSON, or raw where it is bytes."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(self.url + path, data=data, **kwargs) as response:
            return response.status, await _body(response)

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream; checks that it ends with exactly one `[DONE]`."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert text.count("[DONE]") == 1
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def _body(response: aiohttp.ClientResponse) -> Any:
    text = await response.text()
    return json.loads(text) if response.content_type == "application/json" else text


def with_server(
    test: Callable[[Server], Awaitable[None]],
    *,
    engine: FakeEngine | None = None,
    tokenizer: Any = None,
    config: ServerConfig | None = None,
    default_sampling: dict[str, Any] | None = None,
) -> None:
    """Runs `test` against a server on a free port."""

    async def run() -> None:
        used_engine = engine or FakeEngine()
        used_config = config or ServerConfig(port=0)
        app = make_app(
            used_engine,
            tokenizer or ByteTokenizer(),
            used_config,
            MODEL,
            created=1_700_000_000,
            default_sampling=default_sampling or {},
        )
        sock = bind_socket("127.0.0.1", 0)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.SockSite(runner, sock).start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with aiohttp.ClientSession() as session:
                await test(Server(url, session, app, used_engine))
        finally:
            await runner.cleanup()
            sock.close()

    asyncio.run(run())


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 2.0) -> None:
    """Waits until `condition` holds; fails after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never held"
        await asyncio.sleep(0.01)
