"""`POST /generate`: text or token ids in, text and token ids out, as SGLang's route."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET

from compiled_engine.errors import InvalidRequestError
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER, Caller
from compiled_engine.server.choice import ChoiceRun, Piece
from compiled_engine.server.generation import (
    build_runs,
    call_scope,
    encode_bound,
    field_called,
    generate,
    read_request,
)
from compiled_engine.server.logprobs import token_text
from compiled_engine.server.native_protocol import (
    NativeAnswer,
    NativeFinish,
    NativeLogprob,
    NativeMeta,
    NativeRequest,
    NativeSampling,
)
from compiled_engine.server.prompts import encode_prompts
from compiled_engine.server.protocol import GenerationRequest
from compiled_engine.server.sse import json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.validation import (
    Sampling,
    convert,
    validate_sampling,
    with_logprobs,
)

DEFAULT_NEW_TOKENS = 128
MAX_RID_CHARS = 128
# Known fields that cannot be honoured, besides their neutral values.
_REFUSED = (
    "token_ids_logprob",
    "return_hidden_states",
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "lora_path",
    "session_params",
    "custom_logit_processor",
)
_REFUSED_SAMPLING = ("custom_params",)
# Fields of `NativeSampling` that have another name everywhere else.
_RENAMED = {
    "logprob_start_len": "logprob_start",
    "top_logprobs_num": "logprobs",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """One valid call.

    Attributes:
        is_list: the answer is a list, since the prompt was one or n is more than 1.
        num_top: likeliest tokens to list with each token; None lists no tokens.
        has_text: put the tokens' text into these lists.
    """

    sampling: Sampling
    runs: list[ChoiceRun]
    caller: Caller
    is_list: bool
    num_top: int | None
    has_text: bool


class _Prompts(NamedTuple):
    """The prompts, the field they came in, and whether it held a list of them."""

    values: list[str | list[int]]
    field: str
    are_list: bool


async def create_generation(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with call_scope(request) as permit:
        async with state.drain.interruptible():
            body = await read_request(request, NativeRequest)
            request[CALLER] = caller = _named(request[CALLER], body.rid)
            call = await _prepare(state, body, permit, caller)
        if call.sampling.stream:
            return await stream_response(request, _answers(state, call))
        return json_response(await _whole(state, call))


def _named(caller: Caller, rid: str | None) -> Caller:
    if rid is None:
        return caller
    if not (0 < len(rid) <= MAX_RID_CHARS and rid.isascii() and rid.isprintable()):
        raise InvalidRequestError(
            f"rid must be 1 to {MAX_RID_CHARS} printable ASCII characters", param="rid"
        )
    return dataclasses.replace(caller, request_id=rid)


async def _prepare(
    state: ServerState, body: NativeRequest, permit: Permit, caller: Caller
) -> _Call:
    _refuse(body)
    given, unknown = _sampling_fields(body.sampling_params or {})
    state.note_unknown_fields(unknown)
    shared = GenerationRequest(
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt if body.extra_key is None else body.extra_key,
        **given,
    )
    num_top = _num_top(body)
    is_prompt_only = num_top is not None and shared.max_tokens == 0
    with _native_names():
        sampling = validate_sampling(
            shared,
            state.default_sampling,
            max_n=state.config.max_n,
            max_tokens=1 if is_prompt_only else shared.max_tokens,
        )
        sampling = dataclasses.replace(
            _with_logprobs(sampling, body, num_top), is_prompt_only=is_prompt_only
        )
    native_names = {other: native for native, other in _RENAMED.items()}
    field = native_names.get(sampling.grammar_field, sampling.grammar_field)
    sampling = dataclasses.replace(sampling, grammar_field=field)
    prompts = _prompts(body)
    permit.extend_requests(len(prompts.values) * sampling.n)
    limits = state.require_limits()
    encode = partial(
        encode_prompts,
        state.tokenizer,
        prompts.values,
        max_tokens=encode_bound(limits, sampling),
        add_special_tokens=True,
    )
    with field_called("prompt", prompts.field):
        prompt_ids = await state.in_text_pool(encode)
    with _native_names():
        runs = build_runs(
            state,
            sampling,
            prompt_ids,
            permit=permit,
            limits=limits,
            default_max_tokens=DEFAULT_NEW_TOKENS,
            prompt_field=prompts.field,
        )
    return _Call(
        sampling=sampling,
        runs=runs,
        caller=caller,
        is_list=prompts.are_list or sampling.n > 1,
        num_top=num_top,
        has_text=bool(body.return_text_in_logprobs),
    )


def _num_top(body: NativeRequest) -> int | None:
    if body.return_logprob:
        return body.top_logprobs_num or 0
    for name, neutral in (("top_logprobs_num", 0), ("logprob_start_len", -1)):
        if getattr(body, name) not in (None, neutral):
            raise InvalidRequestError(f"{name} needs return_logprob", param=name)
    return None


def _with_logprobs(sampling: Sampling, body: NativeRequest, num_top: int | None) -> Sampling:
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if num_top is None or start == -1:
        return with_logprobs(sampling, tokens=num_top, prompt=None)
    return with_logprobs(sampling, tokens=num_top, prompt=num_top, start=start)


def _refuse(body: NativeRequest) -> None:
    for name in _REFUSED:
        value = getattr(body, name)
        if value not in (None, False, "", [], {}):
            raise InvalidRequestError(
                f"{name} is not supported by this server; leave it out", param=name
            )


def _sampling_fields(params: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Fields of `GenerationRequest`, and the names of those that are not known."""
    for name in _REFUSED_SAMPLING:
        if params.get(name) not in (None, "", {}):
            raise InvalidRequestError(
                f"sampling_params.{name} is not supported by this server; leave it out",
                param=f"sampling_params.{name}",
            )
    known = params.keys() & set(NativeSampling.__struct_fields__)
    try:
        sampling = convert({name: params[name] for name in known}, NativeSampling)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"sampling_params.{error.message}", param=f"sampling_params.{error.param}"
        ) from error
    given = {_RENAMED.get(n, n): v for n, v in msgspec.structs.asdict(sampling).items()}
    unknown = params.keys() - known - set(_REFUSED_SAMPLING)
    return given, {f"sampling_params.{name}" for name in unknown}


@contextlib.contextmanager
def _native_names() -> Iterator[None]:
    """Errors in the block name fields as the client spelled them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(field_called("prompt_logprobs", "top_logprobs_num"))
        for native, field in _RENAMED.items():
            stack.enter_context(field_called(field, native))
        yield


def _prompts(body: NativeRequest) -> _Prompts:
    """Raises InvalidRequestError for a wrong type or an empty list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give either text or input_ids", param="text")
    if body.input_ids is None:
        is_list, field = isinstance(body.text, list), "text"
        prompts: list[Any] = body.text if isinstance(body.text, list) else [body.text]
    else:
        ids, field = body.input_ids, "input_ids"
        is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        try:
            prompts = msgspec.convert(ids if is_list else [ids], list[list[int]], strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"input_ids must be a list of token ids, or a list of such lists: {error}",
                param=field,
            ) from error
    # An empty text may still have a token, where the tokenizer begins every text with one.
    if not prompts or (field == "input_ids" and not all(prompts)):
        raise InvalidRequestError(f"{field} is empty: at least one token is needed", param=field)
    return _Prompts(prompts, field, is_list)


def _answer(
    state: ServerState, call: _Call, text: str, piece: Piece, *, is_first: bool
) -> NativeAnswer:
    run = call.runs[piece.index]
    finish = None
    if piece.finish_reason is not None:
        finish = NativeFinish(piece.finish_reason)
        if piece.finish_reason == "length":
            finish.length = run.num_tokens
        elif piece.stop_reason is not None:
            finish.matched = piece.stop_reason
        elif run.token_ids:
            finish.matched = run.token_ids[-1]
    is_over = piece.finish_reason is not None
    meta = NativeMeta(
        id=call.caller.request_id,
        finish_reason=finish,
        prompt_tokens=len(run.request.prompt_token_ids),
        completion_tokens=run.num_tokens,
        cached_tokens=run.num_cached_tokens,
        weight_version=state.config.weight_version,
        e2e_latency=time.perf_counter() - call.caller.started_s if is_over else UNSET,
    )
    if call.num_top is not None:
        _add_logprobs(state, call, run, meta)
        if is_first if call.sampling.stream else is_over:
            _add_prompt_logprobs(state, call, run, meta)
    index = run.index if call.is_list else UNSET
    return NativeAnswer(text, run.token_ids, meta, index)


def _entry(state: ServerState, call: _Call, token_id: int, logprob: float | None) -> NativeLogprob:
    text = token_text(state.tokenizer, token_id) if call.has_text else None
    return logprob, token_id, text


def _add_logprobs(state: ServerState, call: _Call, run: ChoiceRun, meta: NativeMeta) -> None:
    entry = partial(_entry, state, call)
    meta.output_token_logprobs = [entry(r.token_id, r.logprob) for r in run.records]
    if call.num_top:
        meta.output_top_logprobs = [[entry(*pair) for pair in r.top] for r in run.records]


def _add_prompt_logprobs(state: ServerState, call: _Call, run: ChoiceRun, meta: NativeMeta) -> None:
    entry, params = partial(_entry, state, call), run.request.params
    if params.prompt_logprobs is None:
        return
    records = run.prompt_records()
    first = entry(run.request.prompt_token_ids[params.logprob_start], None)
    meta.input_token_logprobs = [first, *(entry(r.token_id, r.logprob) for r in records)]
    if call.num_top:
        meta.input_top_logprobs = [None, *([entry(*pair) for pair in r.top] for r in records)]


async def _answers(state: ServerState, call: _Call) -> AsyncGenerator[NativeAnswer, None]:
    texts = [""] * len(call.runs)
    unstarted = set(range(len(call.runs)))
    async with generate(state, call.runs, call.caller) as pieces:
        async for piece in pieces:
            texts[piece.index] += piece.text
            is_first = piece.index in unstarted
            unstarted.discard(piece.index)
            make = partial(_answer, state, call, texts[piece.index], piece, is_first=is_first)
            is_long = call.sampling.params.prompt_logprobs is not None
            yield await state.in_text_pool(make) if is_long else make()


async def _whole(state: ServerState, call: _Call) -> list[NativeAnswer] | NativeAnswer:
    last: dict[int, NativeAnswer] = {}
    async for answer in _answers(state, call):
        last[0 if answer.index is UNSET else answer.index] = answer
    answers = [last[index] for index in range(len(call.runs))]
    return answers if call.is_list else answers[0]
