"""Numbers out of timings. Owns the definitions of TTFT, TPOT, ITL and E2EL; measures nothing.

TTFT: request sent to first token received. E2EL: sent to last token. TPOT: (E2EL - TTFT) / (output
tokens - 1) of a request, undefined for one token. ITL: between two chunks of a stream that hold
tokens; `tokens_per_chunk` says how many they hold. All of them in milliseconds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 95, 99)


@dataclass
class RequestRecord:
    """What happened to one request. Times in seconds of one monotonic clock.

    Attributes:
        sent_s: when it was sent.
        chunk_times_s: arrival of each chunk that held text or tokens.
        end_s: when the answer was complete.
        num_prompt_tokens, num_output_tokens, num_cached_tokens: as the server counts them.
        error: why it failed; None if it did not.
    """

    sent_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token; None without one."""
        return (self.chunk_times_s[0] - self.sent_s) * 1e3 if self.chunk_times_s else None

    @property
    def e2el_ms(self) -> float | None:
        """Time to the last token; None without one."""
        return (self.chunk_times_s[-1] - self.sent_s) * 1e3 if self.chunk_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each token but the first; None for fewer than two."""
        if self.num_output_tokens < 2 or not self.chunk_times_s:
            return None
        spent_s = self.chunk_times_s[-1] - self.chunk_times_s[0]
        return spent_s * 1e3 / (self.num_output_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        """Gaps between chunks."""
        times = self.chunk_times_s
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles of one quantity; `count` values went in."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest of the sorted values; NaN-free, not empty."""
    assert values, "no values"
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary | None:
    """Summary of the values, None if there are none."""
    if not values:
        return None
    return Summary(
        len(values), statistics.fmean(values), *(percentile(values, p) for p in PERCENTILES)
    )


@dataclass(frozen=True)
class LoadSummary:
    """One run of the load generator.

    Attributes:
        num_done, num_failed: requests.
        duration_s: first request sent to last answer complete.
        errors: message -> requests that failed with it.
        tokens_per_chunk: output tokens for each streamed chunk; 1 means that ITL is per token.
    """

    num_done: int
    num_failed: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens_per_chunk: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2el_ms: Summary | None
    errors: dict[str, int]


def summarize_load(records: Sequence[RequestRecord]) -> LoadSummary:
    """Totals and percentiles; failed requests count only as failures."""
    assert records, "no requests"
    done = [r for r in records if r.error is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    duration_s = max(r.end_s for r in records) - min(r.sent_s for r in records)
    num_prompt = sum(r.num_prompt_tokens for r in done)
    num_output = sum(r.num_output_tokens for r in done)
    num_chunks = sum(len(r.chunk_times_s) for r in done)
    return LoadSummary(
        num_done=len(done),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(r.num_cached_tokens for r in done),
        num_output_tokens=num_output,
        tokens_per_chunk=num_output / num_chunks if num_chunks else 0.0,
        requests_per_s=len(done) / duration_s if duration_s else 0.0,
        output_tokens_per_s=num_output / duration_s if duration_s else 0.0,
        total_tokens_per_s=(num_prompt + num_output) / duration_s if duration_s else 0.0,
        ttft_ms=summarize([r.ttft_ms for r in done if r.ttft_ms is not None]),
        tpot_ms=summarize([r.tpot_ms for r in done if r.tpot_ms is not None]),
        itl_ms=summarize([gap for r in done for gap in r.itls_ms]),
        e2el_ms=summarize([r.e2el_ms for r in done if r.e2el_ms is not None]),
        errors=errors,
    )
