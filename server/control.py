"""Routes that generate nothing: models, health, metrics, tokenising, version, API description."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from compiled_engine import __version__
from compiled_engine.errors import InvalidRequestError, UnknownModelError
from compiled_engine.request import check_token_ids
from compiled_engine.server.calls import CALLER
from compiled_engine.server.chat import chat_renderer
from compiled_engine.server.chat_request import template_messages, tool_use
from compiled_engine.server.generation import read_request
from compiled_engine.server.native_protocol import Progress
from compiled_engine.server.openapi import openapi_document
from compiled_engine.server.prompts import encode_rendered, encode_text
from compiled_engine.server.protocol import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from compiled_engine.server.sse import json_response
from compiled_engine.server.state import STATE, ServerState

# Bound on `/tokenize` while the model's own length is not known yet.
_MAX_TOKENS_BEFORE_LOAD = 1_000_000
# Fields of `/tokenize` that are of a chat's prompt.
_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "reasoning_effort",
)


def _card(state: ServerState) -> ModelCard:
    limits = state.engine.limits
    return ModelCard(
        id=state.model_name,
        created=state.created,
        max_model_len=limits.max_model_len if limits else None,
    )


async def list_models(request: web.Request) -> web.Response:
    """`GET /v1/models`."""
    return json_response(ModelList([_card(request.app[STATE])]))


async def get_model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`; ids may hold slashes."""
    state = request.app[STATE]
    state.check_model(request.match_info["model"])
    return json_response(_card(state))


def _health(state: ServerState, failure: str | None) -> web.Response:
    status = state.engine.status
    body = HealthResponse(
        status=failure or "ok",
        phase=status.phase,
        phase_detail=status.phase_detail,
        step_age_s=round(state.engine.step_age_s, 3),
    )
    headers = {"Retry-After": "1"} if failure else None
    return json_response(body, status=503 if failure else 200, headers=headers)


async def get_health(request: web.Request) -> web.Response:
    """`GET /health`: 200 unless the engine is dead or hung; loading is healthy."""
    state = request.app[STATE]
    return _health(state, state.engine.dead_reason)


async def get_ready(request: web.Request) -> web.Response:
    """`GET /ready`: 200 once weights are in and warm, until the server begins to stop.

    Also 503 while a step, or a sign of life, takes longer than `ready_timeout_s`. Requests are
    still taken then: the engine may only be slow.
    """
    state = request.app[STATE]
    return _health(state, readiness_failure(state))


def readiness_failure(state: ServerState) -> str | None:
    """Why `/ready` says no, in words; None if it says yes."""
    if state.engine.dead_reason is not None:
        return state.engine.dead_reason
    if state.drain.is_draining:
        return "the server is shutting down"
    if not state.engine.is_ready:
        return f"the engine is not ready: {state.engine.status.phase}"
    age_s = state.engine.step_age_s
    if age_s > state.config.ready_timeout_s:
        return f"the engine has finished no step for {age_s:.1f} s"
    return None


async def get_progress(request: web.Request) -> web.Response:
    """`GET /progress`: whether the engine gets on; 503 only where it is dead or hung."""
    state = request.app[STATE]
    engine, status = state.engine, state.engine.status
    body = Progress(
        status=engine.dead_reason or "ok",
        phase=status.phase,
        is_paused=status.is_paused,
        step_age_s=round(engine.step_age_s, 3),
        num_steps=status.num_steps,
        num_generated_tokens=status.num_generated_tokens,
        num_running=status.num_requests_running,
        num_waiting=status.num_requests_waiting,
    )
    return json_response(body, status=503 if engine.dead_reason else 200)


async def get_metrics(request: web.Request) -> web.Response:
    """`GET /metrics` in Prometheus' text format."""
    return web.Response(
        body=request.app[STATE].metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def get_version(request: web.Request) -> web.Response:
    """`GET /version`."""
    return json_response(VersionResponse(__version__))


async def tokenize(request: web.Request) -> web.Response:
    """`POST /tokenize`: ids of a text or of a rendered chat."""
    state = request.app[STATE]
    with state.admission.enter(request[CALLER].key_name):
        body = await read_request(request, TokenizeRequest)
        state.check_model(body.model)
        limits = state.engine.limits
        max_tokens = limits.max_model_len if limits else _MAX_TOKENS_BEFORE_LOAD
        token_ids = await state.in_text_pool(partial(_tokenize, state, body, max_tokens))
    return json_response(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=limits.max_model_len if limits else None,
            tokens=token_ids,
        )
    )


def _tokenize(state: ServerState, body: TokenizeRequest, max_tokens: int) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        for name in _CHAT_FIELDS:
            if getattr(body, name) is not None:
                raise InvalidRequestError(f"{name} needs messages, not a prompt", param=name)
        return encode_text(
            state.tokenizer,
            body.prompt,
            max_tokens=max_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
    chat = ChatRequest(**{name: getattr(body, name) for name in ("messages", *_CHAT_FIELDS)})
    render = chat_renderer(state, chat, tool_use(chat), template_messages(chat.messages))
    return encode_rendered(
        state.tokenizer,
        render(),
        max_tokens=max_tokens,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def detokenize(request: web.Request) -> web.Response:
    """`POST /detokenize`: text of ids, special tokens included."""
    state = request.app[STATE]
    with state.admission.enter(request[CALLER].key_name):
        body = await read_request(request, DetokenizeRequest)
        state.check_model(body.model)
        check_token_ids("tokens", body.tokens, state.tokenizer.vocab_size)
        decode = partial(state.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await state.in_text_pool(decode)
    return json_response(DetokenizeResponse(text))


class OpenApi:
    """The API description, which never changes while the server runs."""

    def __init__(self) -> None:
        self._openapi = msgspec.json.encode(openapi_document(__version__))

    async def get(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return web.Response(body=self._openapi, content_type="application/json")


def not_found(request: web.Request) -> UnknownModelError:
    """The error of a path that is no route."""
    return UnknownModelError(f"there is no route {request.method} {request.path[:200]}")
