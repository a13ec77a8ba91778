"""`POST /v1/chat/completions`: messages in, the assistant's answer out, streamed or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from compiled_engine.server.admission import Permit
from compiled_engine.server.generation import (
    ChoiceRun,
    Piece,
    build_runs,
    call_scope,
    field_called,
    generate,
    read_request,
    usage_of,
)
from compiled_engine.server.prompts import encode_chat
from compiled_engine.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    Usage,
)
from compiled_engine.server.sse import json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import (
    Sampling,
    chat_max_tokens,
    template_kwargs,
    template_messages,
    validate_sampling,
)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One valid call and the values all its chunks share."""

    sampling: Sampling
    runs: list[ChoiceRun]
    started_s: float
    head: ChatChunk

    def chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool) -> ChatChunk:
        usage: Usage | UnsetType | None = UNSET
        if with_usage:
            usage = usage_of(self.runs, self.sampling.n)
        elif self.sampling.include_usage:
            usage = None
        return msgspec.structs.replace(self.head, choices=choices, usage=usage)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    started_s = time.perf_counter()
    state = request.app[STATE]
    async with call_scope(state) as permit:
        async with state.drain.interruptible():
            body = await read_request(request, ChatRequest)
            is_newer = body.max_completion_tokens is not None
            with field_called("max_tokens", "max_completion_tokens" if is_newer else "max_tokens"):
                call = await _prepare(state, body, permit, started_s)
        if call.sampling.stream:
            return await stream_response(request, _chunks(state, call))
        return json_response(await _whole(state, call))


async def _prepare(
    state: ServerState, body: ChatRequest, permit: Permit, started_s: float
) -> _Call:
    state.check_model(body.model)
    sampling = validate_sampling(
        body, state.default_sampling, max_n=state.config.max_n, max_tokens=chat_max_tokens(body)
    )
    messages = template_messages(body.messages)
    kwargs = template_kwargs(body.chat_template_kwargs)
    permit.extend_requests(sampling.n)
    limits = state.require_limits()
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    prompt_ids = await state.in_text_pool(
        partial(
            encode_chat,
            state.tokenizer,
            messages,
            max_tokens=min(limits.max_model_len, limits.max_total_tokens),
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            template_kwargs=kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    )
    permit.extend_tokens(len(prompt_ids) * sampling.n)
    return _Call(
        sampling=sampling,
        runs=build_runs(
            state,
            sampling,
            [prompt_ids],
            limits=limits,
            default_max_tokens=None,
            prompt_field="messages",
        ),
        started_s=started_s,
        head=ChatChunk(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model_name,
            choices=[],
        ),
    )


async def _whole(state: ServerState, call: _Call) -> ChatResponse:
    texts: list[list[str]] = [[] for _ in call.runs]
    choices: dict[int, ChatChoice] = {}
    async with generate(state, call.runs, call.started_s) as pieces:
        async for piece in pieces:
            texts[piece.index].append(piece.text)
            if piece.finish_reason is not None:
                message = AssistantMessage("".join(texts[piece.index]))
                choices[piece.index] = ChatChoice(
                    piece.index, message, piece.finish_reason, piece.stop_reason
                )
    return ChatResponse(
        id=call.head.id,
        created=call.head.created,
        model=call.head.model,
        choices=[choices[i] for i in range(len(call.runs))],
        usage=usage_of(call.runs, call.sampling.n),
    )


async def _chunks(state: ServerState, call: _Call) -> AsyncGenerator[ChatChunk, None]:
    sampling = call.sampling
    started: set[int] = set()
    async with generate(state, call.runs, call.started_s) as pieces:
        async for piece in pieces:
            if piece.index not in started:
                started.add(piece.index)
                opening = ChatChunkChoice(piece.index, ChatDelta(role="assistant", content=""))
                yield call.chunk([opening], with_usage=sampling.continuous_usage)
            if piece.text or piece.finish_reason is not None:
                yield call.chunk([_choice(piece)], with_usage=sampling.continuous_usage)
    if sampling.include_usage:
        yield call.chunk([], with_usage=True)


def _choice(piece: Piece) -> ChatChunkChoice:
    delta = ChatDelta(content=piece.text) if piece.text else ChatDelta()
    return ChatChunkChoice(piece.index, delta, piece.finish_reason, piece.stop_reason)
