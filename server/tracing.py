"""Traces of calls: what the server hands to whoever records them, and loading who does.

Without `--otlp-traces-endpoint` there is nobody: nothing of OpenTelemetry is imported, and a call
pays one comparison. Recording is in `otel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from compiled_engine.errors import ConfigError
from compiled_engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """What one sequence took; times are of `time.perf_counter()`.

    Attributes:
        index: of the sequence within its call.
        reason: "stop", "length", "abort" or "error".
        num_tokens: generated.
        num_cached_tokens: of the prompt, found in the prefix cache.
        submitted_s: handed to the engine.
        queue_s: seconds it waited for a row; None if it never had one.
        first_s: its first token came; None if none did.
        last_s: its last token came.
    """

    index: int
    reason: str
    num_tokens: int
    num_cached_tokens: int
    submitted_s: float
    queue_s: float | None
    first_s: float | None
    last_s: float


class CallTrace(Protocol):
    """The record of one call."""

    def describe(self, model: str, requests: Sequence[Request]) -> None:
        """Notes what is asked for; sequences of one prompt share its list of ids."""
        ...

    def add_sequence(self, cost: SequenceCost) -> None:
        """Notes the end of one sequence."""
        ...

    def fail(self, error: BaseException) -> None:
        """Notes why the call failed."""
        ...

    def end(self) -> None:
        """Ends the record; called once, last."""
        ...


class Tracing(Protocol):
    """Records calls."""

    def begin(
        self, headers: Mapping[str, str], *, path: str, request_id: str, started_s: float
    ) -> CallTrace:
        """Begins the record of a call.

        Args:
            headers: of the call; they may name the trace that it belongs to.
            path: of the call.
            request_id: its `X-Request-ID`.
            started_s: `time.perf_counter()` when its head had been read.
        """
        ...

    def close(self) -> None:
        """Sends what is recorded; blocks for some seconds where nobody takes it."""
        ...


def load_tracing(endpoint: str | None) -> Tracing | None:
    """Whoever sends traces to `endpoint`; None without one.

    Raises:
        ConfigError: the extra is not installed.
    """
    if endpoint is None:
        return None
    try:
        from compiled_engine.server.otel import OtelTracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'compiled-engine[otel]' "
            f"({error})",
            param="otlp_traces_endpoint",
        ) from error
    return OtelTracing.to_endpoint(endpoint)
