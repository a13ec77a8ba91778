"""Hostile and odd bodies: each is refused with an OpenAI error that names the field."""

import asyncio
import gzip
import re
import threading
import time

import msgspec
import pytest

from compiled_engine.config import ServerConfig
from compiled_engine.errors import ConfigError, InvalidRequestError
from compiled_engine.server import generation
from compiled_engine.server.chat_request import template_messages
from compiled_engine.server.protocol import ChatRequest, CompletionRequest
from compiled_engine.server.validation import (
    default_sampling_params,
    parse_object,
    parse_request,
)
from tests.helpers.fake_engine import ByteTokenizer
from tests.helpers.server_harness import Server, with_server

USER = [{"role": "user", "content": "hi"}]


def _refusal(answer) -> str | None:
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error["param"]


def test_number_fields_wrong_values_are_refused_by_name():
    cases = [
        (field, value)
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "top_k",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        for value in (b"-3.5", b'"0.7"', b"true", b"[1]", b"1e30")
    ]
    cases += [("repetition_penalty", v) for v in (b"0", b"1e-300", b"10.1")]
    cases += [("max_tokens", v) for v in (b"-1", b"0", b"1.5", b"1e30", b"9223372036854775808")]
    cases += [("n", v) for v in (b"0", b"-1", b"17", b"100000", b"1.5", b"true")]
    cases += [("seed", b"9223372036854775808"), ("seed", b'"1"'), ("priority", b"99999")]
    cases += [("min_tokens", b"17"), ("stop", b'["a",""]'), ("stop", b"5"), ("cache_salt", b"1")]
    cases += [("stop_token_ids", b"[258]"), ("stop_token_ids", b"[1.5]"), ("stream", b"1")]
    # As ints these are beyond what a float can hold.
    cases += [(f, b"9" * 400) for f in ("max_tokens", "min_tokens", "n", "seed", "top_k")]
    cases += [(f, b"9" * 400) for f in ("priority", "temperature")]
    cases += [("logit_bias", v) for v in (b'{"99999999":5}', b'{"-1":5}', b'{"x":5}')]
    cases += [("logit_bias", v) for v in (b'{"5":1e9}', b'{"258":1}', b'{"5":true}', b"[]")]
    cases += [("stream_options", b'{"include_usage":true}'), ("stream_options", b"true")]

    async def body(server: Server):
        for field, value in cases:
            raw = b'{"prompt":"a","%s":%s}' % (field.encode(), value)
            status, answer = await server.post("/v1/completions", raw)
            param = _refusal(answer)
            assert (status, param.split("[")[0]) == (400, field), (field, value, answer)
            assert "[...]" not in param
        assert server.engine.submitted == []

    with_server(body)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"a"} x',
    ],
)
def test_parse_object_bad_json_is_refused(raw):
    with pytest.raises(InvalidRequestError, match="body"):
        parse_object(raw)


def test_null_means_default():
    async def body(server: Server):
        request = {"prompt": "a", **dict.fromkeys(CompletionRequest.__struct_fields__)}
        request["prompt"] = "a"
        status, _ = await server.post("/v1/completions", request)
        assert status == 200

    with_server(body)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([-1], "prompt"),
        ([258], "prompt"),
        ([2**40], "prompt"),
        ([[1], [2**31]], "prompt[1]"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
    ],
)
def test_completion_bad_prompt_is_named(prompt, param):
    async def body(server: Server):
        status, answer = await server.post("/v1/completions", {"prompt": prompt})
        assert (status, _refusal(answer)) == (400, param)
        assert server.state.admission.num_requests == 0

    with_server(body)


def test_huge_bodies_are_parsed_in_a_text_thread(monkeypatch: pytest.MonkeyPatch):
    names = []

    def parse(raw, kind):
        names.append(threading.current_thread().name.partition("_")[0])
        return parse_request(raw, kind)

    monkeypatch.setattr(generation, "parse_request", parse)

    async def body(server: Server):
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200
        many = b'{"prompt":[' + b"[5]," * 100_000 + b'["x"]]}'
        status, answer = await server.post("/v1/completions", many)
        # Refused by the number of prompts: the wrong one at the end was not looked for.
        assert (status, _refusal(answer)) == (400, "n")
        assert names == [threading.current_thread().name, "text"]

    with_server(body)


def test_completion_missing_prompt_is_named():
    async def body(server: Server):
        for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            status, answer = await server.post(path, {})
            assert (status, _refusal(answer)) == (400, field)

    with_server(body)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*USER, {"role": "robot", "content": "a"}], "messages[1].role"),
        ([{"content": "a"}], "messages[0]"),
        (["a"], "messages[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER[0], "audio": {"id": "x"}}], "messages[0].audio"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_chat_bad_message_is_named(messages, param):
    async def body(server: Server):
        status, answer = await server.post("/v1/chat/completions", {"messages": messages})
        assert (status, _refusal(answer)) == (400, param)

    with_server(body)


def test_chat_odd_but_right_messages_are_taken():
    async def body(server: Server):
        for messages in (
            [{"role": "user", "content": ""}],
            [*USER, {"role": "assistant", "content": "b"}],
            [{"role": "tool", "content": "7", "tool_call_id": "x"}],
        ):
            status, _ = await server.post("/v1/chat/completions", {"messages": messages})
            assert status == 200
        many = [{"role": "user", "content": "x"}] * 10_000
        status, answer = await server.post("/v1/chat/completions", {"messages": many})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    with_server(body)


def test_template_messages_tool_calls_become_objects():
    raw = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    }
    request, unknown = parse_request(msgspec.json.encode({"messages": [raw]}), ChatRequest)
    assert not unknown
    message = template_messages(request.messages)[0]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


REFUSED = [
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("web_search_options", {"a": 1}),
    ("logits_processors", ["x"]),
    ("suffix", "end"),
    ("guided_whitespace_pattern", " *"),
    ("chat_template", "{{ messages }}"),
    ("best_of", 3),
    ("store", True),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_known_field_that_would_change_the_answer_is_refused(field, value):
    for kind in (ChatRequest, CompletionRequest):
        raw = msgspec.json.encode({"prompt": "a", "messages": USER, field: value})
        with pytest.raises(InvalidRequestError, match=field) as caught:
            parse_request(raw, kind)
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function"}]), ("tool_choice", "required"), ("reasoning_effort", "high")],
)
def test_chat_fields_are_refused_in_completions(field, value):
    raw = msgspec.json.encode({"prompt": "a", field: value})
    with pytest.raises(InvalidRequestError, match=field) as caught:
        parse_request(raw, CompletionRequest)
    assert caught.value.param == field


NEUTRAL = {
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "audio": None,
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "logits_processors": None,
    "suffix": "",
    "best_of": 1,
    "guided_json": None,
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "parallel_tool_calls": True,
    "service_tier": "auto",
}


def test_known_field_with_a_neutral_value_is_accepted():
    raw = msgspec.json.encode({"messages": USER, **NEUTRAL})
    _, unknown = parse_request(raw, ChatRequest)
    assert unknown == set()


def test_unknown_fields_are_logged_once_and_counted(caplog):
    async def body(server: Server):
        for _ in range(3):
            request = {"messages": [{**USER[0], "mood": 1}], "frobnicate": 1}
            status, _ = await server.post("/v1/chat/completions", request)
            assert status == 200
        _, text = await server.get("/metrics")
        assert "compiled_engine:unknown_request_fields_total 6.0" in text

    with_server(body)
    logged = [r.getMessage() for r in caplog.records if "is not known" in r.getMessage()]
    assert len(logged) == 2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{% for i in range(99999) %}x{% endfor %}"},
        {"tokenize": True},
        {"add_generation_prompt": False},
        {"messages": []},
        {"enable_thinking": "x" * 100},
        {"chat_template": "x" * 5_000_000},
        {"x" * 5_000_000: True},
        {"whatever": 1},
    ],
)
def test_chat_template_kwargs_only_known_keys_pass(kwargs):
    async def body(server: Server):
        request = {"messages": USER, "chat_template_kwargs": kwargs}
        status, answer = await server.post("/v1/chat/completions", request)
        assert (status, _refusal(answer)) == (400, "chat_template_kwargs")

    with_server(body)


def test_max_completion_tokens_is_max_tokens():
    async def body(server: Server):
        request = {"messages": USER, "max_completion_tokens": 3}
        await server.post("/v1/chat/completions", request)
        assert server.engine.submitted[0].params.max_tokens == 3
        status, answer = await server.post("/v1/chat/completions", {**request, "max_tokens": 4})
        assert (status, _refusal(answer)) == (400, "max_completion_tokens")
        for value in (0, 10_000_000):
            request = {"messages": USER, "max_completion_tokens": value}
            status, answer = await server.post("/v1/chat/completions", request)
            assert (status, _refusal(answer)) == (400, "max_completion_tokens")
            assert not re.search(r"\bmax_tokens\b", answer["error"]["message"])

    with_server(body)


def test_default_sampling_params_bad_value_is_a_config_error():
    assert default_sampling_params({"temperature": 0.6, "top_k": None}).temperature == 0.6
    for values in ({"temperature": -1}, {"frob": 1}, {"top_p": "x"}):
        with pytest.raises(ConfigError, match="default sampling"):
            default_sampling_params(values)


def test_body_limit_answers_413_before_the_body_is_there():
    config = ServerConfig(port=0, max_body_bytes=2 * 1024 * 1024)
    big = b'{"prompt":"' + b"x" * (2 * 1024 * 1024) + b'"}'
    fits = b'{"prompt":"' + b"x" * 1_500_000 + b'"}'

    async def chunks():
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    async def body(server: Server):
        status, answer = await server.post("/v1/completions", fits)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await server.post("/v1/completions", big)
        assert (status, "2097152 bytes" in answer["error"]["message"]) == (413, True)
        async with server.session.post(server.url + "/v1/completions", data=chunks()) as response:
            assert response.status == 413
        gzipped = {"Content-Encoding": "gzip"}
        bomb = gzip.compress(b"0" * 20_000_000)
        assert len(bomb) < 100_000
        status, _ = await server.post("/v1/completions", bomb, headers=gzipped)
        assert status == 413
        status, _ = await server.post("/v1/completions", b"no gzip", headers=gzipped)
        assert status == 400
        raw = gzip.compress(b'{"prompt":"a"}')
        assert (await server.post("/v1/completions", raw, headers=gzipped))[0] == 200
        assert server.state.admission.num_requests == 0

    with_server(body, config=config)


def test_rendering_and_tokenising_hold_up_nobody():
    class Slow(ByteTokenizer):
        def apply_chat_template(self, *args, **kwargs):
            time.sleep(0.3)
            return super().apply_chat_template(*args, **kwargs)

    async def body(server: Server):
        slow = [
            asyncio.create_task(server.post("/v1/chat/completions", {"messages": USER}))
            for _ in range(4)
        ]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        for path in ("/health", "/v1/models"):
            assert (await server.get(path))[0] == 200
        assert time.monotonic() - started < 0.2
        assert not any(task.done() for task in slow)
        assert [(await task)[0] for task in slow] == [200] * 4

    with_server(body, tokenizer=Slow())


def test_bodies_that_do_not_arrive_are_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "BODY_TIMEOUT_S", 0.4)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"

    async def send(server: Server, *, closes: bool) -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b'{"prompt"')
        if closes:
            writer.write_eof()  # fewer bytes than were announced
        for _ in range(8):
            if not closes:
                writer.write(b" ")  # one byte now and then
            await asyncio.sleep(0.1)
        answer = await reader.read()
        writer.close()
        return answer

    async def body(server: Server):
        slow, short = await asyncio.gather(send(server, closes=False), send(server, closes=True))
        assert slow.startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.4 s" in slow
        assert short == b"" or short.startswith(b"HTTP/1.1 4")
        assert server.state.admission.num_requests == 0
        assert server.engine.submitted == []
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200

    with_server(body)


def test_long_conversations_fit_the_default_body_limit():
    async def body(server: Server):
        for size in (1_100_000, 8_000_000):
            request = {"messages": [{"role": "user", "content": "x" * size}]}
            status, answer = await server.post("/v1/chat/completions", request)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    with_server(body)
