"""`POST /v1/completions`: text or token ids in, text out, streamed or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from compiled_engine.errors import InvalidRequestError
from compiled_engine.logprob_data import TokenLogprob
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.choice import ChoiceRun, Piece, joined
from compiled_engine.server.generation import (
    build_runs,
    call_scope,
    encode_bound,
    field_called,
    generate,
    read_request,
    usage_of,
)
from compiled_engine.server.logprobs import completion_logprobs, prompt_logprobs, token_offsets
from compiled_engine.server.prompts import encode_prompts
from compiled_engine.server.protocol import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from compiled_engine.server.shortcut import Shortcut, TextTemplate
from compiled_engine.server.sse import encode_event, json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import (
    DEFAULT_COMPLETION_TOKENS,
    Sampling,
    completion_prompts,
    num_prompts,
    refuse_streamed_prompt,
    validate_sampling,
    with_logprobs,
)


@dataclass(frozen=True, kw_only=True)
class _Echo:
    """The prompt in front of an answer; without `echo` there is none.

    Attributes:
        text: as the client gave it, or decoded.
        offsets: the character where each of its tokens begins; empty without log probabilities.
    """

    text: str = ""
    offsets: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One valid call.

    Attributes:
        echoes: what each sequence starts with.
        num_top: likeliest tokens to list with each token; None lists no tokens.
        num_prompt_top: the same for `prompt_logprobs`.
    """

    sampling: Sampling
    runs: list[ChoiceRun]
    echoes: list[_Echo]
    caller: Caller
    head: CompletionResponse
    num_top: int | None
    num_prompt_top: int | None

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
            shortcut = Shortcut(_piece_encoder(state, call))
            chunks = _chunks(state, call, shortcut)
            return await stream_response(request, chunks, shortcut=shortcut)
        return json_response(await _whole(state, call))


async def _prepare(
    state: ServerState, body: CompletionRequest, permit: Permit, caller: Caller
) -> _Call:
    state.check_model(body.model)
    num_top = _num_top(body)
    sampling = _sampling(state, body, num_top)
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
    is_echoed = body.prompt_logprobs is None
    with field_called("prompt_logprobs", "logprobs" if is_echoed else "prompt_logprobs"):
        runs = build_runs(
            state,
            sampling,
            prompt_ids,
            permit=permit,
            limits=limits,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            prompt_field="prompt",
        )
    echoes = [_Echo()] * len(prompts)
    if body.echo:
        kept = [run.request.prompt_token_ids for run in runs[:: sampling.n]]
        make = partial(_echo, state, body, sampling, has_offsets=num_top is not None)
        echoes = await state.in_text_pool(lambda: list(map(make, prompts, kept)))
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
        num_top=num_top,
        num_prompt_top=body.prompt_logprobs,
    )


def _num_top(body: CompletionRequest) -> int | None:
    if body.logprobs is True:
        raise InvalidRequestError(
            "logprobs is true; a number of likeliest tokens is meant, 0 to 20", param="logprobs"
        )
    return None if body.logprobs is False else body.logprobs


def _sampling(state: ServerState, body: CompletionRequest, num_top: int | None) -> Sampling:
    refuse_streamed_prompt(body)
    wants_prompt = bool(body.echo) or body.prompt_logprobs is not None
    is_prompt_only = body.max_tokens == 0 and wants_prompt
    sampling = validate_sampling(
        body,
        state.default_sampling,
        max_n=state.config.max_n,
        max_tokens=1 if is_prompt_only else body.max_tokens,
    )
    of_prompt = [body.prompt_logprobs, num_top if body.echo else None]
    prompt = max((number for number in of_prompt if number is not None), default=None)
    sampling = with_logprobs(sampling, tokens=num_top, prompt=prompt)
    return replace(sampling, is_prompt_only=is_prompt_only)


def _echo(
    state: ServerState,
    body: CompletionRequest,
    sampling: Sampling,
    prompt: str | list[int],
    kept: list[int],
    *,
    has_offsets: bool,
) -> _Echo:
    """The echo of a prompt, of whose tokens those at the end were `kept`."""
    tokenizer, skips = state.tokenizer, sampling.skip_special_tokens
    if isinstance(prompt, str):
        text, offsets = prompt, []
        if has_offsets:
            adds = body.add_special_tokens is not False
            offsets = tokenizer.text_offsets(prompt, add_special_tokens=adds)
    else:
        text, offsets = tokenizer.decode(prompt, skip_special_tokens=skips), []
        if has_offsets:
            offsets = token_offsets(tokenizer, prompt, skip_special_tokens=skips)
    return _Echo(text=text, offsets=offsets[-len(kept) :])


def _listed(state: ServerState, call: _Call, piece: Piece, *, is_first: bool) -> Any:
    """The log probabilities that go out with a piece; the prompt's with the first one."""
    if call.num_top is None:
        return None
    echo, run = call.echoes[piece.index], call.runs[piece.index]
    tokens: list[tuple[int, TokenLogprob | None, int]] = []
    if is_first and echo.offsets:
        records = [None, *run.prompt_records()]
        tokens += zip(run.request.prompt_token_ids, records, echo.offsets, strict=True)
    begin = len(echo.text)
    tokens += [(t.record.token_id, t.record, begin + t.offset) for t in piece.logprobs]
    return completion_logprobs(state.tokenizer, tokens, call.num_top)


def _choice(state: ServerState, call: _Call, piece: Piece, *, is_first: bool) -> CompletionChoice:
    """A piece as a choice; of a whole answer, or of a stream."""
    run = call.runs[piece.index]
    choice = CompletionChoice(
        piece.index,
        (call.echoes[piece.index].text if is_first else "") + piece.text,
        piece.finish_reason,
        piece.stop_reason,
        _listed(state, call, piece, is_first=is_first),
    )
    if call.sampling.return_token_ids:
        choice.token_ids = list(piece.token_ids)
        if is_first:
            choice.prompt_token_ids = run.request.prompt_token_ids
    if call.num_prompt_top is not None:
        choice.prompt_logprobs = prompt_logprobs(
            state.tokenizer, run.prompt_records(), call.num_prompt_top
        )
    return choice


async def _whole(state: ServerState, call: _Call) -> CompletionResponse:
    parts: list[list[Piece]] = [[] for _ in call.runs]
    async with generate(state, call.runs, call.caller) as pieces:
        async for piece in pieces:
            parts[piece.index].append(piece)

    def choices() -> list[CompletionChoice]:
        return [_choice(state, call, joined(part), is_first=True) for part in parts]

    is_long = call.sampling.params.prompt_logprobs is not None
    made = await state.in_text_pool(choices) if is_long else choices()
    return call.chunk(made, with_usage=True)


def _piece_encoder(state: ServerState, call: _Call) -> Callable[[Piece], bytes]:
    """Encodes pieces in the middle of an answer as `_chunks` would have them sent."""
    sampling = call.sampling
    empty = call.chunk([CompletionChoice(0, "", None)], with_usage=False)
    template = TextTemplate(encode_event(empty), "text")
    has_more = call.num_top is not None or call.num_prompt_top is not None
    has_more = has_more or sampling.return_token_ids or sampling.continuous_usage

    def encode(piece: Piece) -> bytes:
        if not has_more:
            return template.fill(piece.text) if piece.events else b""
        choice = _choice(state, call, piece, is_first=False)
        if not _says_something(choice):
            return b""
        return encode_event(call.chunk([choice], with_usage=sampling.continuous_usage))

    return encode


def _says_something(choice: CompletionChoice) -> bool:
    has_tokens = choice.token_ids or (choice.logprobs and choice.logprobs.tokens)
    return bool(choice.text or has_tokens or choice.finish_reason is not None)


async def _chunks(
    state: ServerState, call: _Call, shortcut: Shortcut
) -> AsyncGenerator[CompletionResponse, None]:
    unsent = set(range(len(call.runs)))
    sampling = call.sampling
    async with generate(state, call.runs, call.caller, shortcut) as pieces:
        async for piece in pieces:
            is_first = piece.index in unsent
            make = partial(_choice, state, call, piece, is_first=is_first)
            is_long = is_first and call.echoes[piece.index].offsets
            choice = await state.in_text_pool(make) if is_long else make()
            if _says_something(choice):
                unsent.discard(piece.index)
                yield call.chunk([choice], with_usage=sampling.continuous_usage)
    if sampling.include_usage:
        yield call.chunk([], with_usage=True)
