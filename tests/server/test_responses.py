"""`/v1/responses`: the official `openai` client, stored answers, what the chat path is given."""

from __future__ import annotations

import json
import re

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from compiled_engine.config import ServerConfig
from compiled_engine.server.response_store import ResponseStore, StoredResponse
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine, TemplateTokenizer, text_reply
from tests.helpers.qwen_chat import CALL, LIMITS, NOW, QWEN
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"does {name}",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": False,
    }
    for name in ("f", "now")
]
VOLATILE = {"id", "created_at", "completed_at", "call_id"}


def _run(test, text="hello", *, template=None, config=None, **engine_options) -> None:
    engine = FakeEngine(text_reply(text), limits=LIMITS, **engine_options)
    tokenizer = ByteTokenizer() if template is None else TemplateTokenizer(template)

    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            await test(client, server)

    with_server(body, engine=engine, tokenizer=tokenizer, config=config)


def _prompt(server: Server) -> str:
    """The prompt of the newest request."""
    return bytes(server.engine.submitted[-1].prompt_token_ids).decode()


def _stable(value):
    """The JSON without what differs from call to call."""
    if isinstance(value, dict):
        return {name: _stable(part) for name, part in value.items() if name not in VOLATILE}
    return [_stable(part) for part in value] if isinstance(value, list) else value


async def _create(client, given="hi", **fields):
    """The response in one piece, and streamed, which must say the same; and the stream's events."""
    options = {"model": MODEL, "input": given, **fields}
    whole = await client.responses.create(**options)
    Response.model_validate(whole.model_dump(warnings=False), strict=True)
    events = [event async for event in await client.responses.create(**options, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.output == []
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert _stable(last.response.to_dict()) == _stable(whole.to_dict())
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.response.output]
    async with client.responses.stream(**options) as stream:
        async for _ in stream:
            pass
        if whole.status == "completed":
            gathered = await stream.get_final_response()
            assert gathered.output_text == whole.output_text
    return whole, events


async def _refused(client, match: str, **fields) -> None:
    options = {"model": MODEL, "input": "hi", **fields}
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.create(**options)
    assert re.search(match, refusal.value.body["message"]), refusal.value.body
    assert refusal.value.body["param"] in refusal.value.body["message"]


def _joined(events, kind: str) -> str:
    return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")


def test_responses_text_whole_and_streamed():
    async def body(client, server: Server):
        response, events = await _create(
            client, instructions="be kind", temperature=0.5, top_p=0.9, metadata={"a": "b"}
        )
        assert response.output_text == "hello"
        assert response.status == "completed"
        assert response.metadata == {"a": "b"}
        assert (response.temperature, response.top_p) == (0.5, 0.9)
        assert _prompt(server) == "[system]be kind\n[user]hi\n[assistant]"
        usage = response.usage
        assert usage.input_tokens == len(_prompt(server))
        assert usage.input_tokens_details.cached_tokens == 4
        assert (usage.output_tokens, usage.total_tokens) == (6, usage.input_tokens + 6)
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[2:5] == ["output_item.added", "content_part.added", "output_text.delta"]
        assert kinds[-4:] == [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert _joined(events, "output_text") == "hello"

    _run(body, num_cached_tokens=4)


def test_responses_raw_events_are_named():
    async def body(client, server: Server):
        fields = {"input": "hi", "stream": True}
        async with server.session.post(f"{server.url}/v1/responses", json=fields) as response:
            text = await response.text()
        assert "[DONE]" not in text
        blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
        names = [lines[0].removeprefix("event: ") for lines in blocks]
        assert names == [json.loads(lines[1].removeprefix("data: "))["type"] for lines in blocks]

    _run(body)


def test_responses_cut_answer_is_incomplete():
    async def body(client, server: Server):
        response, _ = await _create(client, max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert response.output_text == "he"

    _run(body)


def test_responses_reasoning_text_and_calls():
    async def body(client, server: Server):
        response, events = await _create(client, tools=TOOLS)
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].content[0].text == "so"
        assert response.output_text == "Ok."
        calls = response.output[2:]
        assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}'), ("now", "{}")]
        assert _joined(events, "reasoning_text") == "so"
        assert _joined(events, "function_call_arguments") == '{"a": 1}{}'
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            for call in calls
        ]
        # The client gives everything back, or names the answer: the prompt is the same.
        user = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
        given = [user, *(item.to_dict() for item in response.output), *results]
        await client.responses.create(model=MODEL, input=given, tools=TOOLS)
        prompt = _prompt(server)
        assert "[user]hi[assistant]<think>so</think>Ok.<tool_call>" in prompt
        assert prompt.endswith("</tool_call>[tool]7[tool]7[assistant]")
        await client.responses.create(
            model=MODEL, input=results, tools=TOOLS, previous_response_id=response.id
        )
        assert _prompt(server) == prompt

    _run(body, f"<think>so</think>Ok. {CALL}{NOW}", template=QWEN)


def test_responses_tool_choice_and_text_format_reach_the_grammar():
    async def body(client, server: Server):
        async def grammar(**fields):
            await client.responses.create(model=MODEL, input="hi", **fields)
            return server.engine.submitted[-1].params.grammar

        assert await grammar(tools=TOOLS) is None
        assert await grammar(tools=TOOLS, tool_choice="none") is None
        assert '"at_least_one":true' in (await grammar(tools=TOOLS, tool_choice="required")).text
        single = await grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert "at_least_one" not in single.text
        named = await grammar(tools=TOOLS, tool_choice={"type": "function", "name": "now"})
        assert '\\"f\\"' not in named.text
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        assert "city" in (await grammar(text={"format": form})).text
        assert (await grammar(text={"format": {"type": "json_object"}})) is not None
        assert await grammar(text={"format": {"type": "text"}, "verbosity": "medium"}) is None
        await grammar(reasoning={"effort": "none", "summary": "auto"})
        assert _prompt(server).endswith("</think>\n\n")

    _run(body, CALL, template=QWEN)


def test_responses_are_stored_continued_and_deleted():
    async def body(client, server: Server):
        first = await client.responses.create(model=MODEL, input="one", instructions="be kind")
        fetched = await client.responses.retrieve(first.id)
        assert fetched.to_dict() == first.to_dict()
        stream = await client.responses.create(
            model=MODEL, input="two", previous_response_id=first.id, stream=True
        )
        second = [event async for event in stream][-1].response
        # Instructions are not carried over.
        expected = "[user]one\n[assistant]hello\n[user]two\n[assistant]"
        assert _prompt(server) == expected
        assert second.previous_response_id == first.id
        await client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        with pytest.raises(openai.NotFoundError) as error:
            await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        assert error.value.param == "previous_response_id"
        await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        assert _prompt(server).startswith(expected + "hello\n[user]three")
        unkept = await client.responses.create(model=MODEL, input="one", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await client.responses.retrieve(second.id, extra_query={"starting_after": 3})

    _run(body)


def test_responses_cut_call_is_not_carried_over():
    async def body(client, server: Server):
        cut = await client.responses.create(
            model=MODEL, input="hi", tools=TOOLS, max_output_tokens=len(CALL) - 20
        )
        assert cut.output[0].status == "incomplete"
        await client.responses.create(model=MODEL, input="again", previous_response_id=cut.id)
        assert _prompt(server) == "[user]hi[user]again[assistant]"

    _run(body, CALL, template=QWEN)


def test_responses_reasoning_is_given_back_by_a_client_without_state():
    async def body(client, server: Server):
        plain, _ = await _create(client)
        assert plain.output[0].encrypted_content is None
        sealed, _ = await _create(client, include=["reasoning.encrypted_content"], store=False)
        reasoning = sealed.output[0].to_dict()
        assert reasoning["encrypted_content"]
        del reasoning["content"]
        user = {"role": "user", "content": "hi"}
        given = [user, reasoning, sealed.output[1].to_dict(), {**user, "content": "more"}]
        await client.responses.create(model=MODEL, input=given)
        assert "[user]hi[assistant]<think>so – ü</think>Ok.[user]more" in _prompt(server)

    _run(body, "<think>so – ü</think>Ok.", template=QWEN)


def test_responses_input_items_are_listed_in_pages():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "7"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    given = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts},
        thought,
        {"role": "assistant", "content": "Ok."},
        call,
        result,
    ]

    async def body(client, server: Server):
        response = await client.responses.create(model=MODEL, input=given)
        listed = client.responses.input_items.list
        items = [item async for item in listed(response.id, order="asc", limit=4)]
        kinds = [item.type for item in items]
        assert kinds == [item.get("type", "message") for item in given]
        assert [part.text for part in items[1].content] == ["a", "b"]
        assert items[2].content[0].text == "hm"
        assert (items[3].role, items[3].content[0].text) == ("assistant", "Ok.")
        assert (items[4].call_id, items[4].name, items[5].output) == ("c", "f", "7")
        assert len({item.id for item in items}) == len(given)
        page = await listed(response.id, limit=2)
        assert [item.id for item in page.data] == [items[5].id, items[4].id]
        assert page.has_next_page()
        page = await listed(response.id, order="asc", after=items[4].id)
        assert [item.id for item in page.data] == [items[5].id]
        again = await client.responses.create(
            model=MODEL, input="more", previous_response_id=response.id
        )
        (item,) = [item async for item in listed(again.id)]
        assert (item.role, item.content[0].text) == ("user", "more")
        for query, param in (
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "msg_x"}, "after"),
            ({"before": "msg_x"}, "before"),
        ):
            with pytest.raises(openai.BadRequestError) as refusal:
                await listed(response.id, extra_query=query)
            assert refusal.value.param == param
        with pytest.raises(openai.NotFoundError):
            await listed("resp_none")

    _run(body)


def test_responses_belong_to_their_key(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann akey\nbob bkey\n")

    async def body(client, server: Server):
        ann, bob = (client.with_options(api_key=key) for key in ("akey", "bkey"))
        response = await ann.responses.create(model=MODEL, input="hi")
        assert (await ann.responses.retrieve(response.id)).id == response.id
        with pytest.raises(openai.NotFoundError):
            await bob.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.create(model=MODEL, input="x", previous_response_id=response.id)

    _run(body, config=ServerConfig(port=0, api_key="key", api_key_file=keys))


def test_responses_refusals_name_the_field():
    image = {"type": "input_image", "image_url": "http://x/y.png"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    cases = [
        ("background needs store", {"background": True, "store": False}),
        ("conversation is not supported", {"conversation": "c"}),
        (r"include\[0\] is 'file_search_call.results'", {"include": ["file_search_call.results"]}),
        ("prompt is not supported", {"prompt": {"id": "p"}}),
        ("truncation is not supported", {"truncation": "auto"}),
        ("top_logprobs needs", {"top_logprobs": 2}),
        ("max_tool_calls is not supported", {"max_tool_calls": 1}),
        (r"tools\[0\].type is 'web_search'", {"tools": [{"type": "web_search"}]}),
        (r"tools\[0\].name is 'a b'", {"tools": [{**TOOLS[0], "name": "a b"}]}),
        (r"tool_choice.type is 'custom'", {"tools": TOOLS, "tool_choice": {"type": "custom"}}),
        (r"tool_choice asks for a tool", {"tool_choice": "required"}),
        (r"input is empty", {"input": []}),
        (r"input\[0\].content\[0\] is of type 'input_image'", {"input": _user([image])}),
        (r"input\[0\].type is 'item_reference'", {"input": [{"type": "item_reference"}]}),
        (r"input\[0\].arguments must hold a JSON object", {"input": [call]}),
        (r"input\[0\].encrypted_content was not", {"input": [{"type": "reasoning", **_FOREIGN}]}),
        (r"input\[0\].role is missing", {"input": [{"content": "x"}]}),
        (r"text.format.type is 'xml'", {"text": {"format": {"type": "xml"}}}),
        (r"text.format.schema", {"text": {"format": {"type": "json_schema", "schema": _BAD}}}),
        (r"text.verbosity", {"text": {"verbosity": "high"}}),
        (r"reasoning.effort", {"reasoning": {"effort": "low"}}),
        (r"reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        (r"max_output_tokens is 0", {"max_output_tokens": 0}),
        (r"max_output_tokens", {"max_output_tokens": 100_000}),
        (r"temperature", {"temperature": -1}),
        (r"input has", {"input": "x" * 20_000}),
    ]

    async def body(client, server: Server):
        for match, fields in cases:
            await _refused(client, match, **fields)

    _run(body)


_FOREIGN = {"summary": [], "encrypted_content": "gAAAAAB"}
_BAD = {"type": "object", "properties": {"a": {"type": "wrong"}}}


def _user(content):
    return [{"role": "user", "content": content}]


def test_responses_errors_and_failures():
    async def body(client, server: Server):
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")
        server.engine.fail_with = "broken"
        with pytest.raises(openai.InternalServerError, match="broken"):
            await client.responses.create(model=MODEL, input="hi", stream=True)
        server.engine.fail_with = None
        server.engine.delay_s = 0.02
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        await anext(aiter(stream))
        server.engine.fail_with = "broken later"
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert last.response.error.message == "broken later"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)

    _run(body)


def test_responses_client_that_leaves_aborts():
    async def body(client, server: Server):
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: server.engine.num_running == 0)
        assert len(server.engine.aborted) == 1

    _run(body, "x" * 400, delay_s=0.01)


def test_response_store_drops_the_one_unused_for_longest():
    store = ResponseStore(max_responses=3, max_bytes=100)
    for name in "abc":
        store.put("", name, StoredResponse(body=b"x" * 10, history=b"y" * 10))
    assert store.get("", "a") is not None
    store.put("", "d", StoredResponse(body=b"x", history=b""))
    assert store.get("", "b") is None
    assert store.get("", "a") is not None
    assert store.get("other", "a") is None
    store.put("", "e", StoredResponse(body=b"x" * 90, history=b""))
    assert (len(store), store.num_bytes) == (1, 90)
    store.put("", "f", StoredResponse(body=b"x" * 101, history=b""))
    assert (len(store), store.num_bytes) == (1, 90)
    assert store.delete("", "e")
    assert not store.delete("", "e")
    assert (len(store), store.num_bytes) == (0, 0)
