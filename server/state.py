"""What all handlers of one server share, handed to them through one aiohttp `AppKey`.

Owns no behaviour but the drain switch; each part is owned by its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from compiled_engine.config import EngineConfig, ServerConfig
from compiled_engine.errors import EngineUnavailableError, UnknownModelError
from compiled_engine.request import ModelLimits, SamplingParams
from compiled_engine.server.admission import Admission
from compiled_engine.server.calls import RunningCalls
from compiled_engine.server.engine_client import EngineClient
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.parsers.registry import (
    ChatFormat,
    choose_format,
    reasoning_parser_name,
    tool_parser_name,
)
from compiled_engine.server.recent import RecentRequests
from compiled_engine.server.tracing import Tracing
from compiled_engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_TEXT_THREADS = 2
_STOPPING = "the server is shutting down"


class UnknownFields:
    """Remembers which unknown fields were logged, so that each is logged once.

    Attributes:
        max_logged: names beyond this many are only counted, since clients choose them.
    """

    max_logged = 100

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, names: set[str]) -> None:
        """Logs names not seen before."""
        for name in sorted(names):
            short = name[:64]
            if short not in self._logged and len(self._logged) < self.max_logged:
                self._logged.add(short)
                logger.warning("request field %r is not known and has no effect", short)


class Drain:
    """The switch for a graceful stop, and the running calls it waits for.

    Attributes:
        is_draining: new calls are refused.
        num_running: calls that have not finished.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.num_running = 0
        self._waits: set[asyncio.Timeout] = set()
        self._is_expired = False

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one call while it runs.

        Raises:
            EngineUnavailableError: no new calls are taken.
        """
        if self.is_draining:
            raise EngineUnavailableError(_STOPPING)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    @contextlib.asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """A part of a call that `expire` ends with EngineUnavailableError. Not to be nested."""
        if self._is_expired:
            raise EngineUnavailableError(_STOPPING)
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._waits.add(timeout)
                try:
                    yield
                finally:
                    self._waits.discard(timeout)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise EngineUnavailableError(_STOPPING) from error

    def expire(self) -> None:
        """Ends every interruptible part, now and from now on."""
        self._is_expired = True
        now = asyncio.get_running_loop().time()
        for timeout in self._waits:
            if not timeout.expired():
                timeout.reschedule(now)


@dataclass(kw_only=True)
class ServerState:
    """Parts and settings of one server.

    Attributes:
        created: Unix time shown for the model.
        loaded_tokenizer: None until the model's folder is known.
        default_sampling: values of requests that leave them out; from the model's own settings.
        engine_config: what the engine process was told; None where nobody knows.
        tracing: records calls; None where nobody does.
        calls: the running calls, by their id.
        recent: what running and recently ended sequences cost.
        request_ids: ids for the engine, never reused.
        text_pool: threads for tokenising and template rendering.
    """

    engine: EngineClient
    loaded_tokenizer: Tokenizer | None
    config: ServerConfig
    model_name: str
    created: int
    default_sampling: SamplingParams
    admission: Admission
    metrics: ServerMetrics
    engine_config: EngineConfig | None = None
    tracing: Tracing | None = None
    calls: RunningCalls = field(default_factory=RunningCalls)
    recent: RecentRequests = field(default_factory=RecentRequests)
    drain: Drain = field(default_factory=Drain)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    request_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    text_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")
    )

    def __post_init__(self) -> None:
        # An unknown name must end the start, not the first request.
        tool_parser_name(self.config.tool_call_parser)
        reasoning_parser_name(self.config.reasoning_parser)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineUnavailableError: it is not loaded yet.
        """
        if self.loaded_tokenizer is None:
            raise EngineUnavailableError("the tokenizer is not loaded yet")
        return self.loaded_tokenizer

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """How the served model writes reasoning and tool calls.

        Raises:
            EngineUnavailableError: the tokenizer is not loaded yet.
        """
        tokenizer = self.tokenizer
        return choose_format(
            tokenizer.chat_template_text,
            has_tools_branch="tools" in tokenizer.chat_template_variables,
            is_harmony=tokenizer.is_harmony,
            tool_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
        )

    def note_unknown_fields(self, names: set[str]) -> None:
        """Counts and, once each, logs request fields that are not known."""
        if names:
            self.metrics.unknown_fields.inc(len(names))
            self.unknown_fields.note(names)

    async def in_text_pool(self, function: Callable[[], T]) -> T:
        """Runs slow text work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.text_pool, function)

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModelError unless `model` is absent or the served one."""
        if model is not None and model != self.model_name:
            raise UnknownModelError(
                f"the model {model[:200]!r} is not served here; the served one is "
                f"{self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def require_limits(self) -> ModelLimits:
        """The model's limits.

        Raises:
            EngineUnavailableError: the engine is not ready, dead or hung.
        """
        limits = self.engine.limits
        if limits is None or not self.engine.is_ready:
            raise EngineUnavailableError(
                self.engine.dead_reason or f"the engine is not ready: {self.engine.status.phase}"
            )
        return limits


STATE = web.AppKey("state", ServerState)
