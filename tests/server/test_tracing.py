"""Traces: spans of calls in memory, and what a collector receives by OTLP."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from aiohttp import web
from openai import AsyncOpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from compiled_engine.server.otel import OtelTracing
from compiled_engine.server.sockets import bind_socket
from tests.helpers.fake_engine import FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

USER = [{"role": "user", "content": "hi"}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def _traced(test, **engine_options) -> list[ReadableSpan]:
    """The spans that ended while `test` ran, in the order of their ends."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def body(server: Server):
        server.state.tracing = OtelTracing(provider)
        await test(server)

    with_server(body, engine=FakeEngine(**engine_options))
    return list(exporter.get_finished_spans())


def _calls(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.kind is SpanKind.SERVER]


def test_a_call_is_a_span_below_the_clients_with_its_phases_below_it():
    async def body(server: Server):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "call-1"}
        request = {"messages": USER, "temperature": 0.5, "seed": 3, "max_tokens": 9, "top_k": 5}
        status, _ = await server.post("/v1/chat/completions", request, headers=headers)
        assert status == 200

    *phases, call = _traced(body, num_cached_tokens=4, delay_s=0.005)
    assert call.name == f"chat {MODEL}"
    assert format(call.context.trace_id, "032x") == TRACE
    assert format(call.parent.span_id, "016x") == PARENT
    assert dict(call.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "compiled-engine",
        "url.path": "/v1/chat/completions",
        "http.request.method": "POST",
        "compiled_engine.request.id": "call-1",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.input_tokens": len("[user]hi\n[assistant]"),
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 4,
    }
    assert call.status.status_code is StatusCode.UNSET
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert all(span.parent.span_id == call.context.span_id for span in phases)
    edges = [call.start_time, phases[0].start_time]
    for span in phases:
        assert span.start_time == edges[-1]
        edges.append(span.end_time)
    edges.append(call.end_time)
    assert edges == sorted(edges)
    # Five tokens after the first one, each 5 ms after the one before.
    assert 0.02e9 < phases[2].end_time - phases[2].start_time < 5e9


def test_choices_share_a_span_and_a_prompt_counts_once():
    async def body(server: Server):
        request = {"prompt": ["ab", "c"], "n": 2}
        assert (await server.post("/v1/completions", request))[0] == 200
        await server.stream("/generate", {"text": "abc"})

    spans = _traced(body, num_cached_tokens=1)
    first, second = _calls(spans)
    assert (first.name, second.name) == (f"text_completion {MODEL}",) * 2
    assert first.attributes["gen_ai.request.choice.count"] == 2
    assert first.attributes["gen_ai.usage.input_tokens"] == 3
    assert first.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert first.attributes["gen_ai.usage.output_tokens"] == 24
    below = [s for s in spans if s.parent and s.parent.span_id == first.context.span_id]
    indices = [span.attributes["compiled_engine.choice.index"] for span in below]
    assert sorted(indices) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert first.parent is None


def test_calls_that_fail_say_why():
    async def body(server: Server):
        assert (await server.post("/v1/completions", {"prompt": "secret", "n": 0}))[0] == 400
        server.engine.fail_with = "broken"
        assert (await server.post("/v1/completions", {"prompt": "secret"}))[0] == 500
        server.engine.fail_with = None
        server.engine.delay_s = 0.02
        request = {"prompt": "secret", "stream": True, "max_tokens": 300}
        for breaks in (True, False):
            async with server.session.post(
                server.url + "/v1/completions", json=request
            ) as response:
                await response.content.readuntil(b"\n\n")
                if breaks:
                    server.engine.fail_with = "broken later"
                    await response.read()
                    server.engine.fail_with = None
        await eventually(lambda: server.engine.num_running == 0)
        await eventually(lambda: server.state.admission.num_requests == 0)

    spans = _traced(body, reply=text_reply("x" * 400))
    calls = _calls(spans)
    assert [span.attributes["error.type"] for span in calls] == [
        "invalid_request_error",
        "server_error",
        "server_error",
        "client_left",
    ]
    assert all(span.status.status_code is StatusCode.ERROR for span in calls)
    assert [span.status.description for span in calls][1:3] == ["broken", "broken later"]
    assert calls[3].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert calls[3].attributes["gen_ai.usage.output_tokens"] > 0
    assert "secret" not in "".join(span.to_json() for span in spans)


def test_background_answers_are_traced_to_their_end():
    async def body(server: Server):
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
            begun = await client.responses.create(model=MODEL, input="hi", background=True)
            while (await client.responses.retrieve(begun.id)).status != "completed":
                await asyncio.sleep(0.01)

    (call,) = _calls(_traced(body, delay_s=0.01))
    assert call.attributes["gen_ai.usage.output_tokens"] == 6
    assert call.end_time - call.start_time > 0.05e9


def test_a_call_that_its_client_does_not_record_is_not_recorded():
    async def body(server: Server):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await server.post("/v1/completions", {"prompt": "a"}, headers=headers))[0] == 200
        headers = {"traceparent": "nonsense"}
        assert (await server.post("/v1/completions", {"prompt": "a"}, headers=headers))[0] == 200

    (call,) = _calls(_traced(body))
    assert call.parent is None


def test_a_collector_receives_the_spans_by_otlp(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "fleet-7")
    received: list[tuple[str, bytes]] = []

    async def take(request: web.Request) -> web.Response:
        received.append((request.path, await request.read()))
        return web.Response(content_type="application/x-protobuf")

    async def body(server: Server):
        app = web.Application()
        app.router.add_post("/{path:.*}", take)
        runner = web.AppRunner(app)
        await runner.setup()
        sock = bind_socket("127.0.0.1", 0)
        await web.SockSite(runner, sock).start()
        tracing = OtelTracing.to_endpoint(f"http://127.0.0.1:{sock.getsockname()[1]}")
        server.state.tracing = tracing
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200
        await asyncio.to_thread(tracing.close)
        server.state.tracing = None
        await runner.cleanup()
        sock.close()

    with_server(body)
    ((path, data),) = received
    assert path == "/v1/traces"
    (group,) = ExportTraceServiceRequest.FromString(data).resource_spans
    attributes = {entry.key: entry.value.string_value for entry in group.resource.attributes}
    assert attributes["service.name"] == "fleet-7"
    assert attributes["service.version"]
    names = [span.name for span in group.scope_spans[0].spans]
    assert names == ["queue", "prefill", "decode", f"text_completion {MODEL}"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_the_extra_the_flag_ends_with_code_2(is_installed):
    blocked = "" if is_installed else "sys.modules['opentelemetry'] = None; "
    # The port is taken after the check: a wrong host ends the start in either case.
    code = (
        f"import sys; {blocked}from compiled_engine import cli\n"
        "sys.exit(cli.main(['serve', '--otlp-traces-endpoint', 'http://127.0.0.1:9',"
        " '--host', 'no such host']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = "--host" if is_installed else "pip install 'compiled-engine[otel]'"
    assert said in done.stderr
