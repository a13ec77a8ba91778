"""`/v1/completions` and `/v1/chat/completions` over a scripted engine."""

import asyncio

import pytest

from compiled_engine.request import ModelLimits
from compiled_engine.server.generation import _choice_seed
from tests.helpers.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine, text_reply
from tests.helpers.server_harness import MODEL, Server, with_server

TEXT = "天气 café 👩‍👩‍👧 🏳️‍🌈 นี่ \u0301 end"
USER = [{"role": "user", "content": "hi"}]


def test_completion_text_prompt_answers_with_usage():
    async def body(server: Server):
        status, answer = await server.post("/v1/completions", {"model": MODEL, "prompt": "abc"})
        assert status == 200
        assert answer["object"] == "text_completion"
        assert answer["choices"] == [
            {
                "index": 0,
                "text": "hello",
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": None,
            }
        ]
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert server.engine.submitted[0].params.max_tokens == 16
        assert server.engine.num_running == 0

    with_server(body, engine=FakeEngine(num_cached_tokens=2))


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_completion_each_prompt_form_reaches_the_engine(prompt, token_ids):
    async def body(server: Server):
        status, answer = await server.post("/v1/completions", {"prompt": prompt, "n": 2})
        assert status == 200
        assert [c["index"] for c in answer["choices"]] == list(range(2 * len(token_ids)))
        submitted = [r.prompt_token_ids for r in server.engine.submitted]
        assert submitted == [ids for ids in token_ids for _ in range(2)]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, token_ids))
        assert answer["usage"]["completion_tokens"] == 6 * 2 * len(token_ids)

    with_server(body)


def test_completion_echo_puts_the_prompt_first():
    async def body(server: Server):
        request = {"prompt": ["ab", "c"], "echo": True}
        _, answer = await server.post("/v1/completions", request)
        assert [c["text"] for c in answer["choices"]] == ["abhello", "chello"]
        events = await server.stream("/v1/completions", {"prompt": [104, 105], "echo": True})
        assert "".join(e["choices"][0]["text"] for e in events) == "hihello"

    with_server(body)


def test_completion_tokenizer_that_adds_bos_takes_an_empty_prompt():
    async def body(server: Server):
        status, _ = await server.post("/v1/completions", {"prompt": ""})
        assert status == 200
        assert server.engine.submitted[0].prompt_token_ids == [BOS]
        status, _ = await server.post(
            "/v1/completions", {"prompt": "a", "add_special_tokens": False}
        )
        assert server.engine.submitted[1].prompt_token_ids == [97]

    with_server(body, tokenizer=ByteTokenizer(adds_bos=True))


@pytest.mark.parametrize("tokens_per_event", [1, 2, 3, 7, 1000])
def test_chat_any_split_streams_the_whole_text(tokens_per_event):
    async def body(server: Server):
        _, whole = await server.post("/v1/chat/completions", {"messages": USER})
        assert whole["choices"][0]["message"] == {
            "content": TEXT,
            "role": "assistant",
            "refusal": None,
        }
        events = await server.stream("/v1/chat/completions", {"messages": USER})
        deltas = [e["choices"][0]["delta"] for e in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("content", "") for d in deltas) == TEXT
        assert all("�" not in d.get("content", "") for d in deltas)
        reasons = [e["choices"][0]["finish_reason"] for e in events]
        assert reasons[-1] == "stop"
        assert not any(reasons[:-1])
        assert all("usage" not in e for e in events)

    with_server(body, engine=FakeEngine(text_reply(TEXT), tokens_per_event=tokens_per_event))


def test_chat_length_inside_a_character_gives_one_replacement():
    async def body(server: Server):
        _, answer = await server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 2})
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("�", "length")

    with_server(body, engine=FakeEngine(text_reply(TEXT)))


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_chat_stop_string_ends_and_aborts(tokens_per_event):
    async def body(server: Server):
        request = {"messages": USER, "stop": ["\nUser:", "zzz"]}
        _, answer = await server.post("/v1/chat/completions", request)
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "Hi there"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\nUser:")
        assert answer["usage"]["completion_tokens"] == len("Hi there\nUser:")
        assert server.engine.num_running == 0
        events = await server.stream(
            "/v1/chat/completions", {**request, "include_stop_str_in_output": True}
        )
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == "Hi there\nUser:"
        if tokens_per_event == 1:
            assert server.engine.aborted == [1, 2]

    engine = FakeEngine(text_reply("Hi there\nUser: x"), tokens_per_event=tokens_per_event)
    with_server(body, engine=engine)


def test_chat_stop_string_that_does_not_complete_is_released():
    async def body(server: Server):
        request = {"messages": USER, "stop": "\nUser:"}
        _, answer = await server.post("/v1/chat/completions", request)
        assert answer["choices"][0]["message"]["content"] == "Hi\nUse"
        assert answer["choices"][0]["stop_reason"] is None

    with_server(body, engine=FakeEngine(text_reply("Hi\nUse")))


def test_chat_min_tokens_delays_stop_strings():
    async def body(server: Server):
        request = {"messages": USER, "stop": "ab", "min_tokens": 3}
        _, answer = await server.post("/v1/chat/completions", request)
        assert answer["choices"][0]["message"]["content"] == "abxx"

    with_server(body, engine=FakeEngine(text_reply("abxxab")))


@pytest.mark.parametrize(
    ("extra", "text"), [({}, "he"), ({"include_stop_str_in_output": True}, "hel")]
)
def test_completion_stop_token_ids_end_the_answer(extra, text):
    async def body(server: Server):
        request = {"prompt": "a", "stop_token_ids": [ord("l")], **extra}
        _, answer = await server.post("/v1/completions", request)
        choice = answer["choices"][0]
        assert choice["text"] == text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("l"))
        assert answer["usage"]["completion_tokens"] == 3

    with_server(body)


def test_completion_end_token_is_shown_only_when_asked():
    async def body(server: Server):
        shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
        for extra, text in (
            ({}, "hello"),
            ({"skip_special_tokens": False}, "hello"),
            ({"include_stop_str_in_output": True}, "hello"),
            (shown, "hello<eos>"),
        ):
            _, answer = await server.post("/v1/completions", {"prompt": "a", **extra})
            assert answer["choices"][0]["text"] == text

    with_server(body)


def test_chat_usage_options_shape_the_stream():
    async def body(server: Server):
        request = {"messages": USER, "stream_options": {"include_usage": True}}
        events = await server.stream("/v1/chat/completions", request)
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 6
        assert all(e["usage"] is None for e in events[:-1])
        request["stream_options"]["continuous_usage_stats"] = True
        events = await server.stream("/v1/chat/completions", request)
        counts = [e["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert counts[-1] == 6

    with_server(body)


def test_chat_n_choices_are_complete_and_never_mixed():
    def reply(request):
        return [*f"seed {request.params.seed}".encode(), EOS]

    async def one(server: Server, index: int):
        request = {"messages": USER, "n": 3, "seed": index}
        if index % 2:
            _, answer = await server.post("/v1/chat/completions", request)
            texts = [c["message"]["content"] for c in answer["choices"]]
            assert answer["usage"]["prompt_tokens"] == len("[user]hi\n[assistant]")
            assert answer["usage"]["completion_tokens"] == sum(len(t) + 1 for t in texts)
        else:
            texts = [""] * 3
            ended = set()
            for event in await server.stream("/v1/chat/completions", request):
                choice = event["choices"][0]
                assert choice["index"] not in ended
                texts[choice["index"]] += choice["delta"].get("content", "")
                if choice["finish_reason"]:
                    ended.add(choice["index"])
            assert ended == {0, 1, 2}
        assert texts == [f"seed {_choice_seed(index, i)}" for i in range(3)]
        assert len(set(texts)) == 3

    async def body(server: Server):
        await asyncio.gather(*(one(server, i) for i in range(10)))

    with_server(body, engine=FakeEngine(reply, delay_s=0.001))


def test_chat_choices_whose_client_leaves_do_not_touch_the_others():
    def reply(request):
        return [*f"seed {request.params.seed} ".encode() * 4, EOS]

    async def leave(server: Server, seed: int):
        request = {"messages": USER, "n": 3, "seed": seed, "stream": True}
        url = server.url + "/v1/chat/completions"
        async with server.session.post(url, json=request) as response:
            await response.content.readuntil(b"\n\n")

    async def stay(server: Server, seed: int):
        request = {"messages": USER, "n": 3, "seed": seed, "temperature": 0}
        _, answer = await server.post("/v1/chat/completions", request)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [f"seed {_choice_seed(seed, i)} " * 4 for i in range(3)]

    async def body(server: Server):
        leaving = [leave(server, 100 + i) for i in range(3)]
        await asyncio.gather(*leaving, *(stay(server, i) for i in range(7)))
        assert len(server.engine.aborted) == 9
        assert server.engine.num_running == 0

    with_server(body, engine=FakeEngine(reply, delay_s=0.002))


def test_chat_defaults_come_from_the_model_and_requests_override_them():
    async def body(server: Server):
        await server.post("/v1/chat/completions", {"messages": USER, "top_p": 1, "top_k": None})
        params = server.engine.submitted[0].params
        assert (params.temperature, params.top_p, params.top_k) == (0.25, 1.0, 7)
        assert params.max_tokens is None

    defaults = {"temperature": 0.25, "top_p": 0.9, "top_k": 7, "min_p": None}
    with_server(body, default_sampling=defaults)


def test_chat_messages_reach_the_template():
    async def body(server: Server):
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "assistant", "content": "b"},
        ]
        request = {
            "messages": messages,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        status, _ = await server.post("/v1/chat/completions", request)
        assert status == 200
        prompt = bytes(server.engine.submitted[0].prompt_token_ids).decode()
        assert prompt == "[system]a\na\n[assistant]b\nenable_thinking=False"

    with_server(body)


def test_completion_extra_fields_reach_the_engine():
    async def body(server: Server):
        request = {
            "prompt": "a",
            "priority": -3,
            "cache_salt": "tenant",
            "ignore_eos": True,
            "max_tokens": 8,
            "logit_bias": {"5": -1},
            "repetition_penalty": 1.5,
        }
        _, answer = await server.post("/v1/completions", request)
        sent = server.engine.submitted[0]
        assert (sent.priority, sent.cache_salt) == (-3, "tenant")
        assert sent.params.logit_bias == {5: -1.0}
        assert sent.params.repetition_penalty == 1.5
        assert answer["choices"][0]["finish_reason"] == "length"

    with_server(body)


def test_completion_context_limit_names_both_numbers():
    limits = ModelLimits(max_model_len=64, vocab_size=258, max_total_tokens=4096)

    async def body(server: Server):
        for length, max_tokens, status in ((63, None, 200), (63, 1, 200), (63, 50, 400)):
            request = {"prompt": "x" * length, "max_tokens": max_tokens}
            assert (await server.post("/v1/completions", request))[0] == status
        for length in (64, 65, 256, 100_000):
            status, answer = await server.post("/v1/completions", {"prompt": "x" * length})
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
            assert "63" in answer["error"]["message"]
        status, answer = await server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 99}]}
        )
        assert (status, answer["error"]["param"]) == (400, "messages")

    with_server(body, engine=FakeEngine(limits=limits))


def test_stream_error_of_the_engine_becomes_an_event():
    async def body(server: Server):
        server.engine.delay_s = 0.01
        async with server.session.post(
            server.url + "/v1/chat/completions", json={"messages": USER, "stream": True}
        ) as response:
            await response.content.readuntil(b"\n\n")
            server.engine.fail_with = "out of luck"
            rest = (await response.content.read()).decode()
        assert '"message":"out of luck"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        status, answer = await server.post("/v1/chat/completions", {"messages": USER})
        assert (status, answer["error"]["message"]) == (500, "out of luck")

    with_server(body)
