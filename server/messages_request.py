"""A request of `/v1/messages` as the chat request that means the same.

Owns what each of Anthropic's fields becomes and what cannot be honoured. Rules that chats have
anyway are left to the chat path; `FIELD_NAMES` turns its refusals back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from compiled_engine.server.messages_protocol import (
    CountTokensRequest,
    InputBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    Thinking,
)
from compiled_engine.server.parsers.registry import ChatFormat
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
from compiled_engine.server.translation import refuse, refuse_unless_neutral

# Fields of the chat path -> the client's.
FIELD_NAMES = {
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": (),
    "context_management": (),
    "speed": ("standard",),
}
_REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"container": (), "inference_geo": ()}
_SWITCHES = ("enable_thinking", "thinking")


def chat_request(
    request: CountTokensRequest, variables: frozenset[str], chat_format: ChatFormat
) -> ChatRequest:
    """The chat that a request asks for.

    Args:
        request: as parsed; a count of tokens is a chat that may generate one token.
        variables: names that the chat template reads.
        chat_format: of the served model.

    Raises:
        InvalidRequestError: a field that cannot be honoured; names it.
    """
    refuse_unless_neutral(request, _REFUSED)
    chat = ChatRequest(
        messages=_chat_messages(request),
        model=request.model,
        max_tokens=1,
        tools=_tools(request.tools) if request.tools is not None else None,
    )
    _set_tool_choice(chat, request)
    if request.thinking is not None:
        chat.chat_template_kwargs = _switches(request.thinking, variables, chat_format)
        chat.thinking_token_budget = request.thinking.budget_tokens
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
        form = request.output_config.format
        if form is not None:
            chat.response_format = {"type": "json_schema", "json_schema": {"schema": form.schema}}
    last = chat.messages[-1] if chat.messages else None
    if last is not None and last.role == "assistant":
        if last.tool_calls or not last.content:
            where = f"messages[{len(request.messages) - 1}]"
            refuse(where, "is the last message and the assistant's: it must end with text")
        chat.continue_final_message = True
    if isinstance(request, MessagesRequest):
        _set_sampling(chat, request)
    return chat


def _set_sampling(chat: ChatRequest, request: MessagesRequest) -> None:
    refuse_unless_neutral(request, _REFUSED_IN_MESSAGES)
    chat.max_tokens = request.max_tokens
    budget = chat.thinking_token_budget
    if budget is not None and not 0 <= budget < request.max_tokens:
        where, limit = "thinking.budget_tokens", f"max_tokens, which is {request.max_tokens}"
        refuse(where, f"is {budget}; it must be at least 0 and less than {limit}")
    chat.stream = request.stream
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k


def _set_tool_choice(chat: ChatRequest, request: CountTokensRequest) -> None:
    choice = request.tool_choice
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if choice.type == "tool":
        if choice.name is None:
            refuse("tool_choice.name", "is missing: the tool to call")
        chat.tool_choice = NamedToolChoice(function=FunctionName(name=choice.name))
    elif choice.type == "any":
        chat.tool_choice = "required"
    else:
        chat.tool_choice = choice.type


def _tools(tools: Sequence[MessagesTool]) -> list[Tool]:
    result = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            refuse(
                f"{where}.type",
                f"is {(tool.type or '')[:64]!r}; only tools of the client's own are supported: "
                '"custom"',
            )
        if tool.input_schema is None:
            refuse(f"{where}.input_schema", "is missing")
        if tool.defer_loading:
            refuse(f"{where}.defer_loading")
        function = FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        result.append(Tool(function=function))
    return result


def _switches(
    thinking: Thinking, variables: frozenset[str], chat_format: ChatFormat
) -> dict[str, Any]:
    """Template values that switch reasoning on or off, where the template has a switch."""
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        refuse("thinking.budget_tokens", f"cannot be given where thinking.type is {thinking.type}")
    if thinking.display == "omitted":
        refuse("thinking.display", 'is "omitted", which is not supported; leave it out')
    is_on = thinking.type != "disabled"
    switches = {name: is_on for name in _SWITCHES if name in variables}
    if not switches and thinking.type == "enabled" and chat_format.reasoning is None:
        refuse("thinking.type", 'is "enabled", but this model does not reason; leave it out')
    if not switches and not is_on and chat_format.reasoning is not None:
        refuse("thinking.type", 'is "disabled", but this model always reasons; leave it out')
    return switches


def _chat_messages(request: CountTokensRequest) -> list[ChatMessage]:
    result: list[ChatMessage] = []
    system = request.system
    if system:
        result.append(_system("system", system))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            result.append(_assistant(where, message.content))
        elif message.role == "system":
            result.append(_system(where, message.content))
        else:
            _add_user(result, where, message)
    return result


def _system(path: str, content: str | Sequence[InputBlock]) -> ChatMessage:
    text = content if isinstance(content, str) else _text_of(path, content)
    return ChatMessage(role="system", content=text)


def _text_of(path: str, blocks: Sequence[InputBlock]) -> str:
    return "\n".join(_text(f"{path}[{i}]", block) for i, block in enumerate(blocks))


def _text(path: str, block: InputBlock) -> str:
    if block.type != "text":
        refuse(path, f"is of type {block.type[:64]!r}; the model takes text only")
    if block.text is None:
        refuse(f"{path}.text", "is missing")
    return block.text


def _add_user(result: list[ChatMessage], path: str, message: InputMessage) -> None:
    """Adds a user's message: results of tools as messages of their own, text in between as one."""
    content = message.content
    if isinstance(content, str):
        _add_user_text(result, content)
        return
    if not content:
        refuse(path, "has no blocks: at least one is needed")
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if block.type == "tool_result":
            result.append(_tool_result(where, block))
        else:
            _add_user_text(result, _text(where, block))


def _add_user_text(result: list[ChatMessage], text: str) -> None:
    """Neighbouring texts of the user are one turn."""
    last = result[-1] if result else None
    if last is not None and last.role == "user":
        last.content = f"{last.content}\n{text}"
    else:
        result.append(ChatMessage(role="user", content=text))


def _tool_result(path: str, block: InputBlock) -> ChatMessage:
    if block.tool_use_id is None:
        refuse(f"{path}.tool_use_id", "is missing")
    content = block.content or ""
    text = content if isinstance(content, str) else _text_of(f"{path}.content", content)
    if block.is_error:
        text = f"Error: {text}"
    return ChatMessage(role="tool", content=text, tool_call_id=block.tool_use_id)


def _assistant(path: str, content: str | Sequence[InputBlock]) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    if not content:
        refuse(path, "has no blocks: at least one is needed")
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(where, block))
        else:
            texts.append(_text(where, block))
    return ChatMessage(
        role="assistant",
        content="\n".join(texts),
        tool_calls=calls or None,
        reasoning="\n".join(thoughts) or None,
    )


def _call(path: str, block: InputBlock) -> ToolCall:
    if block.id is None or block.name is None:
        refuse(f"{path}.{'id' if block.id is None else 'name'}", "is missing")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(id=block.id, function=ToolCallFunction(name=block.name, arguments=arguments))
