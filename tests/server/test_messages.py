"""`/v1/messages`: the official `anthropic` client, and what the chat path is given."""

from __future__ import annotations

import json
import re

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message

from compiled_engine.config import ServerConfig
from tests.helpers.fake_engine import ByteTokenizer, FakeEngine, TemplateTokenizer, text_reply
from tests.helpers.qwen_chat import CALL, LIMITS, NOW, QWEN
from tests.helpers.server_harness import MODEL, Server, eventually, with_server

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": name,
        "description": f"does {name}",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    for name in ("f", "now")
]


def _run(test, text="hello", *, template=None, config=None, **engine_options) -> None:
    engine = FakeEngine(text_reply(text), limits=LIMITS, **engine_options)
    tokenizer = ByteTokenizer() if template is None else TemplateTokenizer(template)

    async def body(server: Server):
        client = AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0)
        async with client:
            await test(client, server)

    with_server(body, engine=engine, tokenizer=tokenizer, config=config)


def _prompt(server: Server) -> str:
    """The prompt of the newest request."""
    return bytes(server.engine.submitted[-1].prompt_token_ids).decode()


async def _create(client, messages=USER, **fields):
    """The message in one piece, and streamed, which must say the same."""
    options = {"model": MODEL, "max_tokens": 500, "messages": messages, **fields}
    whole = await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        events = [event async for event in stream]
        streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason
    assert whole.stop_sequence == streamed.stop_sequence
    assert whole.usage == streamed.usage
    assert [_shown(block) for block in whole.content] == [_shown(b) for b in streamed.content]
    return whole, [event.type for event in events]


def _shown(block):
    names = ("type", "text", "thinking", "name", "input")
    return {name: getattr(block, name) for name in names if getattr(block, name, None) is not None}


async def _refused(client, match: str, messages=USER, **fields) -> None:
    options = {"model": MODEL, "max_tokens": 5, "messages": messages, **fields}
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await client.messages.create(**options)
    body = refusal.value.body
    assert re.search(match, body["error"]["message"])
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"]


def test_messages_text_whole_and_streamed():
    async def body(client, server: Server):
        message, events = await _create(client, system="be kind")
        assert _shown(message.content[0]) == {"type": "text", "text": "hello"}
        assert message.stop_reason == "end_turn"
        assert message.model == MODEL
        assert message._request_id
        assert _prompt(server) == "[system]be kind\n[user]hi\n[assistant]"
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 0)
        assert usage.input_tokens == len(_prompt(server)) - 4
        assert usage.output_tokens == 6
        assert events[:2] == ["message_start", "content_block_start"]
        assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]

    _run(body, num_cached_tokens=4)


def test_messages_raw_events_are_named_and_pinged():
    async def body(client, server: Server):
        fields = {"max_tokens": 9, "messages": USER, "stream": True}
        async with server.session.post(f"{server.url}/v1/messages", json=fields) as response:
            text = await response.text()
        assert "[DONE]" not in text
        blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
        names = [lines[0].removeprefix("event: ") for lines in blocks]
        events = [json.loads(lines[1].removeprefix("data: ")) for lines in blocks]
        assert names == [event["type"] for event in events]
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert events[0]["message"]["content"] == []
        assert events[0]["message"]["stop_reason"] is None
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        assert "".join(event["delta"]["text"] for event in deltas) == "hello"
        status, whole = await server.post("/v1/messages", {"max_tokens": 9, "messages": USER})
        assert status == 200
        Message.model_validate(whole, strict=True)

    _run(body)


def test_messages_stop_reasons():
    async def body(client, server: Server):
        message, _ = await _create(client, stop_sequences=["lo", "x"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
        assert message.content[0].text == "hel"
        message, _ = await _create(client, max_tokens=2)
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
        await _create(client, extra_body=sampling)
        params = server.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
        await _create(client, metadata={"user_id": "u"}, service_tier="auto")

    _run(body)


def test_messages_thinking_text_and_tools():
    async def body(client, server: Server):
        message, events = await _create(client, tools=TOOLS)
        kinds = [_shown(block) for block in message.content]
        assert kinds == [
            {"type": "thinking", "thinking": "so"},
            {"type": "text", "text": "Ok."},
            {"type": "tool_use", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "name": "now", "input": {}},
        ]
        assert message.stop_reason == "tool_use"
        assert events.count("content_block_stop") == 4
        assert len({block.id for block in message.content[2:]}) == 2
        # The whole answer can be given back.
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "7", "is_error": i == 1}
            for i, block in enumerate(message.content[2:])
        ]
        again = [
            *USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ]
        await client.messages.create(model=MODEL, max_tokens=500, messages=again, tools=TOOLS)
        prompt = _prompt(server)
        assert "[assistant]<think>so</think>Ok.<tool_call>" in prompt
        assert '{"name": "f", "arguments": {"a": 1}}' in prompt
        assert "[tool]7[tool]Error: 7[user]go on[assistant]" in prompt
        await client.messages.create(
            model=MODEL, max_tokens=500, messages=again, thinking={"type": "disabled"}
        )
        assert _prompt(server).endswith("[assistant]<think>\n\n</think>\n\n")

    _run(body, f"<think>so</think>Ok. {CALL}{NOW}", template=QWEN)


def test_messages_tool_choice_reaches_the_grammar():
    async def body(client, server: Server):
        async def grammar(**choice):
            await client.messages.create(
                model=MODEL, max_tokens=500, messages=USER, tools=TOOLS, tool_choice=choice
            )
            return server.engine.submitted[-1].params.grammar

        assert await grammar(type="auto") is None
        assert await grammar(type="none") is None
        assert "<tools>" not in _prompt(server)
        assert '"at_least_one":true' in (await grammar(type="any")).text
        named = (await grammar(type="tool", name="now")).text
        assert "now" in named
        assert '\\"f\\"' not in named
        single = await grammar(type="any", disable_parallel_tool_use=True)
        assert "at_least_one" not in single.text
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        await client.messages.create(
            model=MODEL,
            max_tokens=500,
            messages=USER,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
        assert "properties" in server.engine.submitted[-1].params.grammar.text

    _run(body, CALL, template=QWEN)


def test_messages_call_that_is_cut_has_no_input():
    async def body(client, server: Server):
        message = await client.messages.create(
            model=MODEL, max_tokens=len(CALL) - 20, messages=USER, tools=TOOLS
        )
        assert message.stop_reason == "max_tokens"
        assert _shown(message.content[-1]) == {"type": "tool_use", "name": "f", "input": {}}

    _run(body, CALL, template=QWEN)


def test_messages_prefill_is_continued():
    async def body(client, server: Server):
        await _create(client, [*USER, {"role": "assistant", "content": "I say"}])
        assert _prompt(server) == "[user]hi\n[assistant]I say"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await _create(client, [{"role": "user", "content": parts}, *USER])
        assert _prompt(server) == "[user]a\nb\nhi\n[assistant]"
        call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        bad = [*USER, {"role": "assistant", "content": [call]}]
        await _refused(client, r"messages\[1\] is the last message", bad)

    _run(body)


def test_messages_refusals_name_the_field():
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    nested = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    bad_tool = {"type": "web_search_20250305", "name": "web_search"}
    cases = [
        (r"messages\[0\].content\[0\] is of type 'image'", {"messages": _user([image])}),
        (r"content\[0\].content\[0\] is of type 'image'", {"messages": _user([nested])}),
        (r"messages\[0\].content has no blocks", {"messages": _user([])}),
        (r"messages is empty", {"messages": []}),
        (r"system\[0\] is of type 'image'", {"system": [image]}),
        (r"tools\[0\].type is 'web_search_20250305'", {"tools": [bad_tool]}),
        (r"tools\[0\].name is 'a b'", {"tools": [{"name": "a b", "input_schema": {}}]}),
        (r"tools\[0\].input_schema is missing", {"tools": [{"name": "a"}]}),
        (r"tool_choice.name is missing", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
        (r"tool_choice names 'g'", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}),
        (r"budget_tokens", {"thinking": {"type": "adaptive", "budget_tokens": 2}}),
        (r"thinking.type", {"thinking": {"type": "enabled"}}),
        (r"stop_sequences must not hold", {"stop_sequences": [""]}),
        (r"max_tokens is 0", {"max_tokens": 0}),
        (r"temperature", {"extra_body": {"temperature": -1}}),
        (r"mcp_servers is not supported", {"extra_body": {"mcp_servers": [{}]}}),
        (r"container is not supported", {"extra_body": {"container": "c"}}),
        (r"speed is not supported", {"extra_body": {"speed": "fast"}}),
        (r"output_config.effort", {"output_config": {"effort": "max"}}),
    ]

    async def body(client, server: Server):
        for match, fields in cases:
            await _refused(client, match, **fields)
        status, answer = await server.post("/v1/messages", {"messages": USER})
        assert status == 400
        assert "max_tokens" in answer["error"]["message"]
        strict = [{**TOOLS[0], "strict": True, "input_schema": {"properties": 3}}]
        await _refused(client, r"tools\[0\].input_schema", tools=strict)

    _run(body)


def test_messages_thinking_without_a_switch_in_the_template():
    always = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>"

    async def body(client, server: Server):
        await _refused(client, "always reasons", thinking={"type": "disabled"})
        message, _ = await _create(client, thinking={"type": "adaptive"})
        assert [block.type for block in message.content] == ["thinking", "text"]
        omitted = {"type": "adaptive", "display": "omitted"}
        await _refused(client, "thinking.display", thinking=omitted)

    _run(body, "so</think>yes", template=always)


def test_messages_thinking_budget_reaches_the_engine():
    async def body(client, server: Server):
        thinking = {"type": "enabled", "budget_tokens": 3}
        message, _ = await _create(client, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "text"]
        sent = server.engine.submitted[-1].params.thinking
        assert (sent.max_tokens, sent.closing, sent.opening) == (3, "</think>", "")
        for tokens, match in ((5, "less than max_tokens, which is 5"), (-1, "budget_tokens is -1")):
            await _refused(client, match, thinking={**thinking, "budget_tokens": tokens})

    always = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>"
    _run(body, "so</think>yes", template=always)

    async def refused(client, server: Server):
        thinking = {"type": "enabled", "budget_tokens": 3}
        await _refused(
            client, r"thinking\.budget_tokens needs a reasoning parser", thinking=thinking
        )

    never = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    _run(refused, "yes", template=never)


def _user(content):
    return [{"role": "user", "content": content}]


def test_messages_errors_have_anthropics_form():
    config = ServerConfig(port=0, api_key="key")

    async def body(client, server: Server):
        options = {"model": MODEL, "max_tokens": 50, "messages": USER}
        await client.messages.create(**options)
        await client.with_options(api_key=None, auth_token="key").messages.create(**options)
        wrong = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError) as error:
            await wrong.messages.create(**options)
        assert error.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.messages.create(**{**options, "model": "other"})
        assert error.value.body["error"]["type"] == "not_found_error"
        key = {"headers": {"X-API-Key": "key"}}
        status, answer = await server.get("/v1/messages", **key)
        assert (status, answer["type"]) == (405, "error")
        status, answer = await server.get("/v1/models", **key)
        assert status == 200
        server.engine.fail_with = "broken"
        with pytest.raises(anthropic.InternalServerError, match="broken"):
            await client.messages.create(**options)
        server.engine.fail_with = None
        server.engine.delay_s = 0.02
        stream = await client.messages.create(**options, stream=True)
        await anext(aiter(stream))
        server.engine.fail_with = "broken later"
        with pytest.raises(anthropic.APIStatusError, match="broken later") as error:
            async for _ in stream:
                pass
        assert error.value.body["error"]["type"] == "api_error"
        server.engine.kill("gone")
        with pytest.raises(anthropic.APIStatusError, match="gone") as error:
            await client.messages.create(**options)
        assert error.value.status_code == 503
        assert error.value.body["error"]["type"] == "overloaded_error"

    _run(body, config=config)


def test_messages_client_that_leaves_aborts():
    async def body(client, server: Server):
        stream = await client.messages.create(
            model=MODEL, max_tokens=400, messages=USER, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        await eventually(lambda: server.engine.num_running == 0)
        assert len(server.engine.aborted) == 1

    _run(body, "x" * 400, delay_s=0.01)


def test_messages_count_tokens():
    async def body(client, server: Server):
        count = await client.messages.count_tokens(
            model=MODEL, messages=USER, system="s", tools=TOOLS, tool_choice={"type": "any"}
        )
        assert server.engine.submitted == []
        message = await client.messages.create(
            model=MODEL, max_tokens=9, messages=USER, system="s", tools=TOOLS
        )
        assert count.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
            await client.messages.count_tokens(model=MODEL, messages=[])

    _run(body, template=QWEN)
