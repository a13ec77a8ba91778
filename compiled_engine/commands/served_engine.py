"""The engine client of `serve`: ready only once the tokenizer is loaded too."""

from __future__ import annotations

from compiled_engine.server.engine_client import EngineProcess, IpcEngineClient


class ServedEngine(IpcEngineClient):
    """`IpcEngineClient` that takes requests only when text can be turned into tokens.

    Attributes:
        is_text_ready: set by whoever loads the tokenizer.
    """

    def __init__(self, endpoint: str, process: EngineProcess, timeout_s: float) -> None:
        super().__init__(endpoint, process, timeout_s)
        self.is_text_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self.is_text_ready and super().is_ready
