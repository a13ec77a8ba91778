"""The engine client of `serve`: ready only once the tokenizer is loaded too, and restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from compiled_engine.server.engine_client import EngineProcess, IpcEngineClient

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class ServedEngine(IpcEngineClient):
    """`IpcEngineClient` that takes requests only when text can be turned into tokens.

    Args:
        num_restarts: how many times `revive` may be used.

    Attributes:
        is_text_ready: set by whoever loads the tokenizer.
    """

    def __init__(
        self, endpoint: str, process: EngineProcess, timeout_s: float, num_restarts: int = 0
    ) -> None:
        super().__init__(endpoint, process, timeout_s)
        self.is_text_ready = False
        self._num_restarts_left = num_restarts
        self._is_reviving = False

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self.is_text_ready and super().is_ready

    @property
    def is_dead(self) -> bool:
        """Whether the engine process is gone and will not be started again."""
        return super().is_dead and not (self._is_reviving or self.can_revive)

    @property
    def can_revive(self) -> bool:
        """Whether the engine is dead and may be started again: it had become ready before."""
        return super().is_dead and self.limits is not None and self._num_restarts_left > 0

    async def revive(self, restart: Callable[[], None]) -> None:
        """Starts a dead engine again; its requests have ended with an error.

        Args:
            restart: ends the old process and starts a new one; runs in a thread, since it blocks.
        """
        self._num_restarts_left -= 1
        self._is_reviving = True
        try:
            await asyncio.to_thread(restart)
            await self.reconnect()
        finally:
            self._is_reviving = False


async def restart_when_dead(client: ServedEngine, restart: Callable[[], None]) -> None:
    """Starts a dead engine again, as often as it may; requests get 503 until it is ready."""
    while True:
        await asyncio.sleep(_POLL_S)
        if client.can_revive:
            logger.error("starting the engine process again: %s", client.dead_reason)
            await client.revive(restart)
