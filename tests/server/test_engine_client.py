"""`IpcEngineClient` against a real process: streams, aborts, and every way to die."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
import urllib.request

import pytest

from compiled_engine.commands.served_engine import ServedEngine, restart_when_dead
from compiled_engine.config import ServerConfig
from compiled_engine.errors import ConflictError, EngineUnavailableError, RequestAbortedError
from compiled_engine.ipc import new_endpoint, remove_endpoint
from compiled_engine.request import Request, SamplingParams, TokenEvent
from compiled_engine.server.app import make_app, run_server
from compiled_engine.server.engine_client import IpcEngineClient, running_client
from compiled_engine.server.mailbox import Mailbox
from compiled_engine.server.sockets import bind_socket
from tests.helpers import fake_engine_process
from tests.helpers.fake_engine import ByteTokenizer
from tests.helpers.server_harness import eventually


def _request(request_id: int, *, prompt: int = 9, max_tokens: int = 5) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[prompt],
        params=SamplingParams(max_tokens=max_tokens),
    )


def _with_client(test, *, timeout_s: float = 30.0) -> None:
    context = multiprocessing.get_context("spawn")
    frames = context.SimpleQueue()
    endpoint = new_endpoint()
    process = context.Process(target=fake_engine_process.main, args=(endpoint, frames), daemon=True)
    process.start()

    async def run() -> None:
        client = IpcEngineClient(endpoint, process, timeout_s)
        async with running_client(client):
            with pytest.raises(EngineUnavailableError, match="not ready"):
                client.submit(_request(1))
            await eventually(lambda: client.is_ready, timeout_s=20)
            await test(client, process, frames)

    try:
        asyncio.run(run())
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
            process.join(2)
        if process.is_alive():
            process.kill()
        process.join()
        remove_endpoint(endpoint)


async def _read(stream) -> list[int]:
    token_ids: list[int] = []
    async for event in stream:
        token_ids += event.token_ids
        if event.finish_reason is not None:
            break
    return token_ids


def test_submit_streams_tokens_and_one_frame_carries_one_turn():
    async def body(client, process, frames):
        assert client.limits == fake_engine_process.LIMITS
        streams = [client.submit(_request(i)) for i in (1, 2, 3)]
        client.abort(2)
        results = await asyncio.gather(_read(streams[0]), _read(streams[2]))
        assert results == [[0, 1, 2, 3, 4]] * 2
        assert await _read(streams[1]) == []
        assert frames.get() == ([1, 2, 3], [2])

    _with_client(body)


def test_close_and_cancellation_abort():
    async def body(client, process, frames):
        unread = client.submit(_request(1, max_tokens=900))
        await unread.aclose()
        await unread.aclose()
        waiting = asyncio.create_task(_read(client.submit(_request(2, prompt=2))))
        await asyncio.sleep(0.02)
        waiting.cancel()
        done = client.submit(_request(3, max_tokens=1))
        await _read(done)
        await done.aclose()
        await asyncio.sleep(0.1)
        seen = []
        while not frames.empty():
            seen.append(frames.get())
        assert [i for submits, _ in seen for i in submits] == [1, 2, 3]
        assert [i for _, aborts in seen for i in aborts] == [1, 2]

    _with_client(body)


@pytest.mark.parametrize(
    ("kill", "reason"),
    [("signal", "exit code -9"), ("fatal", "the engine stopped: told to")],
)
def test_engine_death_ends_everything_within_a_second(kill, reason):
    async def body(client, process, frames):
        tasks = [asyncio.create_task(_read(client.submit(_request(i, prompt=2)))) for i in range(5)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        if kill == "signal":
            os.kill(process.pid, signal.SIGKILL)
        else:
            tasks.append(asyncio.create_task(_read(client.submit(_request(9, prompt=1)))))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < 1.0
        assert all(isinstance(r, EngineUnavailableError) and reason in str(r) for r in results)
        assert client.is_dead
        assert not client.is_ready
        with pytest.raises(EngineUnavailableError, match="engine"):
            client.submit(_request(10))

    _with_client(body)


def test_stopped_process_counts_as_hung_and_may_come_back():
    async def body(client, process, frames):
        task = asyncio.create_task(_read(client.submit(_request(1, prompt=2))))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailableError, match="silent for more than"):
            await asyncio.wait_for(task, 2.5)
        assert client.dead_reason is not None
        assert not client.is_dead
        assert client.status.step_age_s >= 0.6
        with pytest.raises(EngineUnavailableError):
            client.submit(_request(2))
        os.kill(process.pid, signal.SIGCONT)
        await eventually(lambda: client.is_ready)
        assert client.status.step_age_s == 0.0
        assert await _read(client.submit(_request(3))) == [0, 1, 2, 3, 4]

    _with_client(body, timeout_s=0.6)


def test_step_that_hangs_counts_as_hung():
    async def body(client, process, frames):
        with pytest.raises(EngineUnavailableError, match="finished no step"):
            await asyncio.wait_for(_read(client.submit(_request(1, prompt=3))), 3)

    _with_client(body, timeout_s=5.0)


def test_control_calls_are_answered_or_refused():
    async def body(client, process, frames):
        result = await client.control("start_profile", folder="/traces", num_steps=2)
        assert result.path == "/traces"
        await asyncio.gather(*(client.control("pause") for _ in range(3)))
        stream = client.submit(_request(1, max_tokens=1000))
        await anext(stream)
        assert stream.queue_s == 0.25
        await anext(stream)
        # Each frame brought one more.
        assert stream.num_retractions >= 2
        with pytest.raises(ConflictError, match="busy"):
            await client.control("flush_cache")
        client.cancel(1, RequestAbortedError("told to"))
        with pytest.raises(RequestAbortedError, match="told to"):
            await _read(stream)
        client.cancel(1, RequestAbortedError("again"))
        await client.control("flush_cache")

    _with_client(body)


def test_control_call_ends_with_the_engine():
    async def body(client, process, frames):
        os.kill(process.pid, signal.SIGSTOP)
        call = asyncio.create_task(client.control("pause"))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="exit code -9"):
            await call
        with pytest.raises(EngineUnavailableError):
            await client.control("pause")

    _with_client(body)


def test_engine_that_hangs_twice_as_long_is_given_up():
    async def body(client, process, frames):
        os.kill(process.pid, signal.SIGSTOP)
        stream = client.submit(_request(2))
        with pytest.raises(EngineUnavailableError, match="silent"):
            await _read(stream)
        assert client.is_hung
        assert not client.is_dead
        assert client.step_age_s > 0.5
        await eventually(lambda: client.is_dead, timeout_s=5)
        assert "given up" in client.dead_reason

    _with_client(body, timeout_s=0.5)


def test_reconnect_takes_a_new_engine_at_the_same_address():
    async def body(client, process, frames):
        stream = client.submit(_request(2))
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            await _read(stream)
        await eventually(lambda: client.is_dead)
        second = multiprocessing.get_context("spawn").Process(
            target=fake_engine_process.main, args=(client._endpoint, frames), daemon=True
        )
        second.start()
        client._process = second  # otherwise the watch soon says that the first one is dead
        await client.reconnect()
        assert client.dead_reason is None
        assert client.limits is None
        await eventually(lambda: client.is_ready, timeout_s=20)
        assert await _read(client.submit(_request(5, max_tokens=3))) == [0, 1, 2]
        await client.close()
        await asyncio.to_thread(second.join, 5)
        assert second.exitcode == 0

    _with_client(body)


class _Child:
    """A fake engine process that can be started again, as `EngineChild` can."""

    def __init__(self, endpoint: str) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._arguments = (endpoint, self._context.SimpleQueue())
        self.start()

    def start(self) -> None:
        self.process = self._context.Process(
            target=fake_engine_process.main, args=self._arguments, daemon=True
        )
        self.process.start()

    def is_alive(self) -> bool:
        return self.process.is_alive()

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    def restart(self) -> None:
        self.process.kill()
        self.process.join()
        self.start()


def test_served_engine_is_revived_as_often_as_it_may():
    endpoint = new_endpoint()
    child = _Child(endpoint)

    async def run() -> None:
        client = ServedEngine(endpoint, child, 30.0, num_restarts=1)
        async with running_client(client):
            restarts = asyncio.create_task(restart_when_dead(client, child.restart))
            await eventually(lambda: client.limits is not None, timeout_s=20)
            client.is_text_ready = True
            first = child.process
            first.kill()
            await eventually(lambda: child.process is not first and client.is_ready, timeout_s=20)
            assert await _read(client.submit(_request(1, max_tokens=2))) == [0, 1]
            child.process.kill()
            await eventually(lambda: client.is_dead)
            restarts.cancel()

    try:
        asyncio.run(run())
    finally:
        child.process.kill()
        child.process.join()
        remove_endpoint(endpoint)


def test_run_server_real_socket_and_process_end_to_end():
    context = multiprocessing.get_context("spawn")
    frames = context.SimpleQueue()
    endpoint = new_endpoint()
    process = context.Process(target=fake_engine_process.main, args=(endpoint, frames), daemon=True)
    process.start()
    config = ServerConfig(port=0)
    client = IpcEngineClient(endpoint, process, 30.0)
    app = make_app(client, ByteTokenizer(), config, "m", created=0, default_sampling={})
    sock = bind_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    answers = []

    def ask() -> None:
        body = json.dumps({"prompt": "abc", "max_tokens": 70}).encode()
        with urllib.request.urlopen(url, body, timeout=10) as response:
            answers.append(json.load(response))
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask)
    assert run_server(app, sock, config, on_ready=asker.start) == 0
    asker.join()
    # The shutdown frame ends the engine.
    process.join(5)
    assert process.exitcode == 0
    remove_endpoint(endpoint)
    assert answers[0]["choices"][0]["text"] == bytes(range(70)).decode()


def test_mailbox_slow_reader_gets_one_merged_event():
    async def run():
        mailbox = Mailbox(lambda: None)
        for i in range(1000):
            mailbox.put(TokenEvent(1, [i], "length" if i == 999 else None, 3 if i == 0 else 0))
        event = await anext(mailbox)
        assert (event.token_ids, event.finish_reason) == (list(range(1000)), "length")
        assert event.num_cached_tokens == 3
        with pytest.raises(StopAsyncIteration):
            await anext(mailbox)

    asyncio.run(run())
