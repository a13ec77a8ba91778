"""What all handlers of one server share, handed to them through one aiohttp `AppKey`.

Owns no behaviour but the drain switch; each part is owned by its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from compiled_engine.config import ServerConfig
from compiled_engine.errors import EngineUnavailableError, UnknownModelError
from compiled_engine.request import ModelLimits, SamplingParams
from compiled_engine.server.admission import Admission
from compiled_engine.server.engine_client import EngineClient
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.validation import UnknownFields
from compiled_engine.tokenizer import Tokenizer

T = TypeVar("T")

NUM_TEXT_THREADS = 2
_STOPPING = "the server is shutting down"


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
    drain: Drain = field(default_factory=Drain)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    request_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    text_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")
    )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineUnavailableError: it is not loaded yet.
        """
        if self.loaded_tokenizer is None:
            raise EngineUnavailableError("the tokenizer is not loaded yet")
        return self.loaded_tokenizer

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
