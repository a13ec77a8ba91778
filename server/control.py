"""Routes that generate nothing: models, health, metrics, tokenising, version, the page at `/`."""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib import resources

import msgspec
from aiohttp import web

from compiled_engine import __version__
from compiled_engine.errors import InvalidRequestError, UnknownModelError
from compiled_engine.request import check_token_ids
from compiled_engine.server.calls import CALLER
from compiled_engine.server.chat_request import template_kwargs, template_messages
from compiled_engine.server.generation import read_request
from compiled_engine.server.native_protocol import Progress
from compiled_engine.server.openapi import openapi_document
from compiled_engine.server.prompts import encode_chat, encode_text
from compiled_engine.server.protocol import (
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
    failure = state.engine.dead_reason
    if failure is None and state.drain.is_draining:
        failure = "the server is shutting down"
    if failure is None and not state.engine.is_ready:
        failure = f"the engine is not ready: {state.engine.status.phase}"
    age_s = state.engine.step_age_s
    if failure is None and age_s > state.config.ready_timeout_s:
        failure = f"the engine has finished no step for {age_s:.1f} s"
    return _health(state, failure)


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
        return encode_text(
            state.tokenizer,
            body.prompt,
            max_tokens=max_tokens,
            add_special_tokens=body.add_special_tokens is not False,
        )
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    return encode_chat(
        state.tokenizer,
        template_messages(body.messages or []),
        max_tokens=max_tokens,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs(
            body.chat_template_kwargs, state.tokenizer.chat_template_variables
        ),
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


class StaticAnswers:
    """Answers that never change while the server runs: the page and the API description."""

    def __init__(self) -> None:
        self._page, self._page_headers = _load_page()
        self._openapi = msgspec.json.encode(openapi_document(__version__))

    def page_response(self, status: int = 200) -> web.Response:
        """The chat page; it holds nothing secret."""
        return web.Response(body=self._page, status=status, headers=self._page_headers)

    async def get_page(self, request: web.Request) -> web.Response:
        """`GET /`."""
        return self.page_response()

    async def get_openapi(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        return web.Response(body=self._openapi, content_type="application/json")


def _load_page() -> tuple[bytes, dict[str, str]]:
    """The page with style and script put in, so that it is one answer; and its headers.

    The content policy allows exactly these two and requests to this server.
    """
    folder = resources.files("compiled_engine.server").joinpath("static")
    style = folder.joinpath("chat.css").read_text(encoding="utf-8")
    script = folder.joinpath("chat.js").read_text(encoding="utf-8")
    page = folder.joinpath("index.html").read_text(encoding="utf-8")
    page = page.replace("/* chat.css */", style).replace("/* chat.js */", script)
    policy = (
        f"default-src 'none'; style-src {_source_hash(style)}; script-src {_source_hash(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def _source_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def not_found(request: web.Request) -> UnknownModelError:
    """The error of a path that is no route."""
    return UnknownModelError(f"there is no route {request.method} {request.path[:200]}")
