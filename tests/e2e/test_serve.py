"""The real `compiled-engine serve` with a tiny model: two processes, signals and deaths."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import openai
import pytest
import torch
from openai import OpenAI

from tests.helpers.serve_process import ServeProcess
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.e2e

FLAGS = ("--enforce-eager", "--max-num-seqs", "4", "--chunked-prefill-size", "32")
USER = [{"role": "user", "content": "hi"}]
ENGINE_GONE_S = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def _client(server: ServeProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60)


def _long_stream(client: OpenAI, model: Path, max_tokens: int):
    stream = client.completions.create(
        model=str(model),
        prompt="a",
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    return iter(stream)


def test_serve_answers_the_openai_client_and_drains(model, tmp_path):
    flags = (*FLAGS, "--device", "auto")
    with ServeProcess(model, tmp_path / "log", flags=flags) as server:
        server.wait_for("/health", 200)
        assert server.status("/ready") == 503
        assert server.status("/v1/models") == 200
        server.wait_for("/ready", 200)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "libtorch" in Path(f"/proc/{server.engine().pid}/maps").read_text()
        with _client(server) as client:
            _check_answers(client, model)
            stream = _long_stream(client, model, 300)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("/ready", 503)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                client.completions.create(model=str(model), prompt="b")
            *_, last = stream
        assert last.usage.completion_tokens == 300
        assert server.process.wait(30) == 0
        _check_log(server)


@pytest.mark.slow  # it compiles every piece
def test_serve_says_why_each_piece_was_compiled_and_then_compiles_none(model, tmp_path):
    flags = ("--max-num-seqs", "4", "--chunked-prefill-size", "32")
    for log, is_cold in (("cold", True), ("warm", False)):
        with ServeProcess(model, tmp_path / log, flags=flags) as server:
            server.wait_for("/ready", 200)
            _, _, text = server.log.partition("\nstart")
            reasons = [line for line in text.splitlines() if " was compiled: " in line]
            assert bool(reasons) == is_cold
            assert server.stop() == 0
        if is_cold:
            assert "layer_one was compiled: the cache is empty" in reasons
            assert len(reasons) >= 8


def _check_answers(client: OpenAI, model: Path) -> None:
    assert [card.id for card in client.models.list()] == [str(model)]
    arguments = {"model": str(model), "messages": USER, "temperature": 0.0, "max_tokens": 12}
    whole = client.chat.completions.create(**arguments)
    assert 1 <= whole.usage.completion_tokens <= 12
    chunks = list(client.chat.completions.create(stream=True, **arguments))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    plain = client.completions.create(model=str(model), prompt="some text", max_tokens=5, seed=1)
    again = client.completions.create(model=str(model), prompt="some text", max_tokens=5, seed=1)
    assert plain.choices[0].text == again.choices[0].text
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=str(model), prompt="a", max_tokens=5000)


def _check_log(server: ServeProcess) -> None:
    assert f"listening on {server.url}, loading" in server.log
    assert f": {server.url}  model " in server.log
    assert "4096 tokens a request" in server.log
    phases = [line.split()[0] for line in server.log.partition("\nstart")[2].splitlines() if line]
    assert phases[:3] == ["phase", "imports", "load"]
    assert "Traceback" not in server.log
    assert server.log.count("running on the CPU") == (0 if torch.cuda.is_available() else 1)


def test_killed_server_takes_its_engine_along_and_the_port_is_free_at_once(model, tmp_path):
    with ServeProcess(model, tmp_path / "log", flags=FLAGS) as server:
        server.wait_for("/ready", 200)
        engine = server.engine()
        with _client(server) as client:
            stream = _long_stream(client, model, 2000)
            next(stream)
            server.process.kill()
            server.process.wait()
            killed_at = time.monotonic()
            with pytest.raises(Exception, match=r"."):
                list(stream)
        with ServeProcess(model, tmp_path / "log2", port=server.port, flags=FLAGS) as second:
            second.wait_for("/health", 200)
            engine.wait(max(0.0, killed_at + ENGINE_GONE_S - time.monotonic()))
            second.wait_for("/ready", 200)
            assert second.stop(signal.SIGINT) == 0


def test_killed_engine_ends_streams_with_an_error_and_the_server_with_code_3(model, tmp_path):
    with ServeProcess(model, tmp_path / "log", flags=FLAGS) as server:
        server.wait_for("/ready", 200)
        failures: list[Exception] = []

        def read(client: OpenAI) -> None:
            try:
                list(_long_stream(client, model, 3000))
            except openai.APIError as error:
                failures.append(error)

        with _client(server) as client:
            thread = threading.Thread(target=read, args=(client,))
            thread.start()
            time.sleep(0.3)
            server.engine().kill()
            server.wait_for("/health", 503, timeout_s=2)
            thread.join(5)
            assert not thread.is_alive()
            with pytest.raises(openai.InternalServerError, match="engine"):
                client.completions.create(model=str(model), prompt="b")
        assert "engine process has ended (exit code -9)" in str(failures[0])
        assert server.process.wait(15) == 3


def test_signal_while_loading_ends_both_processes(model, tmp_path):
    flags = ("--max-num-seqs", "4")  # it compiles: that takes a while
    with ServeProcess(model, tmp_path / "log", flags=flags) as server:
        server.wait_for("/health", 200)
        assert server.status("/ready") == 503
        engine = server.engine()
        assert server.stop(signal.SIGINT) == 0
        engine.wait(ENGINE_GONE_S)
        assert "Traceback" not in server.log


def test_taken_port_ends_with_code_2_and_starts_no_engine(model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServeProcess(model, tmp_path / "log", port=port, flags=FLAGS) as server:
            assert server.process.wait(20) == 2
            assert server.log == (
                f"compiled-engine serve: error: cannot listen on 127.0.0.1:{port}: Address already "
                "in use; --port takes another one\n"
            )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-model-len", "99999"), "--max-model-len is 99999"),
        (("--tokenizer", "{folder}"), "tokenizer"),
    ],
    ids=["model length", "no tokenizer"],
)
def test_what_only_the_engine_or_tokenizer_can_refuse_ends_with_code_2(
    model, tmp_path, flags, said
):
    flags = tuple(flag.format(folder=tmp_path) for flag in flags)
    with ServeProcess(model, tmp_path / "log", flags=(*FLAGS, *flags)) as server:
        assert server.process.wait(60) == 2
        assert said in server.log
        assert "Traceback" not in server.log
