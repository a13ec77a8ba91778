"""Routes that look at or act on the engine as a whole; names and meaning are SGLang's.

With several API keys, those that act are for the operator's; see `app`.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from compiled_engine import __version__
from compiled_engine.errors import InvalidRequestError, RequestAbortedError
from compiled_engine.request import SamplingParams
from compiled_engine.server.generation import read_body, read_request
from compiled_engine.server.native_protocol import (
    AbortRequest,
    ControlAnswer,
    Load,
    Loads,
    ModelInfo,
    PauseRequest,
    ProfileRequest,
    ServerInfo,
    WeightVersion,
)
from compiled_engine.server.sse import json_response
from compiled_engine.server.state import STATE, ServerState

S = TypeVar("S", bound=msgspec.Struct)

_SECRETS = frozenset({"api_key", "api_key_file"})
# A profile that nobody stops ends after so many steps: it is kept in memory.
MAX_PROFILE_STEPS = 10_000


async def _read(request: web.Request, kind: type[S]) -> S:
    """The body as `kind`; none at all means all defaults."""
    if not await read_body(request):
        return kind()
    return await read_request(request, kind)


def _shown(settings: Any) -> dict[str, Any]:
    """A config without what nobody should see, as JSON has it."""
    if settings is None:
        return {}
    values = dataclasses.asdict(settings)
    return {
        name: ("(set)" if value is not None else None) if name in _SECRETS else _plain(value)
        for name, value in values.items()
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


async def get_server_info(request: web.Request) -> web.Response:
    """`GET /server_info`: settings, and the engine's latest status."""
    state = request.app[STATE]
    return json_response(
        ServerInfo(
            version=__version__,
            served_model_name=state.model_name,
            weight_version=state.config.weight_version,
            engine=_shown(state.engine_config),
            server=_shown(state.config),
            status=msgspec.to_builtins(state.engine.status),
        )
    )


def _given(params: SamplingParams) -> dict[str, Any]:
    """Sampling values that differ from those of a request without any."""
    defaults = msgspec.to_builtins(SamplingParams())
    values = msgspec.to_builtins(params)
    return {name: value for name, value in values.items() if value != defaults[name]}


async def get_model_info(request: web.Request) -> web.Response:
    """`GET /model_info`."""
    state = request.app[STATE]
    limits, status, tokenizer = state.engine.limits, state.engine.status, state.loaded_tokenizer
    return json_response(
        ModelInfo(
            model_path=status.model_folder,
            tokenizer_path=status.tokenizer_folder,
            served_model_name=state.model_name,
            weight_version=state.config.weight_version,
            is_generation=True,
            has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
            max_model_len=limits.max_model_len if limits else None,
            max_total_tokens=limits.max_total_tokens if limits else None,
            vocab_size=limits.vocab_size if limits else None,
            preferred_sampling_params=_given(state.default_sampling),
        )
    )


async def get_weight_version(request: web.Request) -> web.Response:
    """`GET /get_weight_version`: the operator's label of the weights."""
    return json_response(WeightVersion(request.app[STATE].config.weight_version))


async def get_loads(request: web.Request) -> web.Response:
    """`GET /v1/loads`: what a gateway balances by; costs the engine nothing."""
    state = request.app[STATE]
    status = state.engine.status
    num_pages = status.num_pages_total
    max_tokens = state.engine.limits.max_total_tokens if state.engine.limits else 0
    usage = status.num_pages_active / num_pages if num_pages else 0.0
    hits = status.num_cached_tokens / status.num_prompt_tokens if status.num_prompt_tokens else 0.0
    load = Load(
        dp_rank=0,
        num_running_reqs=status.num_requests_running,
        num_waiting_reqs=status.num_requests_waiting,
        num_total_reqs=status.num_requests_running + status.num_requests_waiting,
        num_used_tokens=round(usage * max_tokens),
        max_total_num_tokens=max_tokens,
        token_usage=round(usage, 4),
        cache_hit_rate=round(hits, 4),
        queued_prompt_tokens=state.admission.num_tokens,
        is_paused=status.is_paused,
    )
    return json_response(
        Loads(timestamp=time.time(), version=__version__, dp_rank_count=1, loads=[load])
    )


def _abort(state: ServerState, sequences: list[int]) -> int:
    for request_id in sequences:
        state.engine.cancel(request_id, RequestAbortedError("the request was aborted"))
    return len(sequences)


async def abort_request(request: web.Request) -> web.Response:
    """`POST /abort_request`: ends one call or all; one that is not running is no error."""
    state = request.app[STATE]
    body = await _read(request, AbortRequest)
    if bool(body.rid) == bool(body.abort_all):
        raise InvalidRequestError("give either rid or abort_all", param="rid")
    calls = state.calls.all() if body.abort_all else state.calls.of(body.rid or "")
    num_aborted = _abort(state, calls)
    return json_response(ControlAnswer("aborted", num_aborted=num_aborted))


async def flush_cache(request: web.Request) -> web.Response:
    """`POST /flush_cache`: forgets every cached prefix; 409 while there are requests."""
    await request.app[STATE].engine.control("flush_cache")
    return json_response(ControlAnswer("the prefix cache is empty"))


async def pause_generation(request: web.Request) -> web.Response:
    """`POST /pause_generation`: no step is launched until `/continue_generation`; requests wait."""
    state = request.app[STATE]
    body = await _read(request, PauseRequest)
    num_aborted = 0
    if body.mode == "abort":
        num_aborted = _abort(state, state.calls.all())
    await state.engine.control("pause")
    return json_response(ControlAnswer("paused", num_aborted=num_aborted))


async def continue_generation(request: web.Request) -> web.Response:
    """`POST /continue_generation`: ends a pause; without one it does nothing."""
    await request.app[STATE].engine.control("continue")
    return json_response(ControlAnswer("running"))


def _profile_dir(state: ServerState) -> str:
    if state.config.profile_dir is None:
        raise InvalidRequestError("profiling is off: start the server with --profile-dir DIR")
    return str(state.config.profile_dir.absolute())


async def start_profile(request: web.Request) -> web.Response:
    """`POST /start_profile`: records the engine's steps, into the folder of `--profile-dir`."""
    state = request.app[STATE]
    folder = _profile_dir(state)
    body = await _read(request, ProfileRequest)
    if body.output_dir is not None:
        raise InvalidRequestError(
            "output_dir is chosen by --profile-dir; leave it out", param="output_dir"
        )
    num_steps = MAX_PROFILE_STEPS if body.num_steps is None else body.num_steps
    if not 1 <= num_steps <= MAX_PROFILE_STEPS:
        raise InvalidRequestError(
            f"num_steps is {num_steps}; allowed is 1 to {MAX_PROFILE_STEPS}", param="num_steps"
        )
    result = await state.engine.control("start_profile", folder=folder, num_steps=num_steps)
    return json_response(ControlAnswer("recording", path=result.path))


async def stop_profile(request: web.Request) -> web.Response:
    """`POST /stop_profile`: writes the trace."""
    state = request.app[STATE]
    _profile_dir(state)
    result = await state.engine.control("stop_profile")
    return json_response(ControlAnswer("written", path=result.path))


ROUTES = (
    web.get("/server_info", get_server_info),
    web.get("/get_server_info", get_server_info),
    web.get("/model_info", get_model_info),
    web.get("/get_model_info", get_model_info),
    web.get("/get_weight_version", get_weight_version),
    web.get("/v1/loads", get_loads),
    web.post("/abort_request", abort_request),
    web.post("/flush_cache", flush_cache),
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
    web.post("/start_profile", start_profile),
    web.post("/stop_profile", stop_profile),
)
