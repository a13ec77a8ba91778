"""The JSON the server takes and gives, as typed records; names and meaning are OpenAI's and vLLM's.

Owns the shapes only. Rules about values, defaults and fields that cannot be honoured are in
`validation`. A request field that is absent or null means its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from compiled_engine.server.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

Role = Literal["system", "developer", "user", "assistant", "tool"]
ChoiceFinishReason = Literal["stop", "length", "tool_calls"]

_PROMPT_SCHEMA = {
    "description": "Text, token ids, or a list of either.",
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        },
    ],
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling values that every route spells alike."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class GenerationRequest(SamplingFields, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    seed: int | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    truncate_prompt_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: int | bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content; only parts of type "text" are taken."""

    type: str
    text: str | None = None


class ToolCallFunction(msgspec.Struct, kw_only=True):
    """Name and JSON arguments of an earlier tool call."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in the history of a chat."""

    function: ToolCallFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool of a chat."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """Asks for a call of one function."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: either `prompt` or `messages`, these with what a chat takes."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(msgspec.Struct):
    """How much of the prompt came from the prefix cache, and how much of it was cut off.

    `truncated_tokens` is there only where the request asked for truncation.
    """

    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """How many of the generated tokens are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one call; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One answer, or in a stream one piece of it."""

    index: int
    text: str
    finish_reason: ChoiceFinishReason | None
    stop_reason: str | int | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct):
    """Answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class AnswerFunction(msgspec.Struct):
    """Name and JSON arguments of a call; in a stream the name comes once, arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class AnswerToolCall(msgspec.Struct):
    """A call the model made; arguments of an answer that was cut may be incomplete."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """The answer of a chat; reasoning stands under both names that clients know."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: ChoiceFinishReason
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct):
    """Answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class DeltaToolCall(msgspec.Struct):
    """What a chunk adds to one call; id and type come with its first chunk only."""

    index: int
    function: AnswerFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """What a chunk adds to the answer; absent fields add nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: ChoiceFinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a chat's stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    """The served model; `max_model_len` is null until the model is loaded."""

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "compiled-engine"


class ModelList(msgspec.Struct):
    """Answer of `/v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str


class VersionResponse(msgspec.Struct):
    """Answer of `/version`."""

    version: str


class HealthResponse(msgspec.Struct):
    """Answer of `/health` and `/ready`, with 200 or 503.

    Attributes:
        status: "ok", or why not.
        phase: what the engine is doing.
        phase_detail: the same in more words.
        step_age_s: age of the last finished step while there is work, else 0.
    """

    status: str
    phase: str
    phase_detail: str
    step_age_s: float


class ErrorDetail(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of every answer that is not 2xx, and of an error inside a stream."""

    error: ErrorDetail
