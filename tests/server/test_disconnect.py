"""Clients that leave, overload, slow readers, and the graceful stop."""

import asyncio
import json
import signal
import socket
import time

import aiohttp
import pytest

from compiled_engine.config import ServerConfig
from compiled_engine.errors import ConfigError
from compiled_engine.request import ModelLimits
from compiled_engine.server import app as app_module
from compiled_engine.server import sse
from compiled_engine.server.app import (
    EXIT_ENGINE_DIED,
    make_app,
    serve_app,
)
from compiled_engine.server.sockets import bind_socket
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine, text_reply
from tests.helpers.server_harness import Server, eventually, with_server

USER = [{"role": "user", "content": "hi"}]
LONG = "x" * 400


def _slow_engine(**kwargs) -> FakeEngine:
    return FakeEngine(text_reply(LONG), delay_s=0.01, **kwargs)


async def _is_idle(server: Server) -> None:
    await eventually(lambda: server.engine.num_running == 0, timeout_s=1.0)
    await eventually(lambda: server.state.admission.num_requests == 0, timeout_s=1.0)
    assert server.state.admission.num_tokens == 0
    sent = server.engine.num_tokens_sent
    await asyncio.sleep(0.05)
    assert server.engine.num_tokens_sent == sent


def test_streams_closed_after_the_first_delta_are_aborted():
    async def one(server: Server, n: int):
        request = {"messages": USER, "stream": True, "n": n}
        response = await server.session.post(server.url + "/v1/chat/completions", json=request)
        await response.content.readuntil(b"\n\n")
        response.close()

    async def body(server: Server):
        await asyncio.gather(*(one(server, 1) for _ in range(80)), *(one(server, 4) for _ in "abc"))
        await _is_idle(server)
        assert len(server.engine.aborted) == 92
        _, text = await server.get("/metrics")
        assert "compiled_engine:aborted_requests_total 83.0" in text
        assert 'finished_reason="abort",model_name="test/model"} 92.0' in text
        status, answer = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert (status, answer["choices"][0]["text"]) == (200, "xx")

    with_server(body, engine=_slow_engine())


@pytest.mark.parametrize("n", [1, 4])
def test_whole_answers_nobody_waits_for_are_aborted(n):
    async def body(server: Server):
        tasks = [
            asyncio.create_task(server.post("/v1/completions", {"prompt": "a", "n": n}))
            for _ in range(20)
        ]
        await eventually(lambda: len(server.engine.submitted) == 20 * n)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _is_idle(server)
        assert len(server.engine.aborted) == 20 * n

    with_server(body, engine=FakeEngine(delay_s=0.2))


def test_overload_requests_get_429_with_retry_after():
    config = ServerConfig(port=0, max_queued_requests=4)

    async def body(server: Server):
        request = {"messages": USER, "n": 4}
        running = asyncio.create_task(server.post("/v1/chat/completions", request))
        await eventually(lambda: server.engine.num_running == 4)
        async with server.session.post(
            server.url + "/v1/chat/completions", json={"messages": USER}
        ) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        status, answer = await server.post("/v1/chat/completions", {"messages": USER, "n": 5})
        assert status == 429
        running.cancel()
        await _is_idle(server)
        status, answer = await server.post("/v1/completions", {"prompt": ["a"] * 5})
        assert (status, answer["error"]["param"]) == (400, "n")
        _, text = await server.get("/metrics")
        assert 'rejected_requests_total{limit="requests"} 2.0' in text

    with_server(body, engine=_slow_engine(), config=config)


def test_overload_prompt_tokens_get_429():
    config = ServerConfig(port=0, max_queued_tokens=100)

    async def body(server: Server):
        running = asyncio.create_task(server.post("/v1/completions", {"prompt": "x" * 60}))
        await eventually(lambda: server.engine.num_running == 1)
        status, _ = await server.post("/v1/completions", {"prompt": "x" * 60})
        assert status == 429
        status, answer = await server.post("/v1/completions", {"prompt": "x" * 60, "n": 2})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert (await running)[0] == 200

    with_server(body, engine=_slow_engine(), config=config)


def test_slow_reader_does_not_slow_others_and_gets_everything():
    limits = ModelLimits(max_model_len=60_000, vocab_size=258, max_total_tokens=60_000)

    async def body(server: Server):
        request = {"messages": USER, "stream": True}
        async with server.session.post(
            server.url + "/v1/chat/completions", json=request
        ) as response:
            await response.content.readuntil(b"\n\n")
            started = time.monotonic()
            status, _ = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert status == 200
            assert time.monotonic() - started < 1.0
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n")

    engine = FakeEngine(text_reply("y" * 3000), tokens_per_event=1, limits=limits)
    with_server(body, engine=engine)


def test_reader_that_stops_is_dropped_after_a_while(monkeypatch):
    monkeypatch.setattr(sse, "WRITE_TIMEOUT_S", 0.3)
    limits = ModelLimits(max_model_len=600_000, vocab_size=258, max_total_tokens=600_000)

    async def body(server: Server):
        host, port = server.url.removeprefix("http://").split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        body = json.dumps({"messages": USER, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        await eventually(lambda: len(server.engine.submitted) == 1)
        await eventually(lambda: len(server.engine.aborted) == 1, timeout_s=10)
        assert server.state.admission.num_requests == 0
        sock.close()

    engine = FakeEngine(text_reply("\x01" * 500_000), tokens_per_event=4000, limits=limits)
    with_server(body, engine=engine)


def _serve(engine: FakeEngine, test, *, drain_timeout_s: float = 5.0) -> int:
    """Runs `serve_app` in this process; `test` gets the server and ends it by signals."""
    config = ServerConfig(port=0, drain_timeout_s=drain_timeout_s)

    async def run() -> int:
        app = make_app(engine, ByteTokenizer(), config, "m", created=0, default_sampling={})
        sock = bind_socket("127.0.0.1", 0)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        started, ready = asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(
            serve_app(app, sock, config, on_started=started.set, on_ready=ready.set)
        )
        await started.wait()
        await ready.wait()
        async with aiohttp.ClientSession() as session:
            await test(Server(url, session, app, engine))
            return await serving

    return asyncio.run(run())


async def _open_stream(server: Server):
    request = {"messages": USER, "stream": True}
    response = await server.session.post(server.url + "/v1/chat/completions", json=request)
    await response.content.readuntil(b"\n\n")
    return response


def test_serve_app_idle_stops_at_once_with_0():
    async def body(server: Server):
        assert (await server.get("/ready"))[0] == 200
        signal.raise_signal(signal.SIGTERM)

    started = time.monotonic()
    engine = FakeEngine()
    assert _serve(engine, body) == 0
    assert time.monotonic() - started < 1.5
    assert engine.is_closed


def test_serve_app_drain_lets_streams_finish_and_refuses_new_work():
    async def body(server: Server):
        response = await _open_stream(server)
        signal.raise_signal(signal.SIGTERM)
        await eventually(lambda: server.state.drain.is_draining)
        assert (await server.get("/ready"))[0] == 503
        assert (await server.get("/health"))[0] == 200
        status, answer = await server.post("/v1/chat/completions", {"messages": USER})
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
        text = await response.text()
        assert '"finish_reason":"stop"' in text
        assert text.endswith("data: [DONE]\n\n")

    assert _serve(FakeEngine(text_reply("x" * 30), delay_s=0.02), body) == 0


def test_serve_app_deadline_ends_streams_with_an_error():
    async def body(server: Server):
        response = await _open_stream(server)
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "a", "n": 2}))
        await eventually(lambda: server.engine.num_running == 3)
        signal.raise_signal(signal.SIGINT)
        text = await response.text()
        assert '"message":"the server is shutting down"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await whole)[0] == 503
        assert server.engine.num_running == 0

    engine = FakeEngine(text_reply(LONG), delay_s=0.2)
    assert _serve(engine, body, drain_timeout_s=0.3) == 0


def test_serve_app_second_signal_ends_at_once():
    async def body(server: Server):
        response = await _open_stream(server)
        signal.raise_signal(signal.SIGINT)
        await eventually(lambda: server.state.drain.is_draining)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()

    started = time.monotonic()
    assert _serve(_slow_engine(), body, drain_timeout_s=60.0) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 2.0


def test_serve_app_engine_death_answers_503_then_exits():
    async def body(server: Server):
        response = await _open_stream(server)
        server.engine.kill("the engine process has ended (exit code -9)")
        assert "exit code -9" in await response.text()
        for path in ("/health", "/ready"):
            assert (await server.get(path))[0] == 503
        status, _ = await server.post("/v1/chat/completions", {"messages": USER})
        assert status == 503
        signal.raise_signal(signal.SIGTERM)

    assert _serve(_slow_engine(), body) == EXIT_ENGINE_DIED


def test_connection_whose_request_never_arrives_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app_module, "_IDLE_TIMEOUT_S", 0.3)

    async def body(server: Server):
        port = int(server.url.rpartition(":")[2])
        for head in (b"", b"GET /health HTTP/1.1\r\nHost"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert await asyncio.wait_for(reader.read(), 3.0) == b""
            writer.close()
            await writer.wait_closed()
        signal.raise_signal(signal.SIGTERM)

    assert _serve(FakeEngine(), body) == 0


def test_bind_socket_taken_port_is_one_line():
    # Taken at once, not only when the server starts: a second start must not load a model.
    sock = bind_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
        bind_socket("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    sock.close()
    bind_socket("127.0.0.1", port).close()
    with pytest.raises(ConfigError, match="--host"):
        bind_socket("no such host", 0)
