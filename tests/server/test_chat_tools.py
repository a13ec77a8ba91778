"""Tool calls and reasoning through the real server: the stream's contract, history, refusals."""

from __future__ import annotations

import json
import re

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from compiled_engine.config import ServerConfig
from compiled_engine.server.parsers.registry import TOOL_FORMATS
from tests.helpers.fake_engine import EOS, FakeEngine, TemplateTokenizer, text_reply
from tests.helpers.qwen_chat import CALL, LIMITS, QWEN
from tests.helpers.server_harness import MODEL, Server, with_server

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"does {name}",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("f", "now")
]
NOW = '<tool_call>\n{"name": "now"}\n</tool_call>'


def _run(test, text="", *, template=QWEN, tokens_per_event=1, reply=None, config=None):
    engine = FakeEngine(reply or text_reply(text), tokens_per_event=tokens_per_event, limits=LIMITS)
    tokenizer = TemplateTokenizer(template)
    with_server(test, engine=engine, tokenizer=tokenizer, config=config)


async def _both(server: Server, **fields):
    """The answer in one piece, and the chunks of a stream, which must say the same."""
    body = {"messages": USER, **fields}
    status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200, answer
    ChatCompletion.model_validate(answer, strict=True)
    options = {"stream_options": {"include_usage": True}}
    chunks = await server.stream("/v1/chat/completions", {**body, **options})
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]
    gathered = [_gather(chunks, choice["index"]) for choice in answer["choices"]]
    for whole, streamed in zip(answer["choices"], gathered, strict=True):
        _without_ids(whole["message"], streamed["message"])
        assert whole["finish_reason"] == streamed["finish_reason"]
        assert whole["stop_reason"] == streamed["stop_reason"]
    return answer, chunks


def _gather(chunks, index: int):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] is not None for c in choices].index(True) == len(choices) - 1
    message = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in choices[1:]:
        delta = choice["delta"]
        assert "role" not in delta
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for part in delta.get("tool_calls", []):
            calls = message["tool_calls"]
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                assert part["function"]["name"]
                calls.append({**part, "function": dict(part["function"])})
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                assert part["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    return {**choices[-1], "message": message}


def _without_ids(whole, streamed):
    assert (whole["content"] or "") == streamed["content"]
    assert whole.get("reasoning", "") == whole.get("reasoning_content", "") == streamed["reasoning"]
    functions = [call["function"] for call in whole.get("tool_calls", [])]
    assert functions == [call["function"] for call in streamed["tool_calls"]]


@pytest.mark.parametrize("tokens_per_event", [1, 3, 500])
def test_calls_with_text_and_reasoning(tokens_per_event):
    text = f"<think>\nwhy\n</think>\n\nLook:\n{CALL}\n{NOW}"

    async def body(server: Server):
        answer, _ = await _both(server, tools=TOOLS)
        (choice,) = answer["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("Look:", "why")
        calls = [call["function"] for call in message["tool_calls"]]
        assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "now", "arguments": "{}"}]
        usage = answer["usage"]
        assert usage["completion_tokens"] == len(text) + 1
        # From the opening tag's last character to the closing tag's.
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(">\nwhy\n</think>")

    _run(body, text, tokens_per_event=tokens_per_event)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "content", "num_calls"),
    [
        (CALL, {"tools": TOOLS}, "tool_calls", None, 1),
        (CALL, {"tools": TOOLS, "n": 2}, "tool_calls", None, 1),
        (CALL + NOW, {"tools": TOOLS, "parallel_tool_calls": False}, "tool_calls", None, 1),
        ("Hello", {"tools": TOOLS}, "stop", "Hello", 0),
        ("Hello", {"tools": TOOLS, "max_tokens": 3}, "length", "Hel", 0),
        (CALL, {"tools": TOOLS, "max_tokens": len(CALL) - 25}, "length", None, 1),
        (CALL, {"tools": TOOLS, "max_tokens": 8}, "length", "<tool_ca", 0),
        (CALL, {"tools": TOOLS, "max_tokens": 15}, "length", "", 0),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}, "stop", CALL, 0),
        (CALL, {}, "stop", CALL, 0),
        ("ab END" + CALL, {"tools": TOOLS, "stop": ["END"]}, "stop", "ab ", 0),
        ("ab EN" + CALL, {"tools": TOOLS, "stop": ["END"]}, "tool_calls", "ab EN", 1),
        ("ab E" + CALL + "ND", {"tools": TOOLS, "stop": ["END"]}, "tool_calls", "ab END", 1),
        (CALL, {"tools": TOOLS, "stop": ["name", "\n"]}, "tool_calls", None, 1),
        (CALL + "x END", {"tools": TOOLS, "stop": ["END"]}, "tool_calls", "x ", 1),
        (CALL.replace("1", '"Münster 😀 \\u00e9"'), {"tools": TOOLS}, "tool_calls", None, 1),
        ("天气 é 👩‍👩‍👧 " + CALL, {"tools": TOOLS}, "tool_calls", "天气 é 👩‍👩‍👧", 1),
        ("<tool_call>{}</tool_call>", {"tools": TOOLS}, "stop", "<tool_call>{}</tool_call>", 0),
    ],
)
def test_finish_reason_and_content(text, fields, reason, content, num_calls):
    async def body(server: Server):
        for server.engine.tokens_per_event in (1, 4):
            answer, _ = await _both(server, **fields)
            for choice in answer["choices"]:
                assert choice["finish_reason"] == reason
                assert choice["message"]["content"] == content
                assert len(choice["message"].get("tool_calls", [])) == num_calls

    _run(body, text)


def test_no_parallel_calls_ends_the_sequence_early():
    async def body(server: Server):
        answer, _ = await _both(server, tools=TOOLS, parallel_tool_calls=False)
        assert answer["usage"]["completion_tokens"] < len(CALL) + len(NOW)
        assert len(server.engine.aborted) == 2

    _run(body, CALL + NOW + "x" * 200)


@pytest.mark.parametrize("kwargs", [{}, {"starts_thinking": True}])
def test_stop_strings_act_on_the_answer_only(kwargs):
    text = "Question: is 9.8 larger?</think>Yes.\nQuestion: next"

    async def body(server: Server):
        answer, _ = await _both(server, stop=["Question:"], chat_template_kwargs=kwargs)
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Question:")
        assert choice["message"]["content"] == "Yes.\n"
        assert choice["message"]["reasoning"] == "Question: is 9.8 larger?"

    _run(body, text if kwargs else "<think>" + text)


def test_thinking_off_gives_content_and_calls_only():
    async def body(server: Server):
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            answer, _ = await _both(server, tools=TOOLS, **fields)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert "reasoning" not in choice["message"]
            assert choice["message"]["content"] is None
            prompt = bytes(server.engine.submitted[-1].prompt_token_ids).decode()
            assert prompt.endswith("</think>\n\n")

    _run(body, CALL)


def test_official_client_gathers_calls():
    async def body(server: Server):
        client = AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)
        async with client:
            stream = client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS)
            async with stream as events:
                async for _ in events:
                    pass
                final = await events.get_final_completion()
        (choice,) = final.choices
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in choice.message.tool_calls] == ["f", "now"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}

    _run(body, CALL + "\n" + NOW)


HISTORY = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "why",
        "tool_calls": [
            {
                "id": "call_x",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_x", "content": "7"},
]


def test_history_with_calls_reasoning_and_results_is_rendered():
    async def body(server: Server):
        await _both(server, tools=TOOLS, messages=HISTORY)
        prompt = bytes(server.engine.submitted[0].prompt_token_ids).decode()
        assert '"name": "now"' in prompt
        assert '<think>why</think><tool_call>{"name": "f", "arguments": {"a": 1}}' in prompt
        assert "[tool]7" in prompt

    _run(body, "ok")


def test_template_without_tools_gets_them_as_text():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

    async def body(server: Server):
        messages = [{"role": "system", "content": "Be kind."}, *HISTORY, HISTORY[-1]]
        answer, _ = await _both(server, tools=TOOLS, messages=messages)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        prompt = bytes(server.engine.submitted[0].prompt_token_ids).decode()
        assert prompt.startswith("[system]Be kind.\n\n# Tools\n")
        assert '{"type": "function", "function": {"name": "f", "description": "does f"' in prompt
        assert (
            '[assistant]<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in prompt
        )
        result = "<tool_response>\n7\n</tool_response>"
        assert f"[user]{result}\n{result}[assistant]" in prompt

    _run(body, CALL, template=template)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "messages": "history"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"starts_thinking": True}},
        {"add_generation_prompt": False},
        {"messages": "continued", "continue_final_message": True},
    ],
)
@pytest.mark.parametrize("template", [QWEN, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_tokenize_counts_what_chat_sends(fields, template):
    continued = [*USER, {"role": "assistant", "content": "So"}]
    messages = {"history": HISTORY, "continued": continued}.get(fields.get("messages"), USER)
    request = {**fields, "messages": messages}
    if template != QWEN:
        request.pop("chat_template_kwargs", None)

    async def body(server: Server):
        status, counted = await server.post("/tokenize", request)
        assert status == 200, counted
        status, answer = await server.post("/v1/chat/completions", request)
        assert status == 200, answer
        assert counted["tokens"] == server.engine.submitted[-1].prompt_token_ids
        assert counted["count"] == answer["usage"]["prompt_tokens"]

    _run(body, "ok", template=template)


def test_tokenize_refuses_what_chat_refuses_and_chat_fields_beside_a_prompt():
    async def body(server: Server):
        for fields, param in (
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"reasoning_effort": "frantic"}, "reasoning_effort"),
            ({"messages": None, "prompt": "a", "tools": TOOLS}, "tools"),
            (
                {"messages": None, "prompt": "a", "add_generation_prompt": False},
                "add_generation_prompt",
            ),
        ):
            status, answer = await server.post("/tokenize", {"messages": USER, **fields})
            assert (status, answer["error"]["param"]) == (400, param), answer

    _run(body)


@pytest.mark.parametrize(
    ("marker", "expected"),
    [("<|tool_calls_section_begin|>", "functions.f:0"), ("[TOOL_CALLS]", "000000000")],
)
def test_ids_of_earlier_calls_have_the_form_of_the_model(marker, expected):
    template = (
        "{# " + marker + " #}{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<{{ c.id }}>{% endfor %}"
        "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
    )

    async def body(server: Server):
        await _both(server, tools=TOOLS, messages=HISTORY)
        prompt = bytes(server.engine.submitted[0].prompt_token_ids).decode()
        assert prompt.count(f"<{expected}>") == 2

    _run(body, "ok", template=template)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"reasoning_effort": "frantic"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"starts_thinking": "x" * 5000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"starts_thinking": [1]}}, "chat_template_kwargs"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(fields, param):
    async def body(server: Server):
        request = {"messages": USER, **fields}
        status, answer = await server.post("/v1/chat/completions", request)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert server.engine.submitted == []

    _run(body)


def test_forced_calls_reach_the_engine_as_a_grammar():
    async def body(server: Server):
        named = {"type": "function", "function": {"name": "f"}}
        for choice, num_names in (("required", 2), (named, 1)):
            answer, _ = await _both(server, tools=TOOLS, tool_choice=choice)
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            grammar = server.engine.submitted[-1].params.grammar
            assert grammar.kind == "structural_tag"
            assert grammar.text.count('"begin":"<tool_call>') == num_names
        await _both(server, tools=TOOLS, tool_choice="auto")
        assert server.engine.submitted[-1].params.grammar is None

    _run(body, CALL)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_tool_choice_is_enforced_with_every_parser(parser):
    """The fake engine knows no grammars and answers in prose: what counts is what it was given."""
    named = {"type": "function", "function": {"name": "f"}}
    cases = [("required", 2), (named, 1), ("auto", 0), ("none", 0)]

    async def body(server: Server):
        for choice, num_names in cases:
            for stream in (False, True):
                request = {"messages": USER, "tools": TOOLS, "tool_choice": choice}
                if stream:
                    await server.stream("/v1/chat/completions", request)
                else:
                    status, answer = await server.post("/v1/chat/completions", request)
                    assert status == 200, answer
                    assert "tool_calls" not in answer["choices"][0]["message"]
                grammar = server.engine.submitted[-1].params.grammar
                assert (grammar is None) == (num_names == 0)
                if grammar is not None:
                    names = [tool["function"]["name"] for tool in TOOLS]
                    tags = [tag for tag in _begins(json.loads(grammar.text)) if tag]
                    found = {n for n in names if any(re.search(rf"\b{n}\b", t) for t in tags)}
                    assert len(found) == num_names

    _run(body, "I would rather write prose.", config=ServerConfig(port=0, tool_call_parser=parser))


def _begins(form) -> list[str]:
    """What the tags inside a structural tag begin with."""
    if isinstance(form, list):
        return [begin for part in form for begin in _begins(part)]
    if not isinstance(form, dict):
        return []
    own = [form["begin"]] if form.get("type") == "tag" else []
    return own + [begin for part in form.values() for begin in _begins(part)]


def test_deep_and_large_schemas_are_refused_not_crashed_on():
    deep = '{"properties":{"a":' * 480 + "{}" + "}}" * 480
    many = ",".join(f'"key{i}":{{"type":"string"}}' for i in range(9000))
    large = f'{{"type":"object","properties":{{{many}}}}}'

    async def body(server: Server):
        for schema in (deep, large):
            for choice in ("auto", "required"):
                raw = (
                    f'{{"messages":[{{"role":"user","content":"hi"}}],"tool_choice":"{choice}",'
                    f'"tools":[{{"function":{{"name":"f","parameters":{schema}}}}}]}}'
                )
                status, answer = await server.post("/v1/chat/completions", raw.encode())
                assert status == 400, answer
        assert (await server.post("/v1/chat/completions", {"messages": USER}))[0] == 200

    for template in (QWEN, "{{ messages[0].content }}"):
        _run(body, "ok", template=template)


def test_forced_calls_without_a_form_are_refused():
    async def body(server: Server):
        request = {"messages": USER, "tools": TOOLS, "tool_choice": "required"}
        status, answer = await server.post("/v1/chat/completions", request)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")

    _run(body, config=ServerConfig(port=0, tool_call_parser="none"))


def test_effort_without_effect_is_refused():
    async def body(server: Server):
        request = {"messages": USER, "reasoning_effort": "high"}
        status, answer = await server.post("/v1/chat/completions", request)
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")
        status, _ = await server.post(
            "/v1/chat/completions", {**request, "reasoning_effort": "none"}
        )
        assert status == 200

    _run(body, "ok", template="{{ messages[0].content }}")


def test_channels_of_gpt_oss_through_the_server():
    template = (
        "{{ tools }}<|start|>user<|message|>{{ messages[0].content }}<|end|>"
        "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}<|start|>assistant"
        "{# <|channel|> #}"
    )
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}'
    )

    async def body(server: Server):
        answer, _ = await _both(server, tools=TOOLS, reasoning_effort="low")
        (choice,) = answer["choices"]
        assert choice["message"]["reasoning"] == "why"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        assert choice["finish_reason"] == "tool_calls"
        status, answer = await server.post(
            "/v1/chat/completions", {"messages": USER, "reasoning_effort": "none"}
        )
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")

    _run(body, text, template=template)


def test_many_streams_each_end_once():
    texts = [CALL, "Hello", f"<think>x</think>{CALL}{NOW}", "<think>cut", "a STOP b"]

    def reply(request):
        return [*texts[(request.params.seed or 0) % len(texts)].encode(), EOS]

    async def body(server: Server):
        for seed in range(0, 60, 1):
            fields = {"n": 1 + seed % 2, "seed": seed, "stop": ["STOP"]}
            if seed % 3:
                fields["tools"] = TOOLS
            if seed % 7 == 0:
                fields["max_tokens"] = 5 + seed
            await _both(server, **fields)

    _run(body, reply=reply, tokens_per_event=3)
