"""This project's server in front of an engine without a model.

Run as `python -m perf.instant_server PORT MODEL TOKENS [STEP_MS LOG]`. With STEP_MS the engine is a
process that gives a step at a time (`instant_engine`). Without, it lives in this process and gives
the next step as soon as every stream has taken the last one, so that the server is all that costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import zmq
from aiohttp import web

from compiled_engine.config import ServerConfig
from compiled_engine.ipc import new_endpoint, remove_endpoint
from compiled_engine.server.app import make_app, run_server
from compiled_engine.server.engine_client import IpcEngineClient
from compiled_engine.server.sockets import bind_socket
from compiled_engine.tokenizer import Tokenizer
from perf.instant_engine import InstantEngine

ENGINE_TIMEOUT_S = 60.0
# Turns of the event loop in which readers may take a step before the wait becomes a sleep.
NUM_TURNS = 4
SLEEP_S = 0.0005
IDLE_SLEEP_S = 0.01


class _InProcess:
    """Stands for an engine process that lives as long as this one."""

    exitcode: int | None = None

    def is_alive(self) -> bool:
        """Always."""
        return True


class _Child:
    """The engine of `perf.instant_engine`."""

    def __init__(self, endpoint: str, tokens: str, step_ms: str, log: str) -> None:
        command = [sys.executable, "-m", "perf.instant_engine", endpoint, tokens, step_ms, log]
        self._process = subprocess.Popen(command)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Until it has written its log."""
        self._process.wait(30)


async def _emit(endpoint: str, client: IpcEngineClient, engine: InstantEngine) -> None:
    """Steps without a pause while there is work, straight to where the client takes frames."""
    context = zmq.Context()
    socket: Any = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(endpoint)
    try:
        client.take_frame(engine.step())
        while True:
            with contextlib.suppress(zmq.Again):
                while True:
                    engine.take(socket.recv(zmq.NOBLOCK))
            if not engine.has_work:
                await asyncio.sleep(IDLE_SLEEP_S)
                continue
            client.take_frame(engine.step())
            await asyncio.sleep(0)
            num_turns = 1
            while client.num_unread:
                num_turns += 1
                await asyncio.sleep(0 if num_turns < NUM_TURNS else SLEEP_S)
    finally:
        socket.close(linger=0)
        context.term()


def main() -> None:
    """See the module."""
    port, model, tokens, *paced = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    given = json.loads(Path(tokens).read_text())
    endpoint = new_endpoint()
    child = _Child(endpoint, tokens, *paced) if paced else None
    client = IpcEngineClient(endpoint, child or _InProcess(), ENGINE_TIMEOUT_S)
    config = ServerConfig(port=int(port))
    app = make_app(
        client,
        Tokenizer.from_folder(model),
        config,
        "instant",
        created=int(time.time()),
        default_sampling={},
    )

    async def engine_task(_: web.Application) -> AsyncIterator[None]:
        engine = InstantEngine(given["token_ids"], given["vocab_size"])
        task = asyncio.create_task(_emit(endpoint, client, engine))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    if child is None:
        app.cleanup_ctx.append(engine_task)
    try:
        run_server(app, bind_socket(config.host, config.port), config)
    finally:
        if child is not None:
            child.wait()
        remove_endpoint(endpoint)


if __name__ == "__main__":
    main()
