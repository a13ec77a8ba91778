"""The JSON of `/v1/messages`, as typed records; names and meaning are Anthropic's.

Owns the shapes, the events of a stream, and errors in Anthropic's form. What the fields mean for a
chat is in `messages_request`. A request field that is absent or null means its default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web

from compiled_engine.errors import EngineError
from compiled_engine.server.sse import error_response, json_response

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class InputBlock(msgspec.Struct, kw_only=True):
    """A part of a message: text, tool_use, tool_result or thinking.

    `cache_control` is taken and needs nothing: every prefix is cached.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool of the client's own; `input_schema` is a JSON schema of its input."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether and which tool is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers, and how many tokens it may reason."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much the model reasons, and the form of its answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[InputBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Any = None
    inference_geo: str | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote while it reasoned; it is not signed."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool; the input of a call that was cut is empty."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(msgspec.Struct):
    """Tokens of one call; `input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, tag_field="type", tag="message"):
    """Answer of `POST /v1/messages`."""

    id: str
    model: str
    content: list[Block]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """First event of a stream: the message without content."""

    message: Message


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Says that the stream is alive."""


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, without its content."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """The next piece of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """The next piece of a thinking block."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """The next piece of a tool's input, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """What an event adds to a block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDelta(msgspec.Struct):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end of a message, with its usage."""

    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """Last event of a stream."""


class MessagesErrorDetail(msgspec.Struct):
    """Anthropic's error object."""

    type: str
    message: str


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """Body of an answer that is not 2xx, and last event of a stream that failed."""

    error: MessagesErrorDetail
    request_id: str


MessagesEvent = (
    MessageStart
    | Ping
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | MessagesError
)


def messages_error(error: EngineError, request_id: str) -> MessagesError:
    """Anthropic's form of an error.

    Args:
        error: its message names the field at fault.
        request_id: of the call.
    """
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    return MessagesError(MessagesErrorDetail(kind, error.message), request_id)


def messages_error_response(error: EngineError, request_id: str) -> web.Response:
    """The HTTP answer an error of `/v1/messages` becomes, with the headers of all others."""
    response = error_response(error)
    body = json_response(messages_error(error, request_id)).body
    response.body = body
    return response
