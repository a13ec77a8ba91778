"""`/v1/responses`: OpenAI's newer API over the chat path, and the answers it keeps.

Owns the handlers. The request's translation is in `responses_request`, the answer's in
`responses_stream`; prompts, sequences and parsing are the chat path's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from compiled_engine.errors import UnknownModelError
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER

# The chat path's one way from a chat request to sequences.
from compiled_engine.server.chat import ChatCall, prepare_chat
from compiled_engine.server.generation import call_scope, generate, read_request, usage_of
from compiled_engine.server.logprobs import chat_logprobs
from compiled_engine.server.protocol import ChatMessage
from compiled_engine.server.response_store import RESPONSES, ResponseStore, StoredResponse
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
    add_input,
    add_output,
    chat_request,
)
from compiled_engine.server.responses_stream import ResponseWriter, TokenLister
from compiled_engine.server.sse import json_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.translation import fields_named, refuse, stream_events


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One valid call.

    Attributes:
        call: of the chat path.
        writer: makes the answer.
        conversation: what came before, with this call's input; without instructions.
        store: where the answer is kept.
    """

    call: ChatCall
    writer: ResponseWriter
    conversation: list[ChatMessage]
    store: ResponseStore

    def keep(self) -> None:
        """Stores the whole answer, if the client did not forbid it."""
        response = self.writer.response
        if response.store:
            add_output(self.conversation, response.output)
            stored = StoredResponse(
                body=msgspec.json.encode(response), history=msgspec.json.encode(self.conversation)
            )
            self.store.put(self.call.caller.key_name, response.id, stored)


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with call_scope(request) as permit:
        async with state.drain.interruptible():
            work = await _read(request, permit)
        if work.call.sampling.stream:
            return await stream_events(request, _events(state, work), work.writer.failed)
        async for _ in _events(state, work):
            pass
        return json_response(work.writer.response)


async def _read(request: web.Request, permit: Permit) -> _Work:
    state, store, caller = request.app[STATE], request.app[RESPONSES], request[CALLER]
    body = await read_request(request, ResponsesRequest)
    conversation: list[ChatMessage] = []
    if body.previous_response_id is not None:
        stored = _stored(request, body.previous_response_id, "previous_response_id")
        conversation = msgspec.json.decode(stored.history, type=list[ChatMessage])
    add_input(conversation, body.input)
    chat = chat_request(body, conversation)
    with fields_named(FIELD_NAMES):
        call = await prepare_chat(state, chat, permit, caller)
    writer = ResponseWriter(_head(state, body, call), _token_lister(state, call))
    return _Work(call=call, writer=writer, conversation=conversation, store=store)


def _head(state: ServerState, body: ResponsesRequest, call: ChatCall) -> ResponseObject:
    """The response without its answer."""
    params = call.sampling.params
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=state.model_name,
        status="in_progress",
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


async def _events(state: ServerState, work: _Work) -> AsyncGenerator[ResponsesEvent, None]:
    call, writer = work.call, work.writer
    is_started = False
    with fields_named(FIELD_NAMES):
        async with generate(state, call.runs, call.caller) as pieces:
            async for piece in pieces:
                if not is_started:
                    is_started = True
                    for event in writer.start():
                        yield event
                for event in writer.take(piece):
                    yield event
    last = writer.finish(usage_of(call.runs, 1))
    # Before the client can know of it and refer to it.
    work.keep()
    yield last


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


async def get_response(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}`: a stored answer, in one piece."""
    for name, value in request.query.items():
        if not (name == "stream" and value == "false"):
            refuse(name[:64])
    stored = _stored(request, request.match_info["response_id"], "response_id")
    return web.Response(body=stored.body, content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`; answers that continue it stay as they are."""
    response_id = request.match_info["response_id"]
    if not request.app[RESPONSES].delete(request[CALLER].key_name, response_id):
        raise _unknown(response_id, "response_id")
    return json_response(DeletedResponse(response_id))
