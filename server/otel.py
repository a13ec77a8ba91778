"""Records calls as OpenTelemetry spans and sends them by OTLP over HTTP.

A call is a span of kind SERVER, a child of the client's where `traceparent` names one; below it
lie `queue`, `prefill` and `decode` of each sequence. Attributes follow the semantic conventions
for generative AI; texts of prompts and answers are never among them. Imported by
`tracing.load_tracing` alone, since it needs the extra `otel`.

Source: OpenTelemetry's semantic conventions, gen-ai-spans; vLLM's `--otlp-traces-endpoint`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from compiled_engine import __version__
from compiled_engine.errors import EngineError
from compiled_engine.request import Request, SamplingParams
from compiled_engine.server.tracing import SequenceCost

_SERVICE = "compiled-engine"
_DEFAULT_PATH = "/v1/traces"
_TEXT_PATHS = frozenset({"/v1/completions", "/generate"})
# Sampling parameters that have an attribute of the same meaning.
_PARAMS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


class OtelTracing:
    """Records calls; see `tracing.Tracing`.

    Args:
        provider: an SDK provider of tracers, with the processors that take the spans.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_SERVICE, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> OtelTracing:
        """Sends spans in batches, in a thread; those that nobody takes in time are dropped.

        Args:
            endpoint: address of a collector; without a path, OTLP's own is added.
        """
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + _DEFAULT_PATH
        provider = TracerProvider(resource=_resource())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def begin(
        self, headers: Mapping[str, str], *, path: str, request_id: str, started_s: float
    ) -> OtelCall:
        """See `tracing.Tracing.begin`."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        operation = "text_completion" if path in _TEXT_PATHS else "chat"
        clock = _Clock()
        span = self._tracer.start_span(
            operation,
            context=self._propagator.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            start_time=clock.at(started_s),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _SERVICE,
                "url.path": path,
                "http.request.method": "POST",
                "compiled_engine.request.id": request_id,
            },
        )
        return OtelCall(self._tracer, span, operation, clock)

    def close(self) -> None:
        """See `tracing.Tracing.close`."""
        self._provider.shutdown()


def _resource() -> Resource:
    attributes = {"service.version": __version__}
    named = "OTEL_SERVICE_NAME" in os.environ
    if not named and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = _SERVICE
    return Resource.create(attributes)


class _Clock:
    """Turns readings of `time.perf_counter()` into Unix time, ns, as of when it was made."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def at(self, seconds: float) -> int:
        return self._offset_ns + round(seconds * 1e9)


class OtelCall:
    """One call; see `tracing.CallTrace`.

    Args:
        tracer: makes the spans below it.
        span: the call's own, begun.
        operation: beginning of its name.
        clock: of its times.
    """

    def __init__(self, tracer: Any, span: Any, operation: str, clock: _Clock) -> None:
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._clock = clock
        # By the identity of its list of ids: a prompt counts once for all its sequences.
        self._prompts: dict[int, list[SequenceCost]] = {}
        self._prompt_of: list[int] = []

    def describe(self, model: str, requests: Sequence[Request]) -> None:
        """See `tracing.CallTrace.describe`."""
        if not self._span.is_recording():
            return
        self._span.update_name(f"{self._operation} {model}")
        lengths = {id(r.prompt_token_ids): len(r.prompt_token_ids) for r in requests}
        self._prompt_of = [id(r.prompt_token_ids) for r in requests]
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": sum(lengths.values()),
                **_request_attributes(requests[0].params),
            }
        )
        if len(requests) > len(lengths):
            self._span.set_attribute("gen_ai.request.choice.count", len(requests) // len(lengths))

    def add_sequence(self, cost: SequenceCost) -> None:
        """See `tracing.CallTrace.add_sequence`."""
        if not self._span.is_recording():
            return
        self._prompts.setdefault(self._prompt_of[cost.index], []).append(cost)
        if cost.first_s is None:
            return
        admitted_s = cost.submitted_s
        if cost.queue_s is not None:
            admitted_s = min(cost.submitted_s + cost.queue_s, cost.first_s)
            self._child("queue", cost, cost.submitted_s, admitted_s)
        self._child("prefill", cost, admitted_s, cost.first_s)
        self._child("decode", cost, cost.first_s, cost.last_s)

    def _child(self, name: str, cost: SequenceCost, begin_s: float, end_s: float) -> None:
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            start_time=self._clock.at(begin_s),
            attributes={"compiled_engine.choice.index": cost.index},
        )
        span.end(self._clock.at(end_s))

    def fail(self, error: BaseException) -> None:
        """See `tracing.CallTrace.fail`."""
        if isinstance(error, EngineError):
            kind, text = error.error_type, error.message
        elif isinstance(error, (asyncio.CancelledError, ConnectionResetError)):
            kind, text = "client_left", "the client left"
        else:
            kind, text = type(error).__name__, ""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, text))

    def end(self) -> None:
        """See `tracing.CallTrace.end`."""
        costs = [cost for group in self._prompts.values() for cost in group]
        costs.sort(key=lambda cost: cost.index)
        if costs and self._span.is_recording():
            cached = (min(c.num_cached_tokens for c in g) for g in self._prompts.values())
            self._span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": [cost.reason for cost in costs],
                    "gen_ai.usage.output_tokens": sum(cost.num_tokens for cost in costs),
                    "gen_ai.usage.cache_read.input_tokens": sum(cached),
                }
            )
        self._span.end()


def _request_attributes(params: SamplingParams) -> dict[str, Any]:
    values = {name: getattr(params, field) for field, name in _PARAMS.items()}
    return {name: value for name, value in values.items() if value is not None}
