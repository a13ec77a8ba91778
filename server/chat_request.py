"""What a chat request asks of prompt and answer: messages, tools, reasoning, template values.

Owns the checks of these fields and their form for the chat template. Sampling fields and parsing
are in `validation`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.parsers.registry import ChatFormat
from compiled_engine.server.protocol import ChatMessage, ChatRequest, NamedToolChoice, Tool

MAX_TOOLS = 1024
MAX_PARAMETER_DEPTH = 128
MAX_KWARG_CHARS = 1024
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_CHANNEL_EFFORTS = ("low", "medium", "high")
# Template variables that the server itself sets, or that would change what it relies on.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "builtin_tools",
        "chat_template",
        "continue_final_message",
        "documents",
        "eos_token",
        "messages",
        "pad_token",
        "tokenize",
        "tools",
        "unk_token",
    }
)


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What a request wants of tools.

    Attributes:
        tools: all of them, as templates expect them; empty where calls are not wanted.
        schemas: name -> JSON schema of the arguments.
        choice: "auto", "required", or "named" (then `schemas` holds that tool alone).
        is_parallel: whether one answer may hold several calls.
    """

    tools: list[dict[str, Any]]
    schemas: dict[str, dict[str, Any]]
    choice: Literal["auto", "required", "named"]
    is_parallel: bool
    strict: frozenset[str] = frozenset()


def tool_use(request: ChatRequest) -> ToolUse | None:
    """The tools that the answer may call; None where it may call none.

    Raises:
        InvalidRequestError: names the field and, in a list, the item.
    """
    tools = _checked_tools(request.tools or [])
    choice = request.tool_choice
    is_forced = choice == "required" or isinstance(choice, NamedToolChoice)
    if is_forced and not tools:
        raise InvalidRequestError(
            "tool_choice asks for a tool, but tools is empty", param="tool_choice"
        )
    if not tools or choice == "none":
        return None
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    chosen: Literal["auto", "required", "named"] = "auto"
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in schemas:
            raise InvalidRequestError(
                f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice"
            )
        schemas, chosen = {name: schemas[name]}, "named"
    elif choice == "required":
        chosen = "required"
    return ToolUse(
        tools=[_template_tool(tool) for tool in tools],
        schemas=schemas,
        choice=chosen,
        is_parallel=request.parallel_tool_calls is not False and chosen != "named",
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
    )


def _checked_tools(tools: Sequence[Tool]) -> Sequence[Tool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        where = f"tools[{index}].function.name"
        if not _TOOL_NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{where} is {name[:64]!r}; allowed are 1 to 128 letters, digits and _ . : / -",
                param=where,
            )
        if name in names:
            raise InvalidRequestError(f"{where} is {name!r}, which is there twice", param=where)
        names.add(name)
        _check_depth(tool.function.parameters, f"tools[{index}].function.parameters")
    return tools


def _check_depth(value: Any, where: str) -> None:
    """Raises InvalidRequestError for JSON that is nested too deep; without recursion itself."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_PARAMETER_DEPTH:
            raise InvalidRequestError(
                f"{where} is nested deeper than {MAX_PARAMETER_DEPTH} levels", param=where
            )
        if isinstance(part, Mapping):
            waiting.extend((inner, depth + 1) for inner in part.values())
        elif isinstance(part, list):
            waiting.extend((inner, depth + 1) for inner in part)


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shown}


def chat_max_tokens(request: ChatRequest) -> int | None:
    """The client's limit on generated tokens: `max_completion_tokens`, or the older `max_tokens`.

    Raises:
        InvalidRequestError: both are given and differ.
    """
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequestError(
            f"max_completion_tokens is {newer} but max_tokens is {older}; give one of them",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def chat_num_top(request: ChatRequest) -> int | None:
    """The likeliest tokens to list with each token of the answer; None lists none.

    Raises:
        InvalidRequestError: a number is given, but `logprobs` is not true.
    """
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequestError(
            f"top_logprobs is {request.top_logprobs}, but logprobs is not true",
            param="top_logprobs",
        )
    return None


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content, arguments as objects.

    The role "developer" becomes "system", which is the name templates know. Text parts of one
    message are joined by line breaks.

    Raises:
        InvalidRequestError: no messages, a part that is not text, or arguments that are no object.
    """
    if not messages:
        raise InvalidRequestError("messages is empty: at least one is needed", param="messages")
    return [_template_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _template_message(path: str, message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _content_text(path, message)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        f"{path}.tool_calls[{i}].function.arguments", call.function.arguments
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = result["reasoning"] = reasoning
        if not result["content"]:
            # gpt-oss takes it by this name, and only beside an empty content.
            result["thinking"] = reasoning
    return result


def _content_text(path: str, message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and (
            message.tool_calls or message.reasoning_content or message.reasoning
        ):
            return ""
        raise InvalidRequestError(f"{path}.content is missing", param=f"{path}.content")
    if not content:
        raise InvalidRequestError(
            f"{path}.content has no parts: at least one is needed", param=f"{path}.content"
        )
    texts = []
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        if part.type != "text":
            raise InvalidRequestError(
                f"{where} is of type {part.type[:64]!r}; the model takes text only", param=where
            )
        if part.text is None:
            raise InvalidRequestError(f"{where}.text is missing", param=f"{where}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _arguments(path: str, text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is no valid JSON: {error}", param=path) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must hold a JSON object", param=path)
    return value


def template_kwargs(
    values: Mapping[str, Any] | None,
    variables: frozenset[str] = frozenset(),
    *,
    effort: str | None = None,
    chat_format: ChatFormat | None = None,
) -> dict[str, Any]:
    """Values for the chat template: checked `chat_template_kwargs`, and the reasoning effort.

    Args:
        values: as the client gave them; they win over the effort.
        variables: names that the template reads.
        effort: the client's `reasoning_effort`.
        chat_format: of the served model.

    Raises:
        InvalidRequestError: another name or type; a template itself is never taken from a request.
    """
    allowed = (variables | set(_SWITCHES)) - _RESERVED_KWARGS
    for name, value in (values or {}).items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name not in allowed:
            raise InvalidRequestError(
                f"{where} is not allowed; allowed are: {', '.join(sorted(allowed))}",
                param="chat_template_kwargs",
            )
        if name in _SWITCHES and not isinstance(value, bool):
            raise InvalidRequestError(
                f"{where} must be true or false", param="chat_template_kwargs"
            )
        if not _is_small(value):
            raise InvalidRequestError(
                f"{where} must be true, false, a number, or a text of at most {MAX_KWARG_CHARS} "
                "characters",
                param="chat_template_kwargs",
            )
    effects = _effort_kwargs(effort, variables, chat_format) if effort else {}
    return {**effects, **(values or {})}


def _is_small(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_KWARG_CHARS
    return value is None or isinstance(value, (bool, int, float))


def _effort_kwargs(
    effort: str, variables: frozenset[str], chat_format: ChatFormat | None
) -> dict[str, Any]:
    uses_channels = chat_format is not None and chat_format.uses_channels
    allowed = _CHANNEL_EFFORTS if uses_channels else _EFFORTS
    if effort not in allowed:
        raise InvalidRequestError(
            f"reasoning_effort is {effort[:64]!r}; allowed are {', '.join(allowed)}",
            param="reasoning_effort",
        )
    result: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in variables}
    if "reasoning_effort" in variables:
        result["reasoning_effort"] = effort
    if not result and effort != "none":
        raise InvalidRequestError(
            "reasoning_effort has no effect on this model; leave it out", param="reasoning_effort"
        )
    return result
