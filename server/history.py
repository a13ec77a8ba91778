"""The last minutes of the engine as numbers, a sample a second, for charts.

Reads the latest status that the engine sent anyway; nothing here asks the device for anything.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Sequence

from compiled_engine.ipc import EngineStatus
from compiled_engine.server.admission import Admission
from compiled_engine.server.console_protocol import Sample
from compiled_engine.server.engine_client import EngineClient
from compiled_engine.server.metrics import ServerMetrics

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES = 300


class History:
    """The newest `MAX_SAMPLES` samples of one server.

    Args:
        engine: its latest status is read.
        admission: for the prompt tokens that wait.
        metrics: its list of first tokens is emptied by each sample.
    """

    def __init__(self, engine: EngineClient, admission: Admission, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._number = 0
        self._last_status = EngineStatus()
        self._last_s = time.perf_counter()

    async def run(self) -> None:
        """Takes a sample every `SAMPLE_INTERVAL_S` until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self.take_sample()

    def take_sample(self) -> None:
        """Adds the present moment; rates are over the time since the sample before."""
        status, before = self._engine.status, self._last_status
        now_s = time.perf_counter()
        seconds = max(now_s - self._last_s, 1e-6)
        # The totals of an engine that was started again begin at 0.
        if status.num_steps < before.num_steps:
            before = EngineStatus()
        num_prompt = max(0, status.num_prompt_tokens - before.num_prompt_tokens)
        num_cached = max(0, status.num_cached_tokens - before.num_cached_tokens)
        num_generated = max(0, status.num_generated_tokens - before.num_generated_tokens)
        first_tokens_s = sorted(self._metrics.first_tokens_s)
        self._metrics.first_tokens_s.clear()
        self._number += 1
        self._samples.append(
            Sample(
                number=self._number,
                time_s=round(time.time(), 3),
                num_running=status.num_requests_running,
                num_waiting=status.num_requests_waiting,
                num_queued_tokens=self._admission.num_tokens,
                num_pages_active=status.num_pages_active,
                num_pages_cached=status.num_pages_cached,
                num_pages_free=status.num_pages_free,
                prompt_tokens_per_s=round(num_prompt / seconds, 2),
                generated_tokens_per_s=round(num_generated / seconds, 2),
                cache_hit_rate=round(num_cached / num_prompt, 4) if num_prompt else None,
                ttft_p50_ms=_percentile_ms(first_tokens_s, 0.5),
                ttft_p95_ms=_percentile_ms(first_tokens_s, 0.95),
            )
        )
        # A copy: while the engine is silent its latest status is changed in place.
        self._last_status, self._last_s = copy.copy(status), now_s

    def since(self, number: int) -> list[Sample]:
        """Samples above `number`, oldest first; all where that is above the newest one's.

        A page that outlives the server asks for a number that does not exist yet.
        """
        if number > self._number:
            number = 0
        return [sample for sample in self._samples if sample.number > number]


def _percentile_ms(ascending_s: Sequence[float], share: float) -> float | None:
    """Nearest rank, in ms; None of nothing."""
    if not ascending_s:
        return None
    rank = min(len(ascending_s) - 1, int(share * len(ascending_s)))
    return round(ascending_s[rank] * 1e3, 3)
