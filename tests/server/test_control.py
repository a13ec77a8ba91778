"""Routes that generate nothing, the API key, error shapes, metrics."""

import asyncio
import base64
import hashlib
import logging
import re

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from compiled_engine.config import ServerConfig
from compiled_engine.server.app import shorten_bad_http
from compiled_engine.server.openapi import openapi_document
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine
from tests.helpers.server_harness import MODEL, Server, with_server

USER = [{"role": "user", "content": "hi"}]


def test_models_lists_the_served_one_with_its_length():
    async def body(server: Server):
        card = {
            "id": MODEL,
            "created": 1_700_000_000,
            "max_model_len": 512,
            "object": "model",
            "owned_by": "compiled-engine",
        }
        assert await server.get("/v1/models") == (200, {"data": [card], "object": "list"})
        assert await server.get(f"/v1/models/{MODEL}") == (200, card)
        status, answer = await server.get("/v1/models/other")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await server.post("/v1/completions", {"model": "gpt", "prompt": "a"})
        assert (status, answer["error"]["param"]) == (404, "model")

    with_server(body)


def test_health_and_ready_tell_loading_from_dead():
    async def body(server: Server):
        assert (await server.get("/health"))[0] == 200
        status, answer = await server.get("/ready")
        assert (status, answer["phase"]) == (503, "loading")
        status, answer = await server.post("/v1/chat/completions", {"messages": USER})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        server.engine.kill("the engine process has ended (exit code -9)")
        for path in ("/health", "/ready"):
            status, answer = await server.get(path)
            assert (status, answer["status"]) == (503, server.engine.dead_reason)

    with_server(body, engine=FakeEngine(limits=None))


def test_tokenize_and_detokenize_round_trip():
    async def body(server: Server):
        status, answer = await server.post("/tokenize", {"prompt": "hé"})
        assert (status, answer["tokens"]) == (200, [256, *"hé".encode()])
        assert (answer["count"], answer["max_model_len"]) == (4, 512)
        _, text = await server.post("/detokenize", {"tokens": answer["tokens"]})
        assert text == {"prompt": "<bos>hé"}
        _, answer = await server.post("/tokenize", {"messages": USER})
        assert bytes(answer["tokens"]).decode() == "[user]hi\n[assistant]"
        status, answer = await server.post("/tokenize", {})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        status, answer = await server.post("/detokenize", {"tokens": [258]})
        assert (status, answer["error"]["param"]) == (400, "tokens")

    with_server(body, tokenizer=ByteTokenizer(adds_bos=True))


def test_api_key_is_asked_for_before_the_route_table():
    config = ServerConfig(port=0, api_key="sëcret")

    async def body(server: Server):
        for path in ("/v1/models", "/nothing/here", "/openapi.json", "/version", "/"):
            status, answer = await server.get(path)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for path in ("/health", "/ready", "/metrics"):
            assert (await server.get(path))[0] == 200
        for value in ("Bearer wrong", "Basic sëcret", "sëcret", "Bearer"):
            headers = {"Authorization": value}
            assert (await server.get("/v1/models", headers=headers))[0] == 401
        headers = {"Authorization": "Bearer sëcret"}
        assert (await server.get("/v1/models", headers=headers))[0] == 200
        assert (await server.get("/nothing", headers=headers))[0] == 404
        async with server.session.get(server.url + "/", headers={"Accept": "text/html"}) as page:
            assert (page.status, page.content_type) == (401, "text/html")

    with_server(body, config=config)


def test_errors_have_the_openai_shape():
    async def body(server: Server):
        status, answer = await server.get("/nothing")
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
        async with server.session.get(server.url + "/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert "does not take GET" in (await response.json())["error"]["message"]
        for given, kept in (("abc-1", True), ("x" * 200, False)):
            headers = {"X-Request-ID": given}
            async with server.session.get(server.url + "/version", headers=headers) as response:
                assert (response.headers["X-Request-ID"] == given) is kept

    with_server(body)


def test_a_bug_becomes_500_without_its_text():
    def reply(request):
        raise KeyError("private")

    async def body(server: Server):
        status, answer = await server.post("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["message"]) == (500, "internal error")
        assert server.state.admission.num_requests == 0

    with_server(body, engine=FakeEngine(reply))


def test_metrics_have_vllm_names_and_parse():
    async def body(server: Server):
        await server.post("/v1/completions", {"prompt": "abc", "n": 2})
        await server.stream("/v1/completions", {"prompt": "abc", "max_tokens": 2})
        _, text = await server.get("/metrics")
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                samples[sample.name, *sorted(labels.items())] = sample.value
        expected = {
            ("vllm:num_requests_running",): 0,
            ("vllm:num_requests_waiting",): 0,
            ("vllm:kv_cache_usage_perc",): 0.25,
            ("vllm:prompt_tokens_total",): 0,
            ("vllm:generation_tokens_total",): 0,
            ("vllm:num_preemptions_total",): 0,
            ("vllm:prefix_cache_queries_total",): 0,
            ("vllm:prefix_cache_hits_total",): 0,
            ("vllm:time_to_first_token_seconds_count",): 3,
            ("vllm:inter_token_latency_seconds_count",): 11,
            ("vllm:request_time_per_output_token_seconds_count",): 3,
            ("vllm:e2e_request_latency_seconds_count",): 3,
            ("vllm:request_success_total", ("finished_reason", "stop")): 2,
            ("vllm:request_success_total", ("finished_reason", "length")): 1,
            ("vllm:request_success_total", ("finished_reason", "abort")): 0,
            ("compiled_engine:pages", ("state", "active")): 25,
            ("compiled_engine:pages", ("state", "cached")): 30,
            ("compiled_engine:pages", ("state", "free")): 45,
            ("compiled_engine:aborted_requests_total",): 0,
            ("compiled_engine:rejected_requests_total", ("limit", "requests")): 0,
        }
        assert {name: samples[name] for name in expected} == expected

    with_server(body)


def test_openapi_covers_every_route():
    async def body(server: Server):
        status, document = await server.get("/openapi.json")
        assert status == 200
        assert (await server.get("/version"))[1] == {"version": document["info"]["version"]}
        paths = set(document["paths"])
        assert paths == {
            "/v1/models",
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/v1/responses/{response_id}/input_items",
            "/tokenize",
            "/detokenize",
            "/health",
            "/ready",
            "/metrics",
            "/version",
            "/progress",
            "/generate",
            "/server_info",
            "/get_server_info",
            "/model_info",
            "/get_model_info",
            "/get_weight_version",
            "/v1/loads",
            "/console/data",
            "/abort_request",
            "/flush_cache",
            "/pause_generation",
            "/continue_generation",
            "/start_profile",
            "/stop_profile",
        }

    with_server(body)


def test_openapi_document_references_resolve():
    document = openapi_document("1")
    text = msgspec.json.encode(document).decode()
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(fields)


def test_page_is_self_contained():
    async def body(server: Server):
        async with server.session.get(server.url + "/") as response:
            text = await response.text()
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        elements = re.findall(r"<(style|script)>(.*?)</\1>", text, re.DOTALL)
        assert {kind for kind, _ in elements} == {"style", "script"}
        assert len(elements) == text.count("<style") + text.count("<script")
        for _, content in elements:
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
        assert policy.count("sha256-") == len(elements)
        assert "unsafe" not in policy
        # The one address in it is the name space of the icon, which is inside the page.
        assert set(re.findall(r"https?://[\w.]+[\w./]*", text)) == {
            "http://www.w3.org/2000/svg",
        }
        assert re.findall(r'(?:src|href)="(?!data:|#)', text) == []

    with_server(body)


def test_bytes_that_are_no_http_are_logged_in_one_line(caplog):
    logger = logging.getLogger("aiohttp.server")

    async def body(server: Server):
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
        await writer.wait_closed()

    logger.addFilter(shorten_bad_http)
    try:
        with_server(body)
    finally:
        logger.removeFilter(shorten_bad_http)
    lines = [r for r in caplog.records if r.name == "aiohttp.server"]
    assert len(lines) == 1
    assert lines[0].exc_info is None
    assert "Content-Length" in lines[0].getMessage()
