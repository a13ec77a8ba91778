"""`POST /v1/chat/completions`: messages in, the assistant's answer out, streamed or not."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from compiled_engine.request import GrammarSpec
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.chat_request import (
    ToolUse,
    chat_max_tokens,
    chat_num_top,
    template_kwargs,
    template_messages,
    tool_use,
)
from compiled_engine.server.choice import AnswerFormat, ChoiceRun, Piece
from compiled_engine.server.generation import (
    build_runs,
    call_scope,
    encode_bound,
    field_called,
    generate,
    read_request,
    usage_of,
)
from compiled_engine.server.logprobs import ListedToken, chat_logprobs, prompt_logprobs
from compiled_engine.server.parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Reasoning,
)
from compiled_engine.server.parsers.registry import ChatFormat
from compiled_engine.server.prompts import encode_rendered, render_chat
from compiled_engine.server.protocol import (
    AnswerFunction,
    AnswerToolCall,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    DeltaToolCall,
    Usage,
)
from compiled_engine.server.shortcut import Shortcut, TextTemplate
from compiled_engine.server.sse import encode_event, json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.thinking_budget import thinking_budget, thinking_limit
from compiled_engine.server.tool_grammar import answer_grammar
from compiled_engine.server.validation import (
    Sampling,
    refuse_streamed_prompt,
    validate_sampling,
    with_logprobs,
)


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """One valid call and the values all its chunks share.

    Attributes:
        num_top: likeliest tokens to list with each token of the content; None lists no tokens.
        num_prompt_top: the same for the prompt.
    """

    sampling: Sampling
    runs: list[ChoiceRun]
    caller: Caller
    head: ChatChunk
    num_top: int | None = None
    num_prompt_top: int | None = None

    def chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool) -> ChatChunk:
        """A chunk of the stream; `with_usage` in the last one only."""
        usage: Usage | UnsetType | None = UNSET
        if with_usage:
            usage = usage_of(self.runs, self.sampling.n)
        elif self.sampling.include_usage:
            usage = None
        return msgspec.structs.replace(self.head, choices=choices, usage=usage)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with call_scope(request) as permit:
        async with state.drain.interruptible():
            body = await read_request(request, ChatRequest)
            is_newer = body.max_completion_tokens is not None
            with field_called("max_tokens", "max_completion_tokens" if is_newer else "max_tokens"):
                call = await prepare_chat(state, body, permit, request[CALLER])
        if call.sampling.stream:
            shortcut = Shortcut(_piece_encoder(state, call))
            chunks = _chunks(state, call, shortcut)
            return await stream_response(request, chunks, shortcut=shortcut)
        return json_response(await _whole(state, call))


async def prepare_chat(
    state: ServerState, body: ChatRequest, permit: Permit, caller: Caller
) -> ChatCall:
    """Checks, renders and tokenises a request; raises EngineError for what is wrong with it."""
    state.check_model(body.model)
    num_top = chat_num_top(body)
    sampling = _sampling(state, body, num_top)
    chat_format = state.chat_format
    use, limit = tool_use(body), thinking_limit(body)
    messages = template_messages(body.messages)
    render = chat_renderer(state, body, use, messages)
    permit.extend_requests(sampling.n)
    limits = state.require_limits()
    encode = partial(
        encode_rendered,
        state.tokenizer,
        max_tokens=encode_bound(limits, sampling),
        add_special_tokens=bool(body.add_special_tokens),
    )
    prompt, prompt_ids = await state.in_text_pool(lambda: _with_ids(render(), encode))
    continued = messages[-1]["content"] if body.continue_final_message else None
    sampling = _constrained(state, sampling, use, limit, prompt=prompt, continued=continued)
    return ChatCall(
        sampling=sampling,
        runs=build_runs(
            state,
            sampling,
            [prompt_ids],
            permit=permit,
            limits=limits,
            default_max_tokens=None,
            prompt_field="messages",
            answer=_answer_format(chat_format, use, prompt, continued),
        ),
        caller=caller,
        head=_new_head(state.model_name),
        num_top=num_top,
        num_prompt_top=body.prompt_logprobs,
    )


def _sampling(state: ServerState, body: ChatRequest, num_top: int | None) -> Sampling:
    refuse_streamed_prompt(body)
    sampling = validate_sampling(
        body, state.default_sampling, max_n=state.config.max_n, max_tokens=chat_max_tokens(body)
    )
    with field_called("logprobs", "top_logprobs"):
        return with_logprobs(sampling, tokens=num_top, prompt=body.prompt_logprobs)


def chat_renderer(
    state: ServerState,
    body: ChatRequest,
    use: ToolUse | None,
    messages: list[dict[str, Any]],
) -> Callable[[], str]:
    """What renders the prompt of a chat; slow, so it is for the text threads.

    Args:
        state: the server.
        body: the request.
        use: its tools.
        messages: its messages as templates expect them.

    Raises:
        InvalidRequestError: a template value that cannot be honoured; the result raises it too.
    """
    kwargs = template_kwargs(
        body.chat_template_kwargs,
        state.tokenizer.chat_template_variables,
        effort=body.reasoning_effort,
        chat_format=state.chat_format,
    )
    return partial(
        render_chat,
        state.tokenizer,
        state.chat_format,
        messages,
        tools=use.tools if use else [],
        add_generation_prompt=_adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=kwargs,
    )


def _new_head(model: str) -> ChatChunk:
    """What all chunks of an answer share."""
    created = int(time.time())
    return ChatChunk(id=f"chatcmpl-{uuid.uuid4().hex}", created=created, model=model, choices=[])


def _constrained(
    state: ServerState,
    sampling: Sampling,
    use: ToolUse | None,
    limit: int | None,
    *,
    prompt: str,
    continued: str | None,
) -> Sampling:
    """With what tools and reasoning add to the constraints on the answer's tokens."""
    grammar = answer_grammar(
        sampling.params.grammar, state.chat_format, use, prompt=prompt, continued=continued
    )
    if grammar is not sampling.params.grammar:
        sampling = _with_grammar(sampling, grammar, use)
    budget = thinking_budget(
        limit,
        state.chat_format,
        state.tokenizer,
        prompt=prompt,
        continued=continued,
        is_bound=grammar is not None or use is not None,
    )
    params = msgspec.structs.replace(sampling.params, thinking=budget)
    return dataclasses.replace(sampling, params=params)


def _with_grammar(sampling: Sampling, grammar: GrammarSpec | None, use: ToolUse | None) -> Sampling:
    by_tools = "tool_choice" if use is not None and use.choice != "auto" else "tools"
    return dataclasses.replace(
        sampling,
        params=msgspec.structs.replace(sampling.params, grammar=grammar),
        grammar_field=sampling.grammar_field or by_tools,
    )


def _adds_prompt(body: ChatRequest) -> bool:
    given = body.add_generation_prompt
    return not body.continue_final_message if given is None else given


def _with_ids(text: str, encode: Callable[[str], list[int]]) -> tuple[str, list[int]]:
    return text, encode(text)


def _answer_format(
    chat_format: ChatFormat, use: ToolUse | None, prompt: str, continued: str | None
) -> AnswerFormat:
    schemas = use.schemas if use else None
    return AnswerFormat(
        new_parser=partial(chat_format.new_parser, schemas, prompt=prompt, continued=continued),
        markers=chat_format.markers(with_tools=use is not None),
        max_calls=1 if use and not use.is_parallel else None,
        lists_all_tokens=False,
    )


@dataclass
class _Answer:
    """The answer of one choice, gathered for an answer in one piece."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        for event in piece.events:
            if isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self.names.append(event.name)
                self.arguments.append([])
            elif isinstance(event, CallArguments):
                self.arguments[event.index].append(event.text)

    def message(self) -> AssistantMessage:
        content = "".join(self.content)
        message = AssistantMessage(content or (None if self.names or self.reasoning else ""))
        if self.names:
            message.tool_calls = [
                AnswerToolCall(_new_call_id(), AnswerFunction(name, "".join(arguments)))
                for name, arguments in zip(self.names, self.arguments, strict=True)
            ]
        if self.reasoning:
            message.reasoning = message.reasoning_content = "".join(self.reasoning)
        return message


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


async def _whole(state: ServerState, call: ChatCall) -> ChatResponse:
    answers = [_Answer() for _ in call.runs]
    listed: list[list[ListedToken]] = [[] for _ in call.runs]
    choices: dict[int, ChatChoice] = {}
    async with generate(state, call.runs, call.caller) as pieces:
        async for piece in pieces:
            answers[piece.index].take(piece)
            listed[piece.index] += piece.logprobs
            if piece.finish_reason is not None:
                choices[piece.index] = ChatChoice(
                    piece.index,
                    answers[piece.index].message(),
                    piece.finish_reason,
                    piece.stop_reason,
                )
    for index, choice in choices.items():
        if call.num_top is not None:
            choice.logprobs = chat_logprobs(state.tokenizer, listed[index], call.num_top)
        if call.sampling.return_token_ids:
            choice.token_ids = call.runs[index].token_ids
    response = ChatResponse(
        id=call.head.id,
        created=call.head.created,
        model=call.head.model,
        choices=[choices[i] for i in range(len(call.runs))],
        usage=usage_of(call.runs, call.sampling.n),
    )
    run = call.runs[0]
    if call.sampling.return_token_ids:
        response.prompt_token_ids = run.request.prompt_token_ids
    if call.num_prompt_top is not None:
        num_top = call.num_prompt_top
        response.prompt_logprobs = await state.in_text_pool(
            lambda: prompt_logprobs(state.tokenizer, run.prompt_records(), num_top)
        )
    return response


def _piece_encoder(state: ServerState, call: ChatCall) -> Callable[[Piece], bytes]:
    """Encodes pieces in the middle of an answer as `_chunks` would have them sent."""
    with_usage = call.sampling.continuous_usage
    has_more = with_usage or call.sampling.return_token_ids or call.num_top is not None
    empty = call.chunk([ChatChunkChoice(0, ChatDelta(content=""))], with_usage=False)
    template = TextTemplate(encode_event(empty), "content")

    def encode(piece: Piece) -> bytes:
        if len(piece.events) == 1 and isinstance(piece.events[0], Content) and not has_more:
            return template.fill(piece.events[0].text)
        choices = _choices(state, call, piece)
        chunks = (call.chunk([choice], with_usage=with_usage) for choice in choices)
        return b"".join(map(encode_event, chunks))

    return encode


async def _chunks(
    state: ServerState, call: ChatCall, shortcut: Shortcut
) -> AsyncGenerator[ChatChunk, None]:
    sampling = call.sampling
    started: set[int] = set()
    async with generate(state, call.runs, call.caller, shortcut) as pieces:
        async for piece in pieces:
            if piece.index not in started:
                started.add(piece.index)
                opening = ChatChunkChoice(piece.index, ChatDelta(role="assistant", content=""))
                chunk = call.chunk([opening], with_usage=sampling.continuous_usage)
                if sampling.return_token_ids:
                    chunk.prompt_token_ids = call.runs[0].request.prompt_token_ids
                yield chunk
            for choice in _choices(state, call, piece):
                yield call.chunk([choice], with_usage=sampling.continuous_usage)
    if sampling.include_usage:
        yield call.chunk([], with_usage=True)


def _choices(state: ServerState, call: ChatCall, piece: Piece) -> list[ChatChunkChoice]:
    """The chunks of a piece: one for each run of text and each part of a call."""
    has_token_ids = call.sampling.return_token_ids and piece.token_ids
    deltas = _deltas(piece)
    if not deltas and (piece.finish_reason is not None or has_token_ids or piece.logprobs):
        deltas.append(ChatDelta())
    choices = [ChatChunkChoice(piece.index, delta) for delta in deltas]
    if choices:
        choices[-1].finish_reason = piece.finish_reason
        choices[-1].stop_reason = piece.stop_reason
    if has_token_ids:
        choices[0].token_ids = list(piece.token_ids)
    if piece.logprobs and call.num_top is not None:
        with_text = [choice for choice in choices if choice.delta.content is not UNSET]
        last = (with_text or choices)[-1]
        last.logprobs = chat_logprobs(state.tokenizer, piece.logprobs, call.num_top)
    return choices


def _deltas(piece: Piece) -> list[ChatDelta]:
    deltas: list[ChatDelta] = []
    for event in piece.events:
        if isinstance(event, Content):
            deltas.append(ChatDelta(content=event.text))
        elif isinstance(event, Reasoning):
            deltas.append(ChatDelta(reasoning_content=event.text, reasoning=event.text))
        elif isinstance(event, CallStart):
            function = AnswerFunction(event.name)
            part = DeltaToolCall(event.index, function, _new_call_id(), "function")
            deltas.append(ChatDelta(tool_calls=[part]))
        elif isinstance(event, CallArguments):
            part = DeltaToolCall(event.index, AnswerFunction(arguments=event.text))
            deltas.append(ChatDelta(tool_calls=[part]))
    return deltas
