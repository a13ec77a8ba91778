"""What one sequence cost: times, tokens and cache hits, for metrics, a log line and its trace.

All of it is read from host clocks as events pass by; nothing here asks the device for anything.
"""

from __future__ import annotations

import logging
import time

from compiled_engine.request import TokenEvent
from compiled_engine.server.calls import Caller
from compiled_engine.server.console_protocol import RequestRow, RequestState
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.tracing import SequenceCost

logger = logging.getLogger("compiled_engine.server.requests")


class SequenceStats:
    """Follows one sequence from its submit to its end.

    Args:
        metrics: gets every time as it is known.
        caller: the call it belongs to.
        index: of the sequence within the call.
        num_prompt_tokens: length of its prompt.
        cache_key: the call's `prompt_cache_key`, for the log.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        caller: Caller,
        index: int,
        num_prompt_tokens: int,
        cache_key: str = "",
    ) -> None:
        self._metrics = metrics
        self._caller = caller
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._cache_key = cache_key
        self._submitted_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._submitted_s
        self._queue_s: float | None = None
        self._grammar_s: float | None = None
        self._prefill_s: float | None = None
        self._longest_gap_s = 0.0
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_retractions = 0
        self._finish_reason: str | None = None
        self._ended_s: float | None = None

    @property
    def key_name(self) -> str:
        """Name of the API key that the call came with."""
        return self._caller.key_name

    def take(
        self, event: TokenEvent, queue_s: float | None, grammar_s: float | None = None
    ) -> None:
        """Notes one event.

        Args:
            event: as it came from the engine.
            queue_s: seconds the sequence waited for a row in the engine; None if not known yet.
            grammar_s: seconds it waited for its grammar and for masks so far; None without any.
        """
        now_s = time.perf_counter()
        num_tokens = len(event.token_ids)
        self._grammar_s = grammar_s
        if self._first_s is None:
            self._first_s = now_s
            self._queue_s = queue_s
            self._num_cached_tokens = event.num_cached_tokens
            self._metrics.note_first_token(now_s - self._caller.started_s)
            if queue_s is not None:
                self._metrics.queue_s.observe(queue_s)
                self._prefill_s = max(0.0, now_s - self._submitted_s - queue_s - (grammar_s or 0.0))
                self._metrics.prefill_s.observe(self._prefill_s)
        elif num_tokens:
            gap_s = (now_s - self._last_s) / num_tokens
            self._metrics.inter_token_s.observe(gap_s)
            if gap_s > self._longest_gap_s:
                self._longest_gap_s = gap_s
        self._num_tokens += num_tokens
        self._last_s = now_s

    def end(
        self, reason: str, *, num_tokens: int, num_cached_tokens: int, num_retractions: int
    ) -> None:
        """Notes the end, once: "stop", "length", "abort" or "error"; further calls do nothing."""
        if self._finish_reason is not None:
            return
        self._finish_reason = reason
        self._num_tokens, self._num_cached_tokens = num_tokens, num_cached_tokens
        self._num_retractions = num_retractions
        self._ended_s = time.perf_counter()
        metrics = self._metrics
        metrics.count_finish(reason)
        if num_retractions:
            metrics.num_retracted.inc()
        mean_s = self._mean_s()
        if reason in ("stop", "length"):
            metrics.e2e_s.observe(self._last_s - self._caller.started_s)
            metrics.prompt_tokens.observe(self._num_prompt_tokens)
            metrics.generation_tokens.observe(num_tokens)
            if mean_s is not None:
                metrics.per_output_token_s.observe(mean_s)
        if self._caller.trace is not None:
            cost = SequenceCost(
                index=self._index,
                reason=reason,
                num_tokens=num_tokens,
                num_cached_tokens=num_cached_tokens,
                submitted_s=self._submitted_s,
                queue_s=self._queue_s,
                first_s=self._first_s,
                last_s=self._last_s,
            )
            self._caller.trace.add_sequence(cost)
        if self._caller.is_logged and logger.isEnabledFor(logging.INFO):
            self._log(reason, num_tokens, num_cached_tokens, mean_s)

    def _mean_s(self) -> float | None:
        """Seconds a token after the first one took; None without one."""
        if self._num_tokens <= 1 or self._first_s is None:
            return None
        return (self._last_s - self._first_s) / (self._num_tokens - 1)

    def row(self, queue_s: float | None) -> RequestRow:
        """What the sequence has cost so far.

        Args:
            queue_s: as in `take`.
        """
        state: RequestState = "waiting" if queue_s is None else "prefill"
        if self._first_s is not None:
            state = "running"
        if self._finish_reason is not None:
            state = "ended"
        now_s = time.perf_counter() if self._ended_s is None else self._ended_s
        ttft_s = None if self._first_s is None else self._first_s - self._caller.started_s
        mean_s = self._mean_s()
        return RequestRow(
            id=f"{self._caller.request_id}[{self._index}]",
            key=self._caller.key_name,
            route=self._caller.route,
            state=state,
            finish_reason=self._finish_reason,
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens,
            output_tokens=self._num_tokens,
            queue_ms=None if queue_s is None else round(queue_s * 1e3, 3),
            ttft_ms=None if ttft_s is None else round(ttft_s * 1e3, 3),
            tokens_per_s=round(1 / mean_s, 2) if mean_s else None,
            age_s=round(now_s - self._caller.started_s, 3),
        )

    def _log(
        self, reason: str, num_tokens: int, num_cached_tokens: int, mean_s: float | None
    ) -> None:
        ttft_s = None
        if self._first_s is not None:
            ttft_s = self._first_s - self._caller.started_s
        fields = {
            "request": f"{self._caller.request_id}[{self._index}]",
            "key": self._caller.key_name or None,
            "cache_key": repr(self._cache_key) if self._cache_key else None,
            "finish": reason,
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": num_cached_tokens,
            "generated_tokens": num_tokens,
            "retracted": self._num_retractions,
            "queue_ms": _milliseconds(self._queue_s),
            "grammar_ms": _milliseconds(self._grammar_s),
            "prefill_ms": _milliseconds(self._prefill_s),
            "ttft_ms": _milliseconds(ttft_s),
            "inter_token_ms": _milliseconds(mean_s),
            "longest_gap_ms": _milliseconds(self._longest_gap_s or None),
            "total_ms": _milliseconds(time.perf_counter() - self._caller.started_s),
        }
        given = (f"{name}={value}" for name, value in fields.items() if value is not None)
        logger.info(" ".join(given))


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.2f}"
