"""The JSON of `/v1/responses`, as typed records; names and meaning are OpenAI's.

Owns the shapes and the events of a stream. What the fields mean for a chat is in
`responses_request`. A request field that is absent or null means its default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from compiled_engine.server.logprobs import ContentLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item's text."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Something said or done before: message, function_call, function_call_output or reasoning.

    Without a type it is a message.
    """

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema of its arguments."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """Asks for a call of one function."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer's text."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the answer's text is to be like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model reasons."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    truncation: str | None = None


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model wrote while it reasoned."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the answer."""

    id: str
    content: list[OutputText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call; arguments of an incomplete one may be no JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Reasoning before an answer; there is no summary of it.

    Attributes:
        encrypted_content: the text in the form of `responses_items.seal`, where it was asked for.
    """

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[Any] = []
    encrypted_content: str | UnsetType = UNSET


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """How many of the generated tokens are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """Tokens of one call."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponsesFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer of `/v1/responses`."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    temperature: float
    top_p: float
    tools: list[ResponsesTool]
    tool_choice: str | ResponsesToolChoice
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: ReasoningConfig
    metadata: dict[str, str]
    store: bool
    output: list[OutputItem] = []
    object: Literal["response"] = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponsesFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None


class DeletedResponse(msgspec.Struct):
    """Answer of `DELETE /v1/responses/{id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class _Numbered(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event; those of one stream are numbered from 0."""

    sequence_number: int


class _WithResponse(_Numbered, kw_only=True):
    response: ResponseObject


class ResponseCreated(_WithResponse, tag="response.created"):
    """The call was taken."""


class ResponseQueued(_WithResponse, tag="response.queued"):
    """The answer is made in the background, and has not begun."""


class ResponseInProgress(_WithResponse, tag="response.in_progress"):
    """The answer begins."""


class ResponseCompleted(_WithResponse, tag="response.completed"):
    """The answer is whole."""


class ResponseIncomplete(_WithResponse, tag="response.incomplete"):
    """The answer was cut by a limit, or cancelled; the response's status says which."""


class ResponseFailed(_WithResponse, tag="response.failed"):
    """The answer ended with an error."""


class _WithItem(_Numbered, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_WithItem, tag="response.output_item.added"):
    """An item begins, without its content."""


class OutputItemDone(_WithItem, tag="response.output_item.done"):
    """An item ends."""


class _OfItem(_Numbered, kw_only=True):
    output_index: int
    item_id: str


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    """The text of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    """The text of an item ends."""

    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    """The next piece of an answer's text."""

    delta: str
    logprobs: list[ContentLogprob] = []


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    """All text of a message."""

    text: str
    logprobs: list[ContentLogprob] = []


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    """The next piece of reasoning."""

    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    """All text of a piece of reasoning."""

    text: str


class ArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """The next piece of a call's arguments."""

    delta: str


class ArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str


ResponsesEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)
