"""`/v1/responses`: OpenAI's newer API over the chat path, and the answers it keeps.

Owns the handlers. The request's translation is in `responses_request`, the answer's in
`responses_stream`; prompts, sequences and parsing are the chat path's.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from compiled_engine.errors import EngineError, UnknownModelError
from compiled_engine.server.admission import Permit
from compiled_engine.server.background import JOBS, Job
from compiled_engine.server.calls import CALLER

# The chat path's one way from a chat request to sequences.
from compiled_engine.server.chat import ChatCall, prepare_chat
from compiled_engine.server.generation import call_scope, generate, read_request, usage_of
from compiled_engine.server.logprobs import chat_logprobs
from compiled_engine.server.protocol import ChatMessage
from compiled_engine.server.response_store import RESPONSES, ResponseStore, StoredResponse
from compiled_engine.server.responses_items import ListedItem, listed_items, page_of
from compiled_engine.server.responses_protocol import (
    DeletedResponse,
    ReasoningConfig,
    ResponseObject,
    ResponsesEvent,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from compiled_engine.server.responses_request import (
    FIELD_NAMES,
    SEALED_REASONING,
    add_input,
    add_output,
    chat_request,
)
from compiled_engine.server.responses_stream import ResponseWriter, TokenLister
from compiled_engine.server.shortcut import Shortcut
from compiled_engine.server.sse import StreamForm, error_body, json_response, stream_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.translation import (
    encode_named_event,
    fields_named,
    refuse,
    stream_events,
)


def _sent_failure(error: EngineError) -> bytes:
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"


# Events that are bytes already.
_SENT_EVENTS = StreamForm(bytes, _sent_failure)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One valid call.

    Attributes:
        call: of the chat path.
        writer: makes the answer.
        conversation: what came before, with this call's input; without instructions.
        items: the call's own input.
        store: where the answer is kept.
    """

    call: ChatCall
    writer: ResponseWriter
    conversation: list[ChatMessage]
    items: list[ListedItem]
    store: ResponseStore

    def keep(self, job: Job | None = None) -> None:
        """Stores the whole answer, if the client did not forbid it.

        Args:
            job: that made it in the background.
        """
        response = self.writer.response
        if not response.store:
            return
        add_output(self.conversation, response.output)
        stored = StoredResponse(
            body=msgspec.json.encode(response),
            history=msgspec.json.encode(self.conversation),
            items=msgspec.json.encode(self.items),
            is_background=job is not None,
            events=tuple(job.events) if job is not None and job.events is not None else None,
        )
        self.store.put(self.call.caller.key_name, response.id, stored)


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with contextlib.AsyncExitStack() as scope:
        permit = await scope.enter_async_context(call_scope(request))
        async with state.drain.interruptible():
            work = await _read(request, permit)
        if work.writer.response.background:
            return await _begin_background(request, work, scope.pop_all())
        if work.call.sampling.stream:
            take, failed = work.writer.take, work.writer.failed
            shortcut = Shortcut(lambda piece: b"".join(map(encode_named_event, take(piece))))
            events = _kept_events(state, work, shortcut)
            return await stream_events(request, events, failed, shortcut)
        async for _ in _kept_events(state, work):
            pass
        return json_response(work.writer.response)


async def _begin_background(
    request: web.Request, work: _Work, scope: contextlib.AsyncExitStack
) -> web.StreamResponse:
    """Answers while the work goes on by itself; `scope` ends with the work."""

    async def events() -> AsyncGenerator[ResponsesEvent, None]:
        async with scope, contextlib.aclosing(_events(request.app[STATE], work)) as inner:
            async for event in inner:
                yield event

    job = request.app[JOBS].start(
        work.call.caller.key_name,
        work.writer,
        events(),
        keeps_events=work.call.sampling.stream,
        keep=work.keep,
    )
    if work.call.sampling.stream:
        return await stream_response(request, job.follow(0), _SENT_EVENTS)
    return json_response(work.writer.response)


async def _read(request: web.Request, permit: Permit) -> _Work:
    state, store, caller = request.app[STATE], request.app[RESPONSES], request[CALLER]
    body = await read_request(request, ResponsesRequest)
    conversation: list[ChatMessage] = []
    if body.previous_response_id is not None:
        if request.app[JOBS].get(caller.key_name, body.previous_response_id) is not None:
            refuse("previous_response_id", "is of a response that is not finished yet")
        stored = _stored(request, body.previous_response_id, "previous_response_id")
        conversation = msgspec.json.decode(stored.history, type=list[ChatMessage])
    add_input(conversation, body.input)
    chat = chat_request(body, conversation)
    with fields_named(FIELD_NAMES):
        call = await prepare_chat(state, chat, permit, caller)
    head = _head(state, body, call)
    writer = ResponseWriter(
        head,
        _token_lister(state, call),
        seals_reasoning=SEALED_REASONING in (body.include or ()),
    )
    items = listed_items(head.id, body.input)
    return _Work(call=call, writer=writer, conversation=conversation, items=items, store=store)


def _head(state: ServerState, body: ResponsesRequest, call: ChatCall) -> ResponseObject:
    """The response without its answer."""
    params = call.sampling.params
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=state.model_name,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        top_logprobs=body.top_logprobs or 0,
        reasoning=body.reasoning or ReasoningConfig(),
        store=body.store is not False,
        temperature=params.temperature,
        text=_text(body.text),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=params.top_p,
    )


def _token_lister(state: ServerState, call: ChatCall) -> TokenLister | None:
    num_top = call.num_top
    if num_top is None:
        return None
    return lambda tokens: chat_logprobs(state.tokenizer, tokens, num_top).content


def _text(given: TextConfig | None) -> TextConfig:
    given = given or TextConfig()
    return msgspec.structs.replace(given, format=given.format or TextFormat(type="text"))


async def _events(
    state: ServerState, work: _Work, shortcut: Shortcut | None = None
) -> AsyncGenerator[ResponsesEvent, None]:
    call, writer = work.call, work.writer
    is_started = False
    with fields_named(FIELD_NAMES):
        async with generate(state, call.runs, call.caller, shortcut) as pieces:
            async for piece in pieces:
                if not is_started:
                    is_started = True
                    for event in writer.start():
                        yield event
                for event in writer.take(piece):
                    yield event
    yield writer.finish(usage_of(call.runs, 1))


async def _kept_events(
    state: ServerState, work: _Work, shortcut: Shortcut | None = None
) -> AsyncGenerator[ResponsesEvent, None]:
    """The same; the answer is stored before the client can know of it and refer to it."""
    async with contextlib.aclosing(_events(state, work, shortcut)) as events:
        async for event in events:
            if work.writer.response.usage is not None:
                work.keep()
            yield event


def _stored(request: web.Request, response_id: str, param: str) -> StoredResponse:
    stored = request.app[RESPONSES].get(request[CALLER].key_name, response_id)
    if stored is None:
        raise _unknown(response_id, param)
    return stored


def _unknown(response_id: str, param: str) -> UnknownModelError:
    return UnknownModelError(
        f"there is no stored response {response_id[:64]!r}: it was not stored, deleted, or dropped "
        "to make room for others",
        param=param,
        code="response_not_found",
    )


async def get_response(request: web.Request) -> web.StreamResponse:
    """`GET /v1/responses/{id}`: a stored or running answer.

    With `stream=true` the events of one that was made with background and stream, behind number
    `starting_after`.
    """
    query = dict(request.query)
    is_stream = query.pop("stream", "false")
    if is_stream not in ("true", "false"):
        refuse("stream", "must be true or false")
    start = _start(query.pop("starting_after", None), is_stream=is_stream == "true")
    if query.pop("include_obfuscation", "false") != "false":
        refuse("include_obfuscation")
    for name in query:
        refuse(name[:64])
    job = _job(request)
    if is_stream == "true":
        if job is not None and job.events is not None:
            return await stream_response(request, job.follow(start), _SENT_EVENTS)
        stored = None if job is not None else _stored(request, _id(request), "response_id")
        if stored is None or stored.events is None:
            refuse("stream", "needs a response that was made with background and stream")
        return await stream_response(request, _sent(stored.events[start:]), _SENT_EVENTS)
    if job is not None:
        return json_response(job.writer.response)
    return _json(_stored(request, _id(request), "response_id").body)


def _start(after: str | None, *, is_stream: bool) -> int:
    """Number of the first event to send."""
    if after is None:
        return 0
    if not is_stream:
        refuse("starting_after", "needs stream=true")
    if not (after.isascii() and after.isdigit() and len(after) <= 12):
        refuse("starting_after", "must be the number of an event")
    return int(after) + 1


async def _sent(events: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for event in events:
        yield event


def _job(request: web.Request) -> Job | None:
    return request.app[JOBS].get(request[CALLER].key_name, _id(request))


def _id(request: web.Request) -> str:
    return request.match_info["response_id"]


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


async def cancel_response(request: web.Request) -> web.Response:
    """`POST /v1/responses/{id}/cancel`: ends one that is made in the background.

    One that has ended stays as it is.
    """
    job = _job(request)
    if job is not None:
        await job.cancel()
        return json_response(job.writer.response)
    stored = _stored(request, _id(request), "response_id")
    if not stored.is_background:
        refuse("response_id", "is of a response that was not made with background")
    return _json(stored.body)


async def delete_response(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`; answers that continue it stay as they are."""
    job = _job(request)
    if job is not None:
        await job.cancel()
    if not request.app[RESPONSES].delete(request[CALLER].key_name, _id(request)):
        raise _unknown(_id(request), "response_id")
    return json_response(DeletedResponse(_id(request)))


async def list_input_items(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}/input_items`: what the call itself gave, in pages."""
    if _job(request) is not None:
        refuse("response_id", "is of a response that is not finished yet")
    stored = _stored(request, _id(request), "response_id")
    items = msgspec.json.decode(stored.items, type=list[ListedItem])
    return json_response(page_of(items, request.query))


ROUTES = (
    web.post("/v1/responses", create_response),
    web.get("/v1/responses/{response_id}", get_response),
    web.delete("/v1/responses/{response_id}", delete_response),
    web.post("/v1/responses/{response_id}/cancel", cancel_response),
    web.get("/v1/responses/{response_id}/input_items", list_input_items),
)
