"""Tools in the prompt: ids of earlier calls, and templates that know nothing of tools.

A chat template without a branch for tools gets them as text, in the words of Qwen's template: the
definitions behind the system message, earlier calls as `<tool_call>` objects, and results as
`<tool_response>` in the user's turn. The Hermes parser reads what such a model answers.

Source: the chat template of Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_engine.server.parsers.registry import CallIdForm

_SYSTEM_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = Mapping[str, Any]


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Messages that a template without tools can render, with the tools in the system message."""
    result: list[Message] = []
    is_after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_after_result:
                text = f"{result.pop()['content']}\n{text}"
            result.append({"role": "user", "content": text})
        else:
            result.append(_call_as_text(message) if message.get("tool_calls") else message)
        is_after_result = is_result
    if not tools:
        return result
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _SYSTEM_TEXT.format(tools=lines)
    if result and result[0]["role"] == "system":
        first = result[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *result[1:]]
    return [{"role": "system", "content": text}, *result]


def _call_as_text(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        calls.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    content = message["content"]
    parts = [content] if content else []
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*parts, *calls])}


def with_call_ids(messages: Sequence[Message], form: CallIdForm) -> list[Message]:
    """The messages with the ids of calls in the form that the model was trained on.

    Clients see ids of another form, unique over all conversations.
    """
    if form == "any":
        return list(messages)
    ids: dict[str, str] = {}
    result: list[Message] = []
    num_calls = 0
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                name = call["function"]["name"]
                fitting = (
                    f"functions.{name}:{num_calls}" if form == "kimi_k2" else f"{num_calls:09d}"
                )
                num_calls += 1
                if call["id"]:
                    ids[call["id"]] = fitting
                calls.append({**call, "id": fitting})
            changed["tool_calls"] = calls
        given = message.get("tool_call_id")
        if given in ids:
            changed["tool_call_id"] = ids[given]
        result.append(changed)
    return result
