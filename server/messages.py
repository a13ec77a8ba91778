"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the chat path.

Owns the two handlers. The request's translation is in `messages_request`, the answer's in
`messages_stream`; prompts, sequences and parsing are the chat path's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from aiohttp import web

from compiled_engine.errors import EngineError
from compiled_engine.server.admission import Permit
from compiled_engine.server.calls import CALLER

# The chat path's one way from a chat request to sequences.
from compiled_engine.server.chat import ChatCall, prepare_chat
from compiled_engine.server.generation import call_scope, generate, read_request, usage_of
from compiled_engine.server.messages_protocol import (
    CountTokensRequest,
    Message,
    MessagesError,
    MessagesEvent,
    MessagesRequest,
    TokenCount,
    messages_error,
)
from compiled_engine.server.messages_request import FIELD_NAMES, chat_request
from compiled_engine.server.messages_stream import MessageWriter
from compiled_engine.server.shortcut import Shortcut
from compiled_engine.server.sse import json_response
from compiled_engine.server.state import STATE, ServerState
from compiled_engine.server.translation import encode_named_event, fields_named, stream_events


async def create_message(request: web.Request) -> web.StreamResponse:
    """Handles one call; errors are raised for the error middleware."""
    state = request.app[STATE]
    async with call_scope(request) as permit:
        call = await _read(request, MessagesRequest, permit)
        if not call.sampling.stream:
            return json_response(await _whole(state, call))

        def failure(error: EngineError) -> MessagesError:
            return messages_error(error, call.caller.request_id)

        writer = MessageWriter(state.model_name)
        shortcut = Shortcut(lambda piece: b"".join(map(encode_named_event, writer.take(piece))))
        events = _events(state, call, writer, shortcut)
        return await stream_events(request, events, failure, shortcut)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Tokens of the prompt that a message would have; more than fit are refused, not counted."""
    async with call_scope(request) as permit:
        call = await _read(request, CountTokensRequest, permit)
        return json_response(TokenCount(len(call.runs[0].request.prompt_token_ids)))


async def _read(request: web.Request, kind: type[CountTokensRequest], permit: Permit) -> ChatCall:
    state = request.app[STATE]
    async with state.drain.interruptible():
        body = await read_request(request, kind)
        variables = state.tokenizer.chat_template_variables
        chat = chat_request(body, variables, state.chat_format)
        with fields_named(FIELD_NAMES):
            return await prepare_chat(state, chat, permit, request[CALLER])


async def _whole(state: ServerState, call: ChatCall) -> Message:
    writer = MessageWriter(state.model_name)
    with fields_named(FIELD_NAMES):
        async with generate(state, call.runs, call.caller) as pieces:
            async for piece in pieces:
                writer.take(piece)
    writer.finish(usage_of(call.runs, 1))
    return writer.message


async def _events(
    state: ServerState, call: ChatCall, writer: MessageWriter, shortcut: Shortcut
) -> AsyncGenerator[MessagesEvent, None]:
    is_started = False
    with fields_named(FIELD_NAMES):
        async with generate(state, call.runs, call.caller, shortcut) as pieces:
            async for piece in pieces:
                if not is_started:
                    is_started = True
                    for event in writer.start(usage_of(call.runs, 1)):
                        yield event
                for event in writer.take(piece):
                    yield event
    for event in writer.finish(usage_of(call.runs, 1)):
        yield event
