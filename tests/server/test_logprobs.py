"""Log probabilities through the real server: shapes, offsets, streams, stop strings, refusals."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from compiled_engine.logprob_data import LOWEST_LOGPROB
from compiled_engine.request import ModelLimits
from tests.helpers import fake_engine
from tests.helpers.fake_engine import (
    BOS,
    EOS,
    ByteTokenizer,
    FakeEngine,
    TemplateTokenizer,
    record_of,
    text_reply,
)
from tests.helpers.server_harness import Server, with_server

USER = [{"role": "user", "content": "hi"}]
LIMITS = ModelLimits(max_model_len=4096, vocab_size=258, max_total_tokens=65_536)
THINKING = """{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}<tool_call>{% endif %}
{%- if add_generation_prompt %}[assistant]<think></think>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def run(test: Any, text: str = "hello", *, tokenizer: Any = None, **options: Any) -> None:
    reply = options.pop("reply", None) or text_reply(text)
    engine = FakeEngine(reply, limits=LIMITS, **options)
    with_server(test, engine=engine, tokenizer=tokenizer)


def strict(body: Any) -> Any:
    """Fails on what JSON does not have; the body was parsed leniently."""

    def check(value: Any) -> None:
        if isinstance(value, dict):
            list(map(check, value.values()))
        elif isinstance(value, list):
            list(map(check, value))
        elif isinstance(value, float):
            assert math.isfinite(value)

    check(body)
    return body


async def completions(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the whole answer, which a stream must give too, piece by piece."""
    status, answer = await server.post("/v1/completions", fields)
    assert status == 200, answer
    if not fields.get("echo"):  # its types know nothing of the null of a prompt's first token
        Completion.model_validate(answer)
    chunks = await server.stream("/v1/completions", fields)
    for choice in strict(answer)["choices"]:
        parts = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, whole in (choice["logprobs"] or {}).items():
            joined = [x for part in parts if part["logprobs"] for x in part["logprobs"][name]]
            assert joined == whole, name
        if "token_ids" in choice:
            assert [t for p in parts for t in p.get("token_ids") or []] == choice["token_ids"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert not any(part.get("prompt_token_ids") for part in parts[1:])
    return answer["choices"]


def check_listed(choice: dict[str, Any], token_ids: list[int], num_top: int, first: int) -> None:
    """All values are the engine's, and the offsets cut the text at the tokens."""
    listed = choice["logprobs"]
    for place, (token_id, text) in enumerate(zip(token_ids, listed["tokens"], strict=True)):
        assert text == ByteTokenizer().token_bytes(token_id).decode("utf-8", "replace")
        if first + place == 0:
            assert listed["token_logprobs"][0] is listed["top_logprobs"][0] is None
            continue
        logprob, _, ids, best = record_of(token_id, first + place, num_top)
        assert listed["token_logprobs"][place] == logprob
        top = listed["top_logprobs"][place]
        assert top[text] == logprob
        if token_id < 128:
            expected = {chr(i): p for i, p in zip(ids, best, strict=True) if i < 128}
            assert {k: v for k, v in top.items() if k != "\ufffd"} == expected | {text: logprob}
    offsets = listed["text_offset"]
    assert offsets == sorted(offsets)
    ends = [*offsets, len(choice["text"])][1:]
    for text, begin, end in zip(listed["tokens"], offsets, ends, strict=True):
        assert choice["text"][begin:end] == text or "\ufffd" in text or text[:1] == "<"


@pytest.mark.parametrize("tokens_per_event", [1, 3, 50])
@pytest.mark.parametrize("text", ["hello", "", "né 天 😀!", "\x00\n\t"])
def test_completion_lists_every_token(text, tokens_per_event):
    async def body(server: Server):
        for num_top in (0, 3, 20):
            (choice,) = await completions(server, prompt="ab", logprobs=num_top, max_tokens=50)
            assert choice["text"] == text
            check_listed(choice, [*text.encode(), EOS], num_top, 2)

    run(body, text, tokens_per_event=tokens_per_event)


def test_completion_offsets_count_characters():
    async def body(server: Server):
        (choice,) = await completions(server, prompt="a", logprobs=0, max_tokens=50)
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
        (cut,) = await completions(server, prompt="a", logprobs=0, max_tokens=4)
        assert cut["text"] == "é\ufffd"
        assert cut["logprobs"]["text_offset"] == [0, 0, 1, 1]

    run(body, "é😀x")


@pytest.mark.parametrize("stop", [["lo w"], ["o", "lo w"], ["\n"], ["world!!"], ["hello"]])
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 4])
def test_what_a_stop_string_cuts_off_is_not_listed(stop, include_stop, tokens_per_event):
    async def body(server: Server):
        fields = {"include_stop_str_in_output": include_stop, "max_tokens": 50, "stop": stop}
        (choice,) = await completions(server, prompt="a", logprobs=1, **fields)
        token_ids = list(choice["text"].encode())
        if choice["stop_reason"] is None:
            token_ids.append(EOS)
        check_listed(choice, token_ids, 1, 1)
        status, chat = await server.post(
            "/v1/chat/completions", {"messages": USER, "logprobs": True, **fields}
        )
        assert status == 200
        message = chat["choices"][0]["message"]["content"]
        listed = chat["choices"][0]["logprobs"]["content"]
        assert message == choice["text"]
        assert "".join(entry["token"] for entry in listed) == message

    run(body, "hello world!", tokens_per_event=tokens_per_event)


def test_end_tokens_are_listed_by_completions_alone():
    async def body(server: Server):
        for fields in ({"stop_token_ids": [ord("l")]}, {"skip_special_tokens": False}):
            (choice,) = await completions(server, prompt="a", logprobs=0, max_tokens=9, **fields)
            assert len(choice["logprobs"]["tokens"]) == (3 if "stop_token_ids" in fields else 6)
            body = {"messages": USER, "logprobs": True, "max_tokens": 9, **fields}
            _, chat = await server.post("/v1/chat/completions", body)
            (answer,) = chat["choices"]
            tokens = [entry["token"] for entry in answer["logprobs"]["content"]]
            assert "".join(tokens) == answer["message"]["content"] == choice["text"]

    run(body)


@pytest.mark.parametrize(
    "prompt", ["ab", "é天", [97, 195, 169], [BOS, 97, EOS, 98], [[97], [98, 99]], ["x", "yz"]]
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_echo_lists_the_prompt_too(prompt, adds_bos):
    tokenizer = ByteTokenizer(adds_bos=adds_bos)
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if is_list else [prompt]

    async def body(server: Server):
        choices = await completions(server, prompt=prompt, logprobs=2, max_tokens=9, echo=True, n=2)
        assert len(choices) == 2 * len(prompts)
        for choice in choices:
            given = prompts[choice["index"] // 2]
            ids = tokenizer.encode(given) if isinstance(given, str) else given
            text = given if isinstance(given, str) else tokenizer.decode(given)
            assert choice["text"] == text + "hello"
            check_listed(choice, [*ids, *b"hello", EOS], 2, 0)

    run(body, tokenizer=tokenizer)


def test_echo_of_a_truncated_prompt_lists_what_was_kept():
    async def body(server: Server):
        fields = {"prompt": "héllo", "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1}
        (choice,) = await completions(server, logprobs=0, **fields)
        assert choice["text"] == "hélloh"
        assert choice["logprobs"]["tokens"] == ["l", "l", "o", "h"]
        assert choice["logprobs"]["text_offset"] == [2, 3, 4, 5]

    run(body)


def test_no_token_is_generated_where_only_the_prompt_is_asked_for():
    async def body(server: Server):
        fields = {"prompt": "abc", "max_tokens": 0}
        for more in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"echo": True}):
            status, answer = await server.post("/v1/completions", {**fields, **more})
            assert status == 200, answer
            (choice,) = answer["choices"]
            assert answer["usage"]["completion_tokens"] == 0
            assert choice["finish_reason"] == "length"
            assert choice["text"] == ("abc" if "echo" in more else "")
            if "logprobs" in more:
                check_listed(choice, [*b"abc"], 1, 0)
        await completions(server, **fields, echo=True, logprobs=2)
        status, answer = await server.post("/v1/completions", fields)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")

    run(body)


def test_prompt_logprobs_by_vllms_shape():
    async def body(server: Server):
        for path, more in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 3}),
            ("/v1/chat/completions", {"messages": USER}),
        ):
            status, answer = await server.post(path, {**more, "prompt_logprobs": 1})
            assert status == 200, answer
            holder = answer["choices"][0] if "prompt" in more else answer
            ids = server.engine.submitted[-1].prompt_token_ids
            assert len(holder["prompt_logprobs"]) == len(ids)
            assert holder["prompt_logprobs"][0] is None
            for place, entry in enumerate(holder["prompt_logprobs"][1:], start=1):
                logprob, rank, (best, *_), (likeliest, *_) = record_of(ids[place], place, 1)
                text = chr(ids[place])
                own = {"logprob": logprob, "rank": rank, "decoded_token": text}
                other = {"logprob": likeliest, "rank": 1, "decoded_token": chr(best)}
                assert entry == {str(ids[place]): own, str(best): other}

    run(body)


def test_token_ids_stand_beside_the_text():
    async def body(server: Server):
        (choice,) = await completions(server, prompt="ab", return_token_ids=True)
        assert choice["prompt_token_ids"] == [97, 98]
        assert choice["token_ids"] == [*b"hello", EOS]
        body = {"messages": USER, "return_token_ids": True}
        _, answer = await server.post("/v1/chat/completions", body)
        assert answer["prompt_token_ids"] == server.engine.submitted[-1].prompt_token_ids
        assert answer["choices"][0]["token_ids"] == [*b"hello", EOS]
        chunks = await server.stream("/v1/chat/completions", body)
        assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
        streamed = [t for k in chunks for c in k["choices"] for t in c.get("token_ids", [])]
        assert streamed == [*b"hello", EOS]
        (plain,) = await completions(server, prompt="ab")
        assert "token_ids" not in plain

    run(body)


async def chats(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the whole answer; a stream lists the same tokens beside the same text."""
    body = {"messages": USER, "logprobs": True, **fields}
    status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200, answer
    ChatCompletion.model_validate(strict(answer))
    chunks = await server.stream("/v1/chat/completions", body)
    for choice in answer["choices"]:
        parts = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        streamed = [x for p in parts if p["logprobs"] for x in p["logprobs"]["content"]]
        assert streamed == choice["logprobs"]["content"]
        assert all(p["delta"].get("content") for p in parts if p["logprobs"])
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return answer["choices"]


@pytest.mark.parametrize("tokens_per_event", [1, 2, 7])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("plain é text", "plain é text"),
        ("<think>why</think>\n\nSo why", "So why"),
        ("Let me see.\n" + CALL, "Let me see."),
        (CALL, ""),
        ("a < b <tool", "a < b <tool"),
        ("<think>a</think>a" + CALL + "a", "aa"),
    ],
)
def test_chat_lists_the_tokens_of_the_content(text, content, tokens_per_event):
    template = THINKING.replace("<think></think>", "<think>" if "think" in text else "")
    text = text.removeprefix("<think>")

    async def body(server: Server):
        (choice,) = await chats(server, top_logprobs=2, tools=TOOLS, max_tokens=90)
        assert (choice["message"]["content"] or "") == content
        listed = choice["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in listed) == content.encode()
        for entry in listed:
            assert len(entry["top_logprobs"]) == 2
            values = {t["token"]: t["logprob"] for t in entry["top_logprobs"]}
            assert values[entry["token"]] == entry["logprob"]
        places = [(-1.5 - entry["logprob"]) * 8 for entry in listed]
        assert places == sorted(set(places))
        if "</think>" in text:
            prompt = len(server.engine.submitted[-1].prompt_token_ids)
            assert places[0] == prompt + text.index(content[0], text.index("</think>") + 8)

    tokenizer = TemplateTokenizer(template)
    run(body, text, tokenizer=tokenizer, tokens_per_event=tokens_per_event)


def test_chat_lists_tokens_of_random_texts_in_full():
    """Without reasoning or calls every character has its tokens, whatever parsers hold back."""
    rng = random.Random(4)
    for _ in range(12):
        text = "".join(rng.choice(["<", "tool_call>", "é", " ", "\n", "x", "{"]) for _ in range(40))
        text = "x" + text.replace("<tool_call>", "")

        async def body(server: Server, text: str = text):
            for stop in ([], ["é{x"]):
                (choice,) = await chats(server, tools=TOOLS, max_tokens=200, stop=stop)
                listed = choice["logprobs"]["content"]
                joined = b"".join(bytes(entry["bytes"]) for entry in listed)
                assert joined.decode() == choice["message"]["content"]

        run(body, text, tokenizer=TemplateTokenizer(THINKING.replace("<think></think>", "")))


def test_choices_have_their_own_tokens():
    def reply(request: Any) -> list[int]:
        return [*f"answer {request.request_id % 3}".encode(), EOS]

    async def body(server: Server):
        for choice in await chats(server, n=3):
            listed = choice["logprobs"]["content"]
            assert "".join(e["token"] for e in listed) == choice["message"]["content"]

    run(body, reply=reply)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_values_that_json_lacks_become_the_floor(monkeypatch, value):
    def hopeless(token_id: int, place: int, num_top: int):
        return value, 9, [(token_id + i) % 256 for i in range(num_top)], [value] * num_top

    monkeypatch.setattr(fake_engine, "record_of", hopeless)

    async def body(server: Server):
        (choice,) = await completions(server, prompt="ab", logprobs=5, echo=True, max_tokens=2)
        assert choice["logprobs"]["token_logprobs"] == [None, *[LOWEST_LOGPROB] * 3]
        assert set(choice["logprobs"]["top_logprobs"][1].values()) == {LOWEST_LOGPROB}
        (answer,) = await chats(server, top_logprobs=20)
        assert answer["logprobs"]["content"][0]["logprob"] == LOWEST_LOGPROB
        for path, fields in (
            ("/v1/completions", {"prompt": "ab", "prompt_logprobs": 2}),
            ("/generate", {"text": "ab", "return_logprob": True, "logprob_start_len": 0}),
        ):
            async with server.session.post(server.url + path, json=fields) as response:
                assert response.status == 200
                json.loads(await response.text(), parse_constant=pytest.fail)

    run(body)
