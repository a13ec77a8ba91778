"""Log probabilities in `/generate` and `/v1/responses`, for clients and harnesses; refusals."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from compiled_engine.request import ModelLimits
from tests.helpers.fake_engine import EOS, FakeEngine, record_of, text_reply
from tests.helpers.server_harness import MODEL, Server, with_server

USER = [{"role": "user", "content": "hi"}]
LIMITS = ModelLimits(max_model_len=4096, vocab_size=258, max_total_tokens=65_536)


def run(test: Any, text: str = "hello", *, reply: Any = None) -> None:
    with_server(test, engine=FakeEngine(reply or text_reply(text), limits=LIMITS))


@pytest.mark.parametrize("stream", [False, True])
def test_generate_lists_tokens_by_sglangs_shape(stream):
    async def body(server: Server):
        fields = {
            "text": "abcd",
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        }
        if stream:
            events = await server.stream("/generate", fields)
            first, last = events[0]["meta_info"], events[-1]["meta_info"]
            assert "input_token_logprobs" not in events[1]["meta_info"]
            for event in events:
                assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        else:
            _, answer = await server.post("/generate", fields)
            first = last = answer["meta_info"]
        assert [entry[1:] for entry in first["input_token_logprobs"]] == [
            [98, "b"], [99, "c"], [100, "d"],
        ]  # fmt: skip
        values = [entry[0] for entry in first["input_token_logprobs"]]
        assert values == [None, record_of(99, 2, 0)[0], record_of(100, 3, 0)[0]]
        assert first["input_top_logprobs"][0] is None
        assert first["input_top_logprobs"][1][1] == [values[1], 99, "c"]
        output = last["output_token_logprobs"]
        assert [entry[1] for entry in output] == [*b"hello", EOS]
        assert [entry[0] for entry in output] == [
            record_of(i, place, 0)[0] for place, i in enumerate([*b"hello", EOS], start=4)
        ]
        assert [len(top) for top in last["output_top_logprobs"]] == [2] * 6

    run(body)


def test_generate_scores_a_prompt_alone():
    async def body(server: Server):
        fields = {"input_ids": [[1, 2, 3], [4]], "return_logprob": True, "logprob_start_len": 0}
        _, answers = await server.post(
            "/generate", {**fields, "sampling_params": {"max_new_tokens": 0}}
        )
        for answer, count in zip(answers, (3, 1), strict=True):
            meta = answer["meta_info"]
            assert len(meta["input_token_logprobs"]) == count
            assert meta["output_token_logprobs"] == answer["output_ids"] == []
            assert "input_top_logprobs" not in meta
        _, plain = await server.post("/generate", {"text": "a", "return_logprob": True})
        assert "input_token_logprobs" not in plain["meta_info"]
        assert plain["meta_info"]["output_token_logprobs"][0][2] is None

    run(body)


def test_responses_include_logprobs_of_the_text():
    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            options: dict[str, Any] = {
                "model": MODEL,
                "input": "hi",
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
            }
            whole = await client.responses.create(**options)
            (part,) = whole.output[-1].content
            assert "".join(entry.token for entry in part.logprobs) == part.text == "hello"
            assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
            assert whole.top_logprobs == 2
            events = [
                event async for event in await client.responses.create(**options, stream=True)
            ]
            deltas = [e for e in events if e.type == "response.output_text.delta"]
            assert all(e.logprobs for e in deltas)
            streamed = [(x.token, x.logprob) for e in deltas for x in e.logprobs]
            assert streamed == [(x.token, x.logprob) for x in part.logprobs]
            (done,) = [e for e in events if e.type == "response.output_text.done"]
            assert len(done.logprobs) == 5
            plain = await client.responses.create(model=MODEL, input="hi")
            assert plain.output[-1].content[0].logprobs == []

    run(body)


def test_the_official_client_reads_them():
    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            chat = await client.chat.completions.create(
                model=MODEL, messages=USER, logprobs=True, top_logprobs=20
            )
            content = chat.choices[0].logprobs.content
            assert [entry.token for entry in content] == list("hello")
            assert len(content[0].top_logprobs) == 20
            made = await client.completions.create(
                model=MODEL, prompt="ab", logprobs=5, echo=True, max_tokens=0
            )
            assert made.choices[0].logprobs.token_logprobs[0] is None

    run(body)


def test_requests_of_evaluation_harnesses():
    """lm-eval's loglikelihood: a batch of token-id lists, echoed, with one token more."""

    async def body(server: Server):
        contexts, ends = ([97, 98, 99], [100, 101]), ([102], [103, 104, 105])
        prompts = [a + b for a, b in zip(contexts, ends, strict=True)]
        fields = {
            "model": MODEL,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        status, answer = await server.post("/v1/completions", fields)
        assert status == 200, answer
        for choice, context, prompt in zip(answer["choices"], contexts, prompts, strict=True):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            first = len(context)
            assert values == [
                record_of(i, place, 1)[0] for place, i in enumerate(prompt[first:], start=first)
            ]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            assert len(tops) == len(values)
            assert all(max(top.values()) >= value for top, value in zip(tops, values, strict=True))
        # Its generate_until.
        fields = {"model": MODEL, "prompt": prompts, "max_tokens": 3, "temperature": 0.0}
        status, answer = await server.post(
            "/v1/completions", {**fields, "stop": ["\n", "<eos>"], "seed": 1234}
        )
        assert [choice["text"] for choice in answer["choices"]] == ["hel", "hel"]

    run(body)


def test_a_token_that_ends_the_answer_at_once_is_listed():
    """Harnesses drop the last entry, which must not be one of the prompt's."""

    async def body(server: Server):
        fields = {"prompt": [[97, 98]], "max_tokens": 1, "logprobs": 1, "echo": True}
        _, answer = await server.post("/v1/completions", fields)
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 3

    run(body, reply=lambda request: [EOS])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": "5"}, "logprobs"),
        ("/v1/completions", {"logprobs": 5, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 5}, "logprobs"),
        ("/generate", {"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ("/generate", {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ("/generate", {"return_logprob": [True]}, "return_logprob"),
        ("/generate", {"top_logprobs_num": 2}, "top_logprobs_num"),
        ("/generate", {"logprob_start_len": 0}, "logprob_start_len"),
        ("/generate", {"return_logprob": True, "token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/v1/responses", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"include": ["file_search_call.results"]}, "include[0]"),
        (
            "/v1/responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
            "top_logprobs",
        ),
    ],
)
def test_refusals_name_field_and_limit(path, fields, param):
    given = {"/generate": {"text": "ab"}, "/v1/responses": {"input": "hi"}}
    base = given.get(path, {"prompt": "ab", "messages": USER})

    async def body(server: Server):
        status, answer = await server.post(path, {**base, **fields})
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert param.split("[")[0] in answer["error"]["message"]
        assert server.engine.submitted == []

    run(body)


def test_too_many_scores_of_a_prompt_are_refused_by_the_clients_field(monkeypatch):
    monkeypatch.setattr("compiled_engine.request.MAX_PROMPT_LOGPROB_ENTRIES", 100)

    async def body(server: Server):
        prompt = [5] * 50
        for path, fields, param in (
            ("/v1/completions", {"prompt": prompt, "echo": True, "logprobs": 5}, "logprobs"),
            ("/v1/completions", {"prompt": prompt, "prompt_logprobs": 5}, "prompt_logprobs"),
            (
                "/generate",
                {
                    "input_ids": prompt,
                    "return_logprob": True,
                    "top_logprobs_num": 5,
                    "logprob_start_len": 0,
                },
                "top_logprobs_num",
            ),
        ):
            status, answer = await server.post(path, fields)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert "100" in answer["error"]["message"]

    run(body)
