"""`/generate`: SGLang's shapes, over the fake engine."""

import asyncio

import pytest

from tests.helpers.fake_engine import EOS, ByteTokenizer, FakeEngine, text_reply
from tests.helpers.server_harness import Server, eventually, with_server


def _ids(text: str) -> list[int]:
    return list(text.encode())


def test_generate_text_answers_with_ids_and_meta_info():
    async def body(server: Server):
        request = {"text": "abc", "sampling_params": {"max_new_tokens": 9}, "rid": "mine-1"}
        async with server.session.post(server.url + "/generate", json=request) as response:
            answer = await response.json()
            assert response.headers["X-Request-ID"] == "mine-1"
        assert answer["text"] == "hello"
        assert answer["output_ids"] == [*_ids("hello"), EOS]
        meta = answer["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert meta == {
            "id": "mine-1",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "cached_tokens": 2,
            "weight_version": "default",
        }
        assert "index" not in answer

    with_server(body, engine=FakeEngine(num_cached_tokens=2))


def test_generate_input_ids_lists_and_n():
    async def body(server: Server):
        for given, prompts in (
            ({"input_ids": [5, 6]}, [[5, 6]]),
            ({"input_ids": [[5, 6], [7]]}, [[5, 6], [7]]),
            ({"text": ["a", "bc"]}, [_ids("a"), _ids("bc")]),
        ):
            server.engine.submitted.clear()
            params = {"n": 2, "max_new_tokens": 2, "temperature": 0.0, "sampling_seed": 4}
            status, answers = await server.post("/generate", {**given, "sampling_params": params})
            assert status == 200, answers
            assert [answer["index"] for answer in answers] == list(range(2 * len(prompts)))
            assert {answer["text"] for answer in answers} == {"he"}
            reasons = [answer["meta_info"]["finish_reason"] for answer in answers]
            assert reasons == [{"type": "length", "length": 2}] * len(answers)
            submitted = server.engine.submitted
            assert [r.prompt_token_ids for r in submitted[::2]] == prompts
            assert {r.params.temperature for r in submitted} == {0.0}
            assert submitted[0].params.seed == 4
        assert server.state.calls.all() == []

    with_server(body)


def test_generate_streams_everything_so_far():
    async def body(server: Server):
        events = await server.stream("/generate", {"text": "a", "sampling_params": {"stop": "o"}})
        assert [event["text"] for event in events] == ["h", "he", "hel", "hell", "hell"]
        assert events[-1]["output_ids"] == _ids("hello")
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "o"}
        assert events[0]["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in events[0]["meta_info"]

    with_server(body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": "12"}, "input_ids"),
        ({"input_ids": [258]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1] * 600}, "input_ids"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "rid": "\n"}, "rid"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 600}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 0}}, "n"),
        ({"text": "a", "sampling_params": {"regex": 1}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
    ],
)
def test_generate_refuses_by_the_name_the_client_used(body, param):
    async def run(server: Server):
        status, answer = await server.post("/generate", body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert server.engine.submitted == []
        assert server.state.admission.num_requests == 0

    with_server(run)


def test_generate_takes_neutral_and_unknown_fields():
    async def body(server: Server):
        request = {
            "text": "",
            "return_logprob": False,
            "logprob_start_len": -1,
            "image_data": None,
            "extra_key": "tenant",
            "sampling_params": {"json_schema": None, "mystery": 1},
        }
        status, _ = await server.post("/generate", request)
        assert status == 200
        assert server.engine.submitted[0].cache_salt == "tenant"
        assert server.engine.submitted[0].params.max_tokens == 128
        _, text = await server.get("/metrics")
        assert "unknown_request_fields_total" in text

    with_server(body, tokenizer=ByteTokenizer(adds_bos=True))


def test_generate_grammars_reach_the_engine():
    async def body(server: Server):
        for name, value, kind in (
            ("json_schema", '{"type": "object"}', "json_schema"),
            ("regex", "a+", "regex"),
            ("ebnf", 'root ::= "a"', "grammar"),
        ):
            request = {"text": "a", "sampling_params": {name: value}}
            status, answer = await server.post("/generate", request)
            assert status == 200, answer
            assert server.engine.submitted[-1].params.grammar.kind == kind

    with_server(body)


def test_abort_request_ends_a_call_by_id_or_all():
    async def body(server: Server):
        def start(rid: str):
            return asyncio.create_task(
                server.post("/generate", {"text": "a", "rid": rid, "sampling_params": {"n": 2}})
            )

        first, second, third = start("one"), start("two"), start("three")
        await eventually(lambda: server.engine.num_running == 6)
        assert (await server.post("/abort_request", {"rid": "none"}))[1]["num_aborted"] == 0
        status, answer = await server.post("/abort_request", {"rid": "two"})
        assert (status, answer["num_aborted"]) == (200, 2)
        status, answer = await second
        assert (status, answer["error"]["type"]) == (499, "request_aborted")
        assert not first.done()
        assert not third.done()
        assert (await server.post("/abort_request", {"abort_all": True}))[1]["num_aborted"] == 4
        assert [(await task)[0] for task in (first, third)] == [499, 499]
        assert server.engine.num_running == 0
        assert server.state.admission.num_requests == 0
        for wrong in ({}, {"rid": "a", "abort_all": True}):
            assert (await server.post("/abort_request", wrong))[0] == 400
        _, text = await server.get("/metrics")
        assert 'finished_reason="abort",model_name="test/model"} 6.0' in text

    with_server(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.05))


def test_abort_request_ends_a_stream_with_an_error_event():
    async def body(server: Server):
        headers = {"X-Request-ID": "stream-1"}
        request = {"prompt": "a", "stream": True, "max_tokens": 300}
        async with server.session.post(
            server.url + "/v1/completions", json=request, headers=headers
        ) as response:
            await response.content.readuntil(b"\n\n")
            await server.post("/abort_request", {"rid": "stream-1"})
            rest = await response.content.read()
        assert b'"type":"request_aborted"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")

    with_server(body, engine=FakeEngine(text_reply("x" * 400), delay_s=0.02))
