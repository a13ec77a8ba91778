"""A request of `/v1/responses` as the chat request that means the same.

Owns what each of its fields becomes and what cannot be honoured. Rules that chats have anyway are
left to the chat path; `FIELD_NAMES` turns its refusals back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCall,
    ToolCallFunction,
)
from compiled_engine.server.responses_items import unseal
from compiled_engine.server.responses_protocol import (
    FunctionCall,
    InputItem,
    InputPart,
    OutputItem,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    TextConfig,
)
from compiled_engine.server.translation import refuse, refuse_unless_neutral
from compiled_engine.server.validation import parse_object

# Fields of the chat path -> the client's.
FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tools[].function": "tools[]",
}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
# What `include` may ask for.
SEALED_REASONING = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (SEALED_REASONING, _LOGPROBS)
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_request(request: ResponsesRequest, conversation: list[ChatMessage]) -> ChatRequest:
    """The chat that a request asks for.

    Args:
        request: as parsed.
        conversation: what came before with the request's own input, from `add_input`.

    Raises:
        InvalidRequestError: a field that cannot be honoured; names it.
    """
    refuse_unless_neutral(request, _REFUSED)
    if request.background and request.store is False:
        refuse("background", "needs store: the answer could not be fetched")
    if request.stream_options and request.stream_options.get("include_obfuscation"):
        refuse("stream_options.include_obfuscation")
    has_logprobs = _includes_logprobs(request)
    messages = list(conversation)
    if request.instructions:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    return ChatRequest(
        messages=messages,
        model=request.model,
        max_tokens=request.max_output_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=_tools(request.tools) if request.tools is not None else None,
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=_effort(request),
        response_format=_response_format(request.text) if request.text is not None else None,
        prompt_cache_key=request.prompt_cache_key,
        logprobs=has_logprobs,
        top_logprobs=request.top_logprobs,
    )


def _includes_logprobs(request: ResponsesRequest) -> bool:
    include = request.include or ()
    for index, name in enumerate(include):
        if name not in _INCLUDABLE:
            supported = ", ".join(_INCLUDABLE)
            refuse(f"include[{index}]", f"is {name[:64]!r}; supported are {supported}")
    has_logprobs = _LOGPROBS in include
    if request.top_logprobs and not has_logprobs:
        refuse("top_logprobs", f"needs {_LOGPROBS} in include")
    return has_logprobs


def _effort(request: ResponsesRequest) -> str | None:
    reasoning = request.reasoning
    if reasoning is None:
        return None
    if reasoning.summary not in (None, "auto"):
        # "auto" is the best there is, and there is none.
        refuse("reasoning.summary", "cannot be made by this server; leave it out")
    return reasoning.effort


def _tools(tools: Sequence[ResponsesTool]) -> list[Tool]:
    result = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            refuse(f"{where}.type", f"is {tool.type[:64]!r}; only functions are supported")
        if tool.name is None:
            refuse(f"{where}.name", "is missing")
        function = FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        result.append(Tool(function=function))
    return result


def _tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type != "function":
        refuse("tool_choice.type", f"is {choice.type[:64]!r}; only functions are supported")
    if choice.name is None:
        refuse("tool_choice.name", "is missing: the function to call")
    return NamedToolChoice(function=FunctionName(name=choice.name))


def _response_format(text: TextConfig) -> dict[str, Any] | None:
    if text.verbosity not in (None, "medium"):
        refuse("text.verbosity")
    form = text.format
    if form is None:
        return None
    if form.type not in ("text", "json_object", "json_schema"):
        refuse(
            "text.format.type",
            f"is {form.type[:64]!r}; allowed are text, json_object and json_schema",
        )
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        refuse("text.format.schema", "is missing")
    names = ("name", "schema", "strict", "description")
    return {"type": form.type, "json_schema": {name: getattr(form, name) for name in names}}


def add_input(conversation: list[ChatMessage], given: str | Sequence[InputItem]) -> None:
    """Appends a request's input to the conversation.

    Raises:
        InvalidRequestError: an item that cannot be understood; names it.
    """
    if isinstance(given, str):
        conversation.append(ChatMessage(role="user", content=given))
        return
    if not given:
        refuse("input", "is empty: at least one item is needed")
    for index, item in enumerate(given):
        _add_item(conversation, f"input[{index}]", item)


def add_output(conversation: list[ChatMessage], output: Iterable[OutputItem]) -> None:
    """Appends an answer as if the client gave it back; a call that was cut is left out."""
    for item in output:
        if not isinstance(item, FunctionCall) or item.status == "completed":
            given = msgspec.convert(msgspec.to_builtins(item), InputItem)
            _add_item(conversation, "output", given)


def _add_item(conversation: list[ChatMessage], path: str, item: InputItem) -> None:
    kind = item.type or "message"
    if kind == "message":
        _add_message(conversation, path, item)
    elif kind == "reasoning":
        _add_reasoning(conversation, path, item)
    elif kind == "function_call":
        _add_call(conversation, path, item)
    elif kind == "function_call_output":
        if item.call_id is None:
            refuse(f"{path}.call_id", "is missing")
        text = _text(f"{path}.output", item.output)
        conversation.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
    else:
        refuse(
            f"{path}.type",
            f"is {kind[:64]!r}; supported are message, function_call, function_call_output and "
            "reasoning",
        )


def _text(path: str, content: str | Sequence[InputPart] | None) -> str:
    if content is None:
        refuse(path, "is missing")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if part.type not in _TEXT_PARTS:
            refuse(where, f"is of type {part.type[:64]!r}; the model takes text only")
        if part.text is None:
            refuse(f"{where}.text", "is missing")
        texts.append(part.text)
    return "\n".join(texts)


def _add_message(conversation: list[ChatMessage], path: str, item: InputItem) -> None:
    if item.role is None:
        refuse(f"{path}.role", "is missing")
    text = _text(f"{path}.content", item.content)
    if item.role == "assistant":
        turn = _assistant_turn(conversation, is_new_after=("content", "tool_calls"))
        turn.content = text
    else:
        conversation.append(ChatMessage(role=item.role, content=text))


def _add_reasoning(conversation: list[ChatMessage], path: str, item: InputItem) -> None:
    parts = item.content or item.summary or []
    texts = [parts] if isinstance(parts, str) else [part.text or "" for part in parts]
    text = "\n".join(texts)
    if item.encrypted_content:
        sealed = unseal(item.encrypted_content)
        if sealed is None:
            refuse(f"{path}.encrypted_content", "was not made by this server; leave it out")
        text = text or sealed
    if text:
        turn = _assistant_turn(conversation, is_new_after=("content", "tool_calls", "reasoning"))
        turn.reasoning = text


def _add_call(conversation: list[ChatMessage], path: str, item: InputItem) -> None:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            refuse(f"{path}.{name}", "is missing")
    arguments = item.arguments or "{}"
    try:
        parse_object(arguments.encode())
    except InvalidRequestError:
        refuse(f"{path}.arguments", "must hold a JSON object")
    function = ToolCallFunction(name=item.name or "", arguments=arguments)
    turn = _assistant_turn(conversation, is_new_after=())
    turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, function=function)]


def _assistant_turn(conversation: list[ChatMessage], *, is_new_after: Sequence[str]) -> ChatMessage:
    """The assistant's turn at the end of the conversation, or a new one.

    Items of one answer are one message of a chat: reasoning, text, calls.

    Args:
        conversation: may get a new message.
        is_new_after: fields of a turn that are not followed by this one.
    """
    last = conversation[-1] if conversation else None
    if last is None or last.role != "assistant" or any(getattr(last, f) for f in is_new_after):
        last = ChatMessage(role="assistant")
        conversation.append(last)
    return last
