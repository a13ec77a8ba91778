"""The aiohttp application and its life: routes, middlewares, start, graceful stop.

Owns who is let in and what every error becomes. The bound port and the engine client are
handed in. Exit codes of `serve_app`: 0 after a clean stop,
`EXIT_ENGINE_DIED` if the engine process died, 128 + signal number after a second signal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.errors import (
    AuthenticationError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
)
from compiled_engine.server import control, operate, responses
from compiled_engine.server.admission import Admission
from compiled_engine.server.background import JOBS, Jobs, run_jobs
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.chat import create_chat_completion
from compiled_engine.server.completions import create_completion
from compiled_engine.server.console import HISTORY, ConsolePage, get_console_data
from compiled_engine.server.engine_client import EngineClient, running_client
from compiled_engine.server.generate import create_generation
from compiled_engine.server.history import History
from compiled_engine.server.keys import OPERATOR, ApiKeys, read_keys
from compiled_engine.server.messages import count_tokens, create_message
from compiled_engine.server.messages_protocol import messages_error_response
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.response_store import RESPONSES, ResponseStore
from compiled_engine.server.sockets import BACKLOG
from compiled_engine.server.sse import error_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import default_sampling_params
from compiled_engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("compiled_engine.server.access")

EXIT_ENGINE_DIED = 3
# After the engine's death the server still answers 503 for a while, so that clients and probes see
# the reason and not a closed port.
DEATH_LINGER_S = 3.0
# For a connection without a request, and for the head of one that does not arrive.
_IDLE_TIMEOUT_S = 120.0
_POLL_S = 0.05
# What a call ended by the drain's deadline gets to send its last chunk.
_LAST_WORDS_S = 1.0
# Calls have ended, or must end now, when the runner is cleaned up.
_CLEANUP_S = 0.1
_OPEN_PATHS = frozenset({"/health", "/ready", "/progress", "/metrics"})
_NOT_LOGGED = _OPEN_PATHS | {"/", "/console/data"}
# With keys of several callers, these are for the operator alone.
_OPERATOR_PATHS = frozenset(
    {
        "/server_info",
        "/get_server_info",
        "/abort_request",
        "/flush_cache",
        "/pause_generation",
        "/continue_generation",
        "/start_profile",
        "/stop_profile",
    }
)
_MESSAGES_PATH = "/v1/messages"
_MAX_REQUEST_ID_CHARS = 128
_MAX_ROUTE_CHARS = 200
_PAGE = web.AppKey("page", ConsolePage)
_KEYS = web.AppKey("keys", ApiKeys)


def make_app(
    engine_client: EngineClient,
    tokenizer: Tokenizer | None,
    config: ServerConfig,
    model_name: str,
    *,
    created: int,
    default_sampling: Mapping[str, Any],
    engine_config: EngineConfig | None = None,
) -> web.Application:
    """Builds the server; it starts and closes the engine client with itself.

    Args:
        engine_client: not started yet.
        tokenizer: of the served model; None if `ServerState.loaded_tokenizer` is set later.
        config: limits and the API key.
        model_name: name on `/v1/models`.
        created: Unix time shown for the model.
        default_sampling: `SamplingParams` fields for requests that leave them out.
        engine_config: shown on `/server_info`.

    Raises:
        ConfigError: a default sampling value is unknown or out of range, or the file of API keys
            cannot be used.
    """
    admission = Admission(
        max_requests=config.max_queued_requests,
        max_tokens=config.max_queued_tokens,
        max_requests_per_key=config.max_requests_per_key,
        max_tokens_per_key=config.max_tokens_per_key,
    )
    state = ServerState(
        engine=engine_client,
        loaded_tokenizer=tokenizer,
        config=config,
        model_name=model_name,
        created=created,
        default_sampling=default_sampling_params(default_sampling),
        admission=admission,
        metrics=ServerMetrics(model_name, engine_client, admission),
        engine_config=engine_config,
    )
    page = ConsolePage()
    app = web.Application(
        middlewares=[_follow_call, _check_api_key], client_max_size=config.max_body_bytes
    )
    app[STATE] = state
    app[RESPONSES] = ResponseStore()
    app[HISTORY] = History(engine_client, admission, state.metrics)
    app[JOBS] = Jobs()
    app[_PAGE] = page
    app[_KEYS] = ApiKeys(config.api_key, read_keys(config.api_key_file))
    app.add_routes(_routes(page))
    app.add_routes(responses.ROUTES)
    app.add_routes(operate.ROUTES)
    app.on_response_prepare.append(_add_request_id)
    app.cleanup_ctx.append(_run_parts)
    # Behind the engine client, so that it is cleaned up first.
    app.cleanup_ctx.append(run_jobs)
    return app


def _routes(page: ConsolePage) -> list[web.RouteDef]:
    return [
        web.get("/", page.get),
        web.get("/console/data", get_console_data),
        web.get("/openapi.json", control.OpenApi().get),
        web.get("/health", control.get_health),
        web.get("/ready", control.get_ready),
        web.get("/metrics", control.get_metrics),
        web.get("/version", control.get_version),
        web.get("/v1/models", control.list_models),
        web.get("/v1/models/{model:.+}", control.get_model),
        web.post("/v1/completions", create_completion),
        web.post("/v1/chat/completions", create_chat_completion),
        web.post(_MESSAGES_PATH, create_message),
        web.post(f"{_MESSAGES_PATH}/count_tokens", count_tokens),
        web.post("/tokenize", control.tokenize),
        web.post("/detokenize", control.detokenize),
        web.post("/generate", create_generation),
        web.get("/progress", control.get_progress),
    ]


async def _run_parts(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    async with running_client(state.engine):
        sampler = asyncio.create_task(app[HISTORY].run(), name="history")
        yield
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    if state.tracing is not None:
        await asyncio.to_thread(state.tracing.close)
    state.text_pool.shutdown(wait=False, cancel_futures=True)


def _caller(request: web.Request) -> Caller:
    """Who calls; its id is the client's own where that is short and printable, else a fresh one."""
    given = request.headers.get("X-Request-ID", "")
    is_usable = given.isascii() and given.isprintable() and " " not in given
    if not (is_usable and 0 < len(given) <= _MAX_REQUEST_ID_CHARS):
        given = uuid.uuid4().hex
    return Caller(
        request_id=given,
        key_name=OPERATOR,
        route=f"{request.method} {request.path[:_MAX_ROUTE_CHARS]}",
        started_s=time.perf_counter(),
        is_logged=request.app[STATE].config.access_log and request.path not in _NOT_LOGGED,
    )


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    caller = request.get(CALLER) or _caller(request)
    response.headers["X-Request-ID"] = caller.request_id
    if request.path.startswith(_MESSAGES_PATH):
        # Anthropic's clients look for it by this name.
        response.headers["Request-ID"] = caller.request_id


@web.middleware
async def _follow_call(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the call, answers its errors, and writes its line of the access log."""
    request[CALLER] = caller = _caller(request)
    status = 499  # the client left
    try:
        response = await _answer_errors(request, handler)
        status = response.status
        return response
    finally:
        if caller.is_logged:
            milliseconds = (time.perf_counter() - caller.started_s) * 1e3
            access_logger.info(
                "request=%s key=%s route=%r status=%d ms=%.1f",
                request[CALLER].request_id,
                request[CALLER].key_name or "-",
                caller.route,
                status,
                milliseconds,
            )


async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into the error shape of its API; the text of a bug stays in the log."""
    try:
        response = await handler(request)
    except EngineError as error:
        response = _error_response(request, error)
    except web.HTTPException as error:
        response = _http_error_response(request, error)
    except ConnectionResetError:
        # The client is gone: there is nobody to answer.
        raise
    except Exception:
        logger.exception("request %s failed", request[CALLER].request_id)
        response = _error_response(request, EngineError("internal error"))
    if request.content.exception() is not None and not response.prepared:
        # The body broke off: what follows on this connection cannot be told apart.
        response.force_close()
    request.app[STATE].metrics.count_response(response.status)
    return response


def _error_response(request: web.Request, error: EngineError) -> web.Response:
    if request.path.startswith(_MESSAGES_PATH):
        return messages_error_response(error, request[CALLER].request_id)
    return error_response(error)


def _http_error_response(request: web.Request, error: web.HTTPException) -> web.Response:
    if error.status == 404:
        return _error_response(request, control.not_found(request))
    if error.status == 405:
        message = f"{request.path[:200]} does not take {request.method}"
    elif error.status == 413:
        limit = request.app[STATE].config.max_body_bytes
        message = f"the request body is larger than {limit} bytes, the limit of this server"
    else:
        message = error.text or error.reason
    shown = InvalidRequestError(message)
    shown.status = error.status
    response = _error_response(request, shown)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    if error.status in (408, 413):
        # The rest of the body is not worth reading.
        response.force_close()
    return response


def _given_key(request: web.Request) -> str:
    """The key of a call, in OpenAI's header or in Anthropic's; empty where there is none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("X-API-Key", "")
    return given.strip()


@web.middleware
async def _check_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses calls without the key before it matters whether the route exists."""
    keys = request.app[_KEYS]
    if not keys.are_needed or request.path in _OPEN_PATHS:
        return await handler(request)
    name = keys.name_of(_given_key(request).encode("utf-8", "surrogateescape"))
    if name is not None:
        request[CALLER] = dataclasses.replace(request[CALLER], key_name=name)
        if name != OPERATOR and request.path in _OPERATOR_PATHS:
            raise ForbiddenError(f"{request.path} is for the operator's key (--api-key) only")
        return await handler(request)
    if request.path == "/" and "text/html" in request.headers.get("Accept", ""):
        # A browser cannot send the key with the address: the page comes as the body of the refusal
        # and asks for it.
        return request.app[_PAGE].response(status=401)
    raise AuthenticationError(
        "the API key is missing or wrong; send it as `Authorization: Bearer <key>` or "
        "`X-API-Key: <key>`",
        code="invalid_api_key",
    )


class _Signals:
    """Counts SIGINT and SIGTERM while the server runs."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    def remove(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _take(self, number: int) -> None:
        self.received.append(number)


def shorten_bad_http(record: logging.LogRecord) -> bool:
    """Logs bytes that are no HTTP as one line: a port scan must not fill the log with traces."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionResetError):
        return False  # a client that left is no error of the server's
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg, record.args, record.exc_info = (
            f"no HTTP: {' '.join(error.message.split())}",
            (),
            None,
        )
    return True


async def serve_app(
    app: web.Application,
    sock: socket.socket,
    config: ServerConfig,
    *,
    on_started: Callable[[], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serves until a signal comes or the engine dies; returns the process's exit code.

    The first SIGINT or SIGTERM begins the drain: new work gets 503, running calls may finish until
    `drain_timeout_s` and then end with an error. A second signal ends everything at once.

    Args:
        app: from `make_app`.
        sock: from `sockets.bind_socket`; closed at the end.
        config: the drain's deadline.
        on_started: called once the port answers; the engine may still be loading.
        on_ready: called once the engine takes requests.
    """
    loop = asyncio.get_running_loop()
    signals = _Signals()
    logging.getLogger("aiohttp.server").addFilter(shorten_bad_http)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_CLEANUP_S,
        keepalive_timeout=_IDLE_TIMEOUT_S,
    )
    signals.install(loop)
    try:
        await runner.setup()
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        if on_started is not None:
            on_started()
        state = app[STATE]
        await _until_end(state, signals, on_ready)
        if state.engine.is_dead:
            state.drain.is_draining = True
            await _until(lambda: len(signals.received) > 0, DEATH_LINGER_S)
            return EXIT_ENGINE_DIED
        return await _drain(state, signals, config.drain_timeout_s)
    finally:
        await runner.cleanup()
        signals.remove(loop)
        sock.close()


def run_server(
    app: web.Application,
    sock: socket.socket,
    config: ServerConfig,
    *,
    on_started: Callable[[], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Runs `serve_app` in a uvloop event loop of its own (asyncio's on Windows)."""
    if sys.platform == "win32":
        loop_factory = None
    else:
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(serve_app(app, sock, config, on_started=on_started, on_ready=on_ready))


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until `condition` holds, at most `timeout_s`; returns whether it does."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _until_end(
    state: ServerState, signals: _Signals, on_ready: Callable[[], None] | None
) -> None:
    while not signals.received and not state.engine.is_dead:
        if on_ready is not None and state.engine.is_ready:
            on_ready()
            on_ready = None
        await asyncio.sleep(_POLL_S)


async def _drain(state: ServerState, signals: _Signals, timeout_s: float) -> int:
    drain = state.drain
    drain.is_draining = True
    if drain.num_running:
        logger.warning(
            "stopping: %d calls may finish within %g s; a second signal ends them now",
            drain.num_running,
            timeout_s,
        )

    def is_over() -> bool:
        return drain.num_running == 0 or len(signals.received) > 1 or state.engine.is_dead

    await _until(is_over, timeout_s)
    if len(signals.received) > 1:
        return 128 + signals.received[1]
    if drain.num_running and not state.engine.is_dead:
        logger.warning("%d calls did not finish in time and end with an error", drain.num_running)
        drain.expire()
    await _until(lambda: drain.num_running == 0, _LAST_WORDS_S)
    return EXIT_ENGINE_DIED if state.engine.is_dead else 0
