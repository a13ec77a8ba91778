"""Prometheus metrics of the server and, read from its latest status, of the engine.

Owns the registry and the names: vLLM's where the meaning is the same, else with the prefix
`compiled_engine:`. Engine numbers are read at scrape time, so they cost nothing while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from compiled_engine.server.admission import Admission
from compiled_engine.server.engine_client import EngineClient

MAX_FIRST_TOKENS = 1024
_SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_BUCKETS = tuple(2.0**power for power in range(0, 21, 2))


class ServerMetrics:
    """Counters and histograms of one server, in a registry of their own.

    Attributes:
        num_aborted: calls whose client left before the answer was complete.
        unknown_fields: request fields that were not known and therefore not used.
        first_tokens_s: times to first token that nobody has looked at yet; the newest ones.
    """

    def __init__(self, model_name: str, engine: EngineClient, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, list(labels), buckets=buckets, registry=self._registry)
            return family.labels(**labels)

        self._ttft_s = histogram(
            "vllm:time_to_first_token_seconds", "From request to first token.", _LONG_BUCKETS_S
        )
        self.inter_token_s = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            _SHORT_BUCKETS_S,
            labels,
        )
        self._registry.register(self.inter_token_s)
        self.queue_s = histogram(
            "vllm:request_queue_time_seconds", "From submit to a row of the batch.", _LONG_BUCKETS_S
        )
        self.prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "From a row to the first token.", _LONG_BUCKETS_S
        )
        self.per_output_token_s = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time a token after the first one took, by sequence.",
            _SHORT_BUCKETS_S,
        )
        self.e2e_s = histogram(
            "vllm:e2e_request_latency_seconds", "From request to last token.", _LONG_BUCKETS_S
        )
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a sequence.", _TOKEN_BUCKETS
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a sequence.", _TOKEN_BUCKETS
        )
        self.first_tokens_s: deque[float] = deque(maxlen=MAX_FIRST_TOKENS)
        self._make_counters(model_name)
        self._registry.register(_EngineCollector(labels, engine, admission))

    def _make_counters(self, model_name: str) -> None:
        self._finished = Counter(
            "vllm:request_success",
            "Sequences by the reason they ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._finished_by_reason = {
            reason: self._finished.labels(model_name=model_name, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self.num_aborted = Counter(
            "compiled_engine:aborted_requests",
            "Calls whose client left before the answer was complete.",
            registry=self._registry,
        )
        self.num_retracted = Counter(
            "compiled_engine:retracted_requests",
            "Ended sequences whose pages were taken back at least once.",
            registry=self._registry,
        )
        self.unknown_fields = Counter(
            "compiled_engine:unknown_request_fields",
            "Request fields that are not known and were not used.",
            registry=self._registry,
        )
        self._responses = Counter(
            "compiled_engine:http_responses",
            "Answers by status code.",
            ["status"],
            registry=self._registry,
        )

    def note_first_token(self, seconds: float) -> None:
        """Notes how long the first token of a sequence took, from the call's head on."""
        self._ttft_s.observe(seconds)
        self.first_tokens_s.append(seconds)

    def count_finish(self, reason: str) -> None:
        """Counts one ended sequence: "stop", "length", "abort" or "error"."""
        self._finished_by_reason[reason].inc()

    def count_response(self, status: int) -> None:
        """Counts one HTTP answer."""
        self._responses.labels(status=str(status)).inc()

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class TokenHistogram(Collector):
    """A histogram that is told something for every token: cheaper than prometheus_client's own.

    All is done in one thread, that of the event loop.

    Args:
        name: of the family.
        text: its help.
        buckets: upper bounds, ascending; infinity is added.
        labels: name -> value.
    """

    def __init__(
        self, name: str, text: str, buckets: tuple[float, ...], labels: dict[str, str]
    ) -> None:
        self._name, self._text = name, text
        self._bounds = buckets
        self._labels = labels
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The family as of now."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), totals, self._sum)
        yield family


class _EngineCollector(Collector):
    """Turns the engine's latest status into metrics when Prometheus asks."""

    def __init__(self, labels: dict[str, str], engine: EngineClient, admission: Admission) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._engine = engine
        self._admission = admission

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def collect(self) -> Iterable[Metric]:
        """All engine metrics as of its latest status."""
        yield from self._requests_and_pages()
        yield from self._totals()
        yield from self._server_gauges()

    def _requests_and_pages(self) -> Iterable[Metric]:
        status = self._engine.status
        yield self._gauge(
            "vllm:num_requests_running", "Rows being computed.", status.num_requests_running
        )
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Requests that wait for a start.",
            status.num_requests_waiting,
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of KV pages that running requests hold; 1 is full.",
            status.num_pages_active / status.num_pages_total if status.num_pages_total else 0.0,
        )
        pages = GaugeMetricFamily(
            "compiled_engine:pages", "KV pages by state.", labels=[*self._names, "state"]
        )
        for state, count in (
            ("active", status.num_pages_active),
            ("cached", status.num_pages_cached),
            ("free", status.num_pages_free),
        ):
            pages.add_metric([*self._values, state], count)
        yield pages

    def _totals(self) -> Iterable[Metric]:
        status = self._engine.status
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of started requests.", status.num_prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", status.num_generated_tokens),
            (
                "vllm:num_preemptions",
                "Running requests whose pages were taken back.",
                status.num_retractions,
            ),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                status.num_prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                status.num_cached_tokens,
            ),
            ("compiled_engine:steps", "Steps of the engine.", status.num_steps),
            (
                "compiled_engine:jumped_tokens",
                "Generated tokens that a grammar forced and that took no step of their own.",
                status.num_jumped_tokens,
            ),
            (
                "compiled_engine:scheduler_errors",
                "Illegal transitions the scheduler counted; always 0 unless there is a bug.",
                status.num_scheduler_errors,
            ),
            (
                "compiled_engine:recompiles",
                "Compilations after warm-up.",
                status.num_recompiles,
            ),
        ):
            yield self._counter(name, text, value)

    def _server_gauges(self) -> Iterable[Metric]:
        yield self._gauge(
            "compiled_engine:ready", "1 while requests are taken.", float(self._engine.is_ready)
        )
        yield self._gauge(
            "compiled_engine:step_age_seconds",
            "Age of the last finished step while there is work.",
            self._engine.step_age_s,
        )
        yield self._gauge(
            "compiled_engine:unfinished_requests",
            "Sequences admitted by the server and not finished.",
            self._admission.num_requests,
        )
        yield self._gauge(
            "compiled_engine:queued_prompt_tokens",
            "Prompt tokens of unfinished sequences.",
            self._admission.num_tokens,
        )
        yield self._gauge(
            "compiled_engine:paused",
            "1 while `/pause_generation` holds the engine.",
            float(self._engine.status.is_paused),
        )
        rejects = CounterMetricFamily(
            "compiled_engine:rejected_requests", "Refusals (429) by limit.", labels=["limit"]
        )
        for limit, count in self._admission.num_rejects.items():
            rejects.add_metric([limit], count)
        yield rejects
