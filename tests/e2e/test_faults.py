"""The real `serve` with faults on purpose and control calls: what clients and operators see."""

from __future__ import annotations

import gzip
import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from compiled_engine.faults import VARIABLE
from tests.helpers.serve_process import ServeProcess
from tests.helpers.tiny_model import write_tiny_model

# Each starts a server and ends it; what can be seen without one is tested in `tests/engine` and
# `tests/server`.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--enforce-eager", "--max-num-seqs", "4", "--chunked-prefill-size", "32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def _serve(
    model: Path, tmp_path: Path, fault: str = "", flags: tuple[str, ...] = ()
) -> ServeProcess:
    environment = {VARIABLE: fault} if fault else {}
    log = tmp_path / "log"
    return ServeProcess(model, log, flags=(*FLAGS, *flags), environment=environment)


def _client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


def _post(server: ServeProcess, path: str, body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body or {}).encode()
    try:
        with urllib.request.urlopen(server.url + path, data=data, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class _Stream:
    """A long stream that is read in a thread; keeps its failure and its number of chunks."""

    def __init__(self, client: OpenAI, model: Path, max_tokens: int = 2000) -> None:
        self.failure: Exception | None = None
        self.num_chunks = 0
        arguments = {"model": str(model), "prompt": "a", "max_tokens": max_tokens, "stream": True}
        self._stream = client.completions.create(**arguments, extra_body={"ignore_eos": True})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self._stream:
                self.num_chunks += 1
        except openai.APIError as error:
            self.failure = error

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream does not end"


def test_step_that_hangs_turns_ready_off_then_fails_clients_then_ends_with_3(model, tmp_path):
    flags = ("--ready-timeout-s", "1", "--engine-timeout-s", "2")
    with _serve(model, tmp_path, "sleep@9:120", flags) as server:
        server.wait_for("/ready", 200)
        with _client(server) as client:
            stream = _Stream(client, model)
            started = time.monotonic()
            server.wait_for("/ready", 503, timeout_s=5)
            assert time.monotonic() - started < 5
            assert server.status("/health") == 200
            server.wait_for("/health", 503, timeout_s=5)
            stream.join(2)
            assert "no step for" in str(stream.failure)
            assert 0 < stream.num_chunks < 10
            engine = server.engine()
            assert server.process.wait(20) == 3
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        assert "it is given up" in server.log


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_stopped_engine_process_turns_ready_off_within_5_s(model, tmp_path, is_busy):
    with _serve(model, tmp_path) as server:
        server.wait_for("/ready", 200)
        engine = server.engine()
        with _client(server) as client:
            stream = _Stream(client, model, max_tokens=300) if is_busy else None
            time.sleep(0.1)
            engine.suspend()
            started = time.monotonic()
            server.wait_for("/ready", 503, timeout_s=5)
            assert 3 < time.monotonic() - started < 5
            assert server.status("/health") == server.status("/progress") == 200
            engine.resume()
            server.wait_for("/ready", 200, timeout_s=5)
            if stream is not None:
                stream.join(30)
                assert stream.failure is None
                assert stream.num_chunks > 0
        engine.suspend()
        assert server.stop() == 0
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_exception_in_a_step_reaches_clients_and_ends_with_3(model, tmp_path):
    with _serve(model, tmp_path, "raise@6") as server:
        server.wait_for("/ready", 200)
        with _client(server) as client:
            stream = _Stream(client, model)
            stream.join(5)
        assert "fault on purpose at step 6" in str(stream.failure)
        assert server.process.wait(15) == 3
        assert "RuntimeError: fault on purpose" in server.log


def test_dead_engine_is_started_again_as_often_as_it_may(model, tmp_path):
    with _serve(model, tmp_path, "exit@6", ("--restart-engine", "1")) as server:
        server.wait_for("/ready", 200)
        first = server.engine()
        with _client(server) as client:
            stream = _Stream(client, model)
            stream.join(5)
            assert "exit code 99" in str(stream.failure)
            server.wait_for("/ready", 503, timeout_s=2)
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model=str(model), prompt="b", max_tokens=2)
            server.wait_for("/ready", 200)
            assert server.engine().pid != first.pid
            answer = client.completions.create(model=str(model), prompt="b", max_tokens=2)
            assert answer.usage.completion_tokens >= 1
            _Stream(client, model).join(5)
        assert server.process.wait(15) == 3
        assert server.log.count("starting the engine process again") == 1


def test_out_of_memory_ends_one_request_and_the_server_goes_on(model, tmp_path):
    with _serve(model, tmp_path, "oom@6") as server:
        server.wait_for("/ready", 200)
        with _client(server) as client:
            stream = _Stream(client, model)
            stream.join(10)
            assert "ran out of memory" in str(stream.failure)
            answer = client.completions.create(
                model=str(model), prompt="a", max_tokens=20, extra_body={"ignore_eos": True}
            )
            assert answer.usage.completion_tokens == 20
        assert server.status("/ready") == 200
        assert server.stop() == 0


def test_control_calls_on_the_real_engine(model, tmp_path):
    with _serve(model, tmp_path, flags=("--profile-dir", str(tmp_path / "traces"))) as server:
        server.wait_for("/ready", 200)
        with _client(server) as client:
            _pause_and_continue(server, client, model)
            _flush(server)
            status, answer = _post(server, "/start_profile")
            assert status == 200, answer
            _post(server, "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 4}})
            assert _post(server, "/stop_profile")[1]["path"] == answer["path"]
            with gzip.open(answer["path"], "rt") as file:
                assert json.load(file)["traceEvents"]
        assert server.stop() == 0
        assert "finish=length" in server.log
        assert "queue_ms=" in server.log
        assert "Traceback" not in server.log


def _pause_and_continue(server: ServeProcess, client: OpenAI, model: Path) -> None:
    stream = _Stream(client, model, max_tokens=400)
    assert _post(server, "/pause_generation")[0] == 200
    time.sleep(0.3)
    held = stream.num_chunks
    time.sleep(0.3)
    assert stream.num_chunks == held < 400
    assert _post(server, "/flush_cache")[0] == 409
    assert server.status("/ready") == 200
    assert _post(server, "/continue_generation")[0] == 200
    stream.join(30)
    assert stream.failure is None
    assert _post(server, "/abort_request", {"abort_all": True})[1]["num_aborted"] == 0


def _flush(server: ServeProcess) -> None:
    request = {"input_ids": list(range(40)), "sampling_params": {"max_new_tokens": 2}}
    cached = []
    for flush in (False, False, True):
        if flush:
            assert _post(server, "/flush_cache")[0] == 200
        _, answer = _post(server, "/generate", request)
        cached.append(answer["meta_info"]["cached_tokens"])
    assert cached == [0, 32, 0]
