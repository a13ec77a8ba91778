"""`POST /v1/completions`: text or token ids in, text out, streamed or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.choice import ChoiceRun
from compiled_engine.server.generation import (
    build_runs,
    call_scope,
    encode_bound,
    generate,
    read_request,
    usage_of,
)
from compiled_engine.server.prompts import encode_prompts
from compiled_engine.server.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from compiled_engine.server.sse import json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import (
    DEFAULT_COMPLETION_TOKENS,
    Sampling,
    completion_prompts,
    num_prompts,
    validate_sampling,
)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One valid call: its sequences, and the text each starts with where `echo` is asked for."""

    sampling: Sampling
    runs: list[ChoiceRun]
    echoes: list[str]
    caller: Caller
    head: CompletionResponse

    def chunk(self, choices: list[CompletionChoice], *, with_usage: bool) -> CompletionResponse:
        usage: Usage | UnsetType | None = UNSET
        if with_usage:
            usage = usage_of(self.runs, self.sampling.n)
        elif self.sampling.include_usage:
            usage = None
        return msgspec.structs.replace(self.head, choices=choices, usage=usage)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with call_scope(request) as permit:
        async with state.drain.interruptible():
            body = await read_request(request, CompletionRequest)
            call = await _prepare(state, body, permit, request[CALLER])
        if call.sampling.stream:
            return await stream_response(request, _chunks(state, call))
        return json_response(await _whole(state, call))


async def _prepare(
    state: ServerState, body: CompletionRequest, permit: Permit, caller: Caller
) -> _Call:
    state.check_model(body.model)
    sampling = validate_sampling(
        body, state.default_sampling, max_n=state.config.max_n, max_tokens=body.max_tokens
    )
    # Before the items are looked at, since a body has room for millions of them.
    permit.extend_requests(num_prompts(body) * sampling.n)
    prompts = completion_prompts(body)
    limits = state.require_limits()
    prompt_ids = await state.in_text_pool(
        partial(
            encode_prompts,
            state.tokenizer,
            prompts,
            max_tokens=encode_bound(limits, sampling),
            add_special_tokens=body.add_special_tokens is not False,
        )
    )
    runs = build_runs(
        state,
        sampling,
        prompt_ids,
        permit=permit,
        limits=limits,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        prompt_field="prompt",
    )
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = await state.in_text_pool(partial(_echoes, state, prompts, sampling))
    return _Call(
        sampling=sampling,
        runs=runs,
        echoes=[echo for echo in echoes for _ in range(sampling.n)],
        caller=caller,
        head=CompletionResponse(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model_name,
            choices=[],
        ),
    )


def _echoes(
    state: ServerState, prompts: Sequence[str | list[int]], sampling: Sampling
) -> list[str]:
    return [
        prompt
        if isinstance(prompt, str)
        else state.tokenizer.decode(prompt, skip_special_tokens=sampling.skip_special_tokens)
        for prompt in prompts
    ]


async def _whole(state: ServerState, call: _Call) -> CompletionResponse:
    texts = [[echo] for echo in call.echoes]
    choices: dict[int, CompletionChoice] = {}
    async with generate(state, call.runs, call.caller) as pieces:
        async for piece in pieces:
            texts[piece.index].append(piece.text)
            if piece.finish_reason is not None:
                choices[piece.index] = CompletionChoice(
                    piece.index,
                    "".join(texts[piece.index]),
                    piece.finish_reason,
                    piece.stop_reason,
                )
    return call.chunk([choices[i] for i in range(len(call.runs))], with_usage=True)


async def _chunks(state: ServerState, call: _Call) -> AsyncGenerator[CompletionResponse, None]:
    unsent = dict(enumerate(call.echoes))
    sampling = call.sampling
    async with generate(state, call.runs, call.caller) as pieces:
        async for piece in pieces:
            text = unsent.pop(piece.index, "") + piece.text
            if text or piece.finish_reason is not None:
                choice = CompletionChoice(piece.index, text, piece.finish_reason, piece.stop_reason)
                yield call.chunk([choice], with_usage=sampling.continuous_usage)
    if sampling.include_usage:
        yield call.chunk([], with_usage=True)
