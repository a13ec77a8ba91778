"""Three times as many requests as the server can answer, the real small model behind it."""

from __future__ import annotations

import pytest

from compiled_engine.bench.stats import percentile
from compiled_engine.config import DEFAULT_MODEL
from perf.overload import overload, serve_command
from perf.servers import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CAPACITY_S, OVERLOAD_S = 15.0, 30.0
MIN_RATIO = 0.9
MAX_REJECT_P95_MS = 50.0
NUM_TRIES = 3  # of times on a machine that others use too


@pytest.mark.timeout(1200)
def test_goodput_stays_under_three_times_the_load() -> None:
    seen = []
    with ServerProcess("ours", serve_command(DEFAULT_MODEL), ready_path="/ready") as server:
        for _ in range(NUM_TRIES):
            last = overload(server.url, CAPACITY_S, OVERLOAD_S, print)
            assert not last.failures, last.failures[:5]
            assert last.num_done + len(last.reject_ms) == last.num_sent
            # Some two of three are over the limit.
            assert len(last.reject_ms) > last.num_sent / 3
            p95_ms = percentile(last.reject_ms, 95)
            seen.append((last.ratio, p95_ms))
            if last.ratio >= MIN_RATIO and p95_ms < MAX_REJECT_P95_MS:
                return
    pytest.fail(f"goodput over capacity, p95 of refusals in ms: {seen}")
