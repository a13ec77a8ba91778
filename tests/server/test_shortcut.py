"""The short way of streamed pieces sends what the long way would, and only where it may."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from compiled_engine.config import ServerConfig
from compiled_engine.request import Request, SamplingParams, TokenEvent
from compiled_engine.server import generation, shortcut
from compiled_engine.server.choice import ChoiceRun, Piece
from compiled_engine.server.mailbox import Mailbox
from compiled_engine.server.protocol import CompletionRequest
from compiled_engine.server.shortcut import TextTemplate
from compiled_engine.server.validation import validate_sampling
from tests.helpers.fake_engine import EOS, ByteTokenizer, FakeEngine, text_reply
from tests.helpers.server_harness import Server, eventually, with_server

TEXT = 'Ein "Zitat"\n天气 café 👩‍👩‍👧 <b> \\ \u2028 und mehr'
THOUGHT = f"<think>\nhm {TEXT}\n</think>\n\n{TEXT}"
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC ✓"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CHAT = {"messages": USER}
NATIVE = {"text": "hi", "sampling_params": {"max_new_tokens": 200}}
MESSAGES = {"messages": USER, "max_tokens": 300}
WITH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
WITH_IDS = {"return_token_ids": True}
WITH_LOGPROBS = {"include": ["message.output_text.logprobs"]}

# Route, body, answer, whether the short way may be used.
CASES = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 300}, TEXT, True),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, **WITH_USAGE}, TEXT, True),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, "echo": True}, TEXT, True),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, **WITH_IDS}, TEXT, True),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, "logprobs": 2}, TEXT, True),
    ("/v1/chat/completions", {**CHAT, **WITH_IDS}, THOUGHT, True),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}, TEXT, True),
    ("/v1/responses", {"input": "hi", "top_logprobs": 2, **WITH_LOGPROBS}, TEXT, True),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, "stop": ["und"]}, TEXT, False),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 30}, TEXT, False),
    ("/v1/chat/completions", CHAT, TEXT, True),
    ("/v1/chat/completions", {**CHAT, **WITH_USAGE}, TEXT, True),
    ("/v1/chat/completions", CHAT, THOUGHT, True),
    ("/v1/chat/completions", {**CHAT, "tools": [NOW]}, TEXT + CALL, True),
    ("/v1/chat/completions", {**CHAT, "tools": [NOW], "parallel_tool_calls": False}, CALL, False),
    ("/v1/messages", MESSAGES, THOUGHT, True),
    ("/v1/responses", {"input": "hi"}, THOUGHT, True),
    ("/generate", NATIVE, TEXT, False),  # each chunk holds all of the text
]
IDS = re.compile(r"\b(cmpl|chatcmpl|call|msg|resp|rs|fc|toolu)_?-?[0-9a-f]{16,}|\b[0-9a-f]{32}\b")
TIMES = re.compile(r'"(created|\w+_at|e2e_latency)":[0-9.e-]+')


def _body(path: str, body: dict[str, Any], answer: str, *, is_short: bool) -> tuple[str, int]:
    """The streamed body without what differs from call to call, and how much went the short way."""
    engine = FakeEngine(text_reply(answer))
    engine.offers_events = is_short
    text = ""

    async def ask(server: Server) -> None:
        nonlocal text
        request = {**body, "stream": True}
        async with server.session.post(server.url + path, json=request) as response:
            assert response.status == 200, await response.text()
            text = await response.text()

    with_server(ask, engine=engine, config=ServerConfig(port=0, reasoning_parser="base"))
    return TIMES.sub("TIME", IDS.sub("ID", text)), engine.num_listened


@pytest.mark.parametrize(("path", "body", "answer", "may_be_used"), CASES)
def test_both_ways_send_the_same_bytes(path, body, answer, may_be_used):
    long, num_listened = _body(path, body, answer, is_short=False)
    assert num_listened == 0
    short, num_listened = _body(path, body, answer, is_short=True)
    if len(body.get("prompt", "")) == 2:  # two answers come in any order
        long, short = sorted(long), sorted(short)
    assert short == long
    assert (num_listened > 10) == may_be_used, num_listened


def test_a_template_fills_in_what_the_encoder_would_write():
    record = b'{"model":"\\"text\\":\\"\\"","text":"","n":1}'
    template = TextTemplate(record, "text")
    for text in ("", "a", '"', "\\", "\n\x00", "天\u2028"):
        filled = json.loads(template.fill(text))
        assert filled == {"model": '"text":""', "text": text, "n": 1}
    for wrong in (b'{"content":""}', b'{"text":"","a":{"text":""}}'):
        with pytest.raises(AssertionError):
            TextTemplate(wrong, "text")


def test_the_short_way_knows_every_field_of_a_piece():
    # Templates hold a text only: calls that ask for more must not use them.
    known = ("index", "events", "finish_reason", "stop_reason", "token_ids", "logprobs")
    assert Piece.__struct_fields__ == known


def test_plain_events_come_to_what_all_others_do():
    ids = [*TEXT.encode(), 255, 240, 159, 10, EOS]
    made = []
    for is_plain in (True, False):
        request = Request(request_id=1, prompt_token_ids=[1], params=SamplingParams())
        sampling = validate_sampling(
            CompletionRequest(prompt="a"), request.params, max_n=1, max_tokens=None
        )
        run = ChoiceRun(0, request, ByteTokenizer(), sampling)
        assert run._is_plain
        run._is_plain = is_plain
        events = [TokenEvent(1, [i, j], None, 3) for i, j in zip(ids[::2], ids[1::2], strict=False)]
        events.append(TokenEvent(1, [EOS], "stop", 3))
        made.append(([run.feed(event) for event in events], run.token_ids, run.num_tokens))
        assert run.num_cached_tokens == 3
    assert made[0] == made[1]


def test_an_error_on_the_short_way_ends_the_stream_and_aborts(monkeypatch):
    engine = FakeEngine(text_reply("x" * 60))
    send = generation._send

    def fail(source: Any, short: Any, event: TokenEvent) -> bool:
        if source.run.num_tokens > 20:
            raise ValueError("a bug")
        return send(source, short, event)

    monkeypatch.setattr(generation, "_send", fail)

    async def body(server: Server):
        chunks = await server.stream("/v1/completions", {"prompt": "a", "max_tokens": 60})
        assert len(chunks) == 22
        assert chunks[-1]["error"]["message"] == "internal error"
        await eventually(lambda: server.engine.num_running == 0)
        assert len(server.engine.aborted) == 1

    with_server(body, engine=engine)


def test_a_listener_is_asked_only_while_the_reader_waits():
    async def run() -> None:
        aborts: list[int] = []
        mailbox = Mailbox(lambda: aborts.append(1))
        heard: list[int] = []

        def listener(event: TokenEvent) -> bool:
            if event.token_ids == [9]:
                raise ValueError("a bug")
            heard.extend(event.token_ids)
            return event.token_ids[0] < 5

        mailbox.listen(listener)
        mailbox.put(TokenEvent(1, [1]))
        assert heard == []
        assert (await anext(mailbox)).token_ids == [1]
        reader = asyncio.create_task(anext(mailbox))
        await asyncio.sleep(0)
        for token_id in (2, 3, 7, 4):
            mailbox.put(TokenEvent(1, [token_id]))
        # The 7 was left to the reader, and the 4 must not overtake it.
        assert heard == [2, 3, 7]
        assert (await reader).token_ids == [7, 4]
        reader = asyncio.create_task(anext(mailbox))
        await asyncio.sleep(0)
        mailbox.put(TokenEvent(1, [9]))
        with pytest.raises(ValueError, match="a bug"):
            await reader
        await mailbox.aclose()
        assert aborts == [1]

    asyncio.run(run())


def test_a_slow_reader_gets_every_token_in_order(monkeypatch):
    monkeypatch.setattr(shortcut, "MAX_BUFFERED_BYTES", 0)
    text = "".join(f"{i:05d}," for i in range(400))
    engine = FakeEngine(text_reply(text))
    engine.limits = engine.status.limits = type(engine.limits)(
        max_model_len=4096, vocab_size=258, max_total_tokens=4096
    )

    async def body(server: Server):
        port = int(server.url.rpartition(":")[2])
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        request = json.dumps({"prompt": "a", "max_tokens": 3000, "stream": True})
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(request)}\r\n\r\n"
        await loop.sock_sendall(sock, (head + request).encode())
        data = b""
        while part := await loop.sock_recv(sock, 4096):
            data += part
            await asyncio.sleep(0.0005)
        sock.close()
        lines = data.split(b"\r\n\r\n", 1)[1].split(b"\n\n")
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines if b"{" in line]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text

    with_server(body, engine=engine)
