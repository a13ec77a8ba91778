"""Serve a model through an OpenAI-compatible API.

Joins the API process (this one, without torch) and the engine process: binds the port first, starts
the engine, imports the server and loads the tokenizer meanwhile, shows how far it is, and ends
both. Does not own the server (`server`) nor the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.commands.defaults import default_sampling
from compiled_engine.commands.flags import (
    EXIT_BAD_CONFIG,
    add_config_arguments,
    add_model_argument,
    config_from_args,
)
from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web
    from rich.console import Console

    from compiled_engine.commands.engine_child import EngineChild
    from compiled_engine.commands.served_engine import ServedEngine
    from compiled_engine.server.state import ServerState
    from compiled_engine.server.tracing import Tracing

_POLL_S = 0.05

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, engine and server settings."""
    add_model_argument(parser)
    add_config_arguments(parser, EngineConfig)
    add_config_arguments(parser, ServerConfig)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal comes or the engine dies."""
    engine_config = config_from_args(EngineConfig, args)
    server_config = config_from_args(ServerConfig, args)
    level = os.environ.get("COMPILED_ENGINE_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from compiled_engine.commands.progress import stderr_console
    from compiled_engine.commands.settings_table import print_settings
    from compiled_engine.server.sockets import bind_socket
    from compiled_engine.server.tracing import load_tracing

    tracing = load_tracing(server_config.otlp_traces_endpoint)
    sock = bind_socket(server_config.host, server_config.port)
    _allow_many_connections()
    console = stderr_console()
    print_settings(console, engine_config, server_config)
    session = _Session(engine_config, server_config, console, tracing)
    # From here on something has to be ended: a signal before the server listens to signals must
    # still run the code that does so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return session.run(sock)


def _allow_many_connections() -> None:
    """Raises the limit on open files as far as this user may: idle clients hold one each."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Session:
    """One run of `serve`, from the bound port to the end of both processes."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        console: Console,
        tracing: Tracing | None,
    ) -> None:
        self.engine_config = engine
        self.server_config = server
        self.console = console
        self.tracing = tracing
        self.model_name = server.served_model_name or engine.model
        self.started_at = time.perf_counter()
        self.failure: ConfigError | None = None
        self._url = ""

    def run(self, sock: Any) -> int:
        """Exit code of the command."""
        from compiled_engine.commands.engine_child import EngineChild
        from compiled_engine.ipc import new_endpoint, remove_endpoint

        self._url = _url_of(sock)
        endpoint = new_endpoint()
        child = EngineChild(endpoint, self.engine_config)
        can_obey = False
        try:
            # Most of a second of imports, which the engine's own run beside.
            from compiled_engine.commands.served_engine import ServedEngine
            from compiled_engine.server.app import make_app, run_server
            from compiled_engine.server.state import STATE

            client = ServedEngine(
                endpoint,
                child,
                self.server_config.engine_timeout_s,
                self.server_config.restart_engine,
            )
            app = make_app(
                client,
                None,
                self.server_config,
                self.model_name,
                created=int(time.time()),
                default_sampling={},
                engine_config=self.engine_config,
            )
            app[STATE].tracing = self.tracing
            app.cleanup_ctx.append(lambda app: self._follow(app, client, child))
            code = run_server(
                app,
                sock,
                self.server_config,
                on_started=lambda: self.console.print(f"listening on {self._url}, loading"),
            )
            # While it loads or hangs, it reads no frames; one that has failed ends by itself.
            can_obey = (client.limits is not None or client.is_dead) and not client.is_hung
        finally:
            child.stop(can_obey=can_obey)
            remove_endpoint(endpoint)
        return self._exit_code(code, child)

    def _exit_code(self, code: int, child: EngineChild) -> int:
        if self.failure is not None:
            raise self.failure
        # The engine has said what is wrong with its configuration in its last frame.
        return EXIT_BAD_CONFIG if child.exitcode == EXIT_BAD_CONFIG else code

    def _announce(self, client: ServedEngine) -> None:
        assert client.limits is not None
        from compiled_engine.commands.settings_table import print_memory, print_start

        print_memory(self.console, client.status.memory)
        print_start(self.console, client.start_phases)
        seconds = time.perf_counter() - self.started_at
        self.console.print(
            f"ready after {seconds:.1f} s: {self._url}  model {self.model_name}  "
            f"{client.limits.max_model_len} tokens a request, "
            f"{client.status.num_pages_total * self.engine_config.block_size} in the KV pool"
        )

    async def _follow(
        self, app: web.Application, client: ServedEngine, child: EngineChild
    ) -> AsyncIterator[None]:
        from compiled_engine.commands.served_engine import restart_when_dead
        from compiled_engine.server.state import STATE

        tasks = [
            asyncio.create_task(self._show_progress(client), name="start-progress"),
            asyncio.create_task(self._load_text_side(app[STATE], client), name="load-tokenizer"),
            asyncio.create_task(restart_when_dead(client, child.restart), name="engine-restarts"),
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _show_progress(self, client: ServedEngine) -> None:
        from compiled_engine.commands.progress import PhaseProgress, split_detail

        is_noted = False
        with PhaseProgress(self.console) as progress:
            while client.status.phase in ("loading", "compiling") and not client.is_dead:
                status = client.status
                if not is_noted and status.device_note:
                    self.console.print(status.device_note)
                    is_noted = True
                detail = status.phase_detail or "starting the engine process"
                progress.update(status.phase, *split_detail(detail))
                await asyncio.sleep(_POLL_S)
            if client.is_dead:
                progress.abandon()
        while not (client.is_ready or client.is_dead):
            await asyncio.sleep(_POLL_S)
        if client.is_ready:
            self._announce(client)
        elif client.limits is None:
            # Died while it loaded: nobody is served yet, so there is no reason to linger.
            signal.raise_signal(signal.SIGTERM)

    async def _load_text_side(self, state: ServerState, client: ServedEngine) -> None:
        """Loads tokenizer and default sampling as soon as the engine has found their folders."""
        from compiled_engine.server.validation import default_sampling_params
        from compiled_engine.tokenizer import Tokenizer

        while not client.status.model_folder:
            await asyncio.sleep(_POLL_S)
        model_folder = Path(client.status.model_folder)
        tokenizer_folder = Path(client.status.tokenizer_folder)
        try:
            state.default_sampling = default_sampling_params(default_sampling(model_folder))
            state.loaded_tokenizer = await state.in_text_pool(
                lambda: Tokenizer.from_folder(
                    tokenizer_folder, trust_remote_code=self.engine_config.trust_remote_code
                )
            )
        except Exception as error:
            # Whatever it is: nobody would ever be served, so the start must end and say why.
            if not isinstance(error, ConfigError):
                logger.exception("loading the tokenizer failed")
                error = ConfigError(
                    f"the tokenizer in {tokenizer_folder} cannot be loaded: {error}",
                    param="tokenizer",
                )
            self.failure = error
            signal.raise_signal(signal.SIGTERM)
            return
        client.is_text_ready = True


def _url_of(sock: Any) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
