"""`/openapi.json`: a description of the routes, generated from the records of `protocol`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from compiled_engine.server import console_protocol as console
from compiled_engine.server import messages_protocol as messages
from compiled_engine.server import native_protocol as native
from compiled_engine.server import protocol, responses_items
from compiled_engine.server import responses_protocol as responses

_BODY_ROUTES: tuple[tuple[str, str, type[msgspec.Struct], type[msgspec.Struct]], ...] = (
    ("/v1/completions", "Complete text", protocol.CompletionRequest, protocol.CompletionResponse),
    ("/v1/chat/completions", "Answer a chat", protocol.ChatRequest, protocol.ChatResponse),
    ("/v1/messages", "Answer (Anthropic's API)", messages.MessagesRequest, messages.Message),
    (
        "/v1/messages/count_tokens",
        "Tokens of a prompt",
        messages.CountTokensRequest,
        messages.TokenCount,
    ),
    ("/v1/responses", "Answer and keep", responses.ResponsesRequest, responses.ResponseObject),
    ("/tokenize", "Text or chat to ids", protocol.TokenizeRequest, protocol.TokenizeResponse),
    ("/detokenize", "Ids to text", protocol.DetokenizeRequest, protocol.DetokenizeResponse),
    ("/generate", "Text or ids to text and ids", native.NativeRequest, native.NativeAnswer),
    ("/abort_request", "End one call, or all", native.AbortRequest, native.ControlAnswer),
    ("/flush_cache", "Forget all prefixes", native.EmptyRequest, native.ControlAnswer),
    ("/pause_generation", "Launch no steps", native.PauseRequest, native.ControlAnswer),
    ("/continue_generation", "Launch steps again", native.EmptyRequest, native.ControlAnswer),
    ("/start_profile", "Record steps", native.ProfileRequest, native.ControlAnswer),
    ("/stop_profile", "Write the trace", native.EmptyRequest, native.ControlAnswer),
)
_GET_ROUTES: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("/v1/models", "The served model", protocol.ModelList),
    ("/health", "Whether the engine is alive", protocol.HealthResponse),
    ("/ready", "Whether requests are taken", protocol.HealthResponse),
    ("/version", "Version of the server", protocol.VersionResponse),
    ("/progress", "Age of the last step", native.Progress),
    ("/server_info", "Settings and status", native.ServerInfo),
    ("/get_server_info", "Settings and status", native.ServerInfo),
    ("/model_info", "The model's limits", native.ModelInfo),
    ("/get_model_info", "The model's limits", native.ModelInfo),
    ("/get_weight_version", "Label of the weights", native.WeightVersion),
    ("/v1/loads", "Load of the engine", native.Loads),
    ("/console/data", "What the page at / draws", console.ConsoleData),
)
# Errors of GET routes, beside 401.
_GET_ERRORS = {"/server_info": ("403",), "/get_server_info": ("403",), "/console/data": ("400",)}
# What the events of a stream hold.
_STREAM_TYPES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "/v1/completions": (protocol.CompletionResponse,),
    "/v1/chat/completions": (protocol.ChatChunk,),
    "/v1/messages": get_args(messages.MessagesEvent),
    "/v1/responses": get_args(responses.ResponsesEvent),
    "/generate": (native.NativeAnswer,),
}
_STORED_RESPONSE = "/v1/responses/{response_id}"
# What can be done with a stored response.
_STORED_ROUTES: tuple[tuple[str, str, str, type[msgspec.Struct]], ...] = (
    (_STORED_RESPONSE, "get", "A stored response", responses.ResponseObject),
    (_STORED_RESPONSE, "delete", "Forget a stored response", responses.DeletedResponse),
    (f"{_STORED_RESPONSE}/cancel", "post", "End a background response", responses.ResponseObject),
    (f"{_STORED_RESPONSE}/input_items", "get", "Input of a response", responses_items.InputItems),
)
_OPEN_PATHS = ("/health", "/ready", "/progress", "/metrics")
_ERRORS = {
    "400": "A field is wrong or cannot be honoured; `param` names it.",
    "401": "No API key, or a wrong one.",
    "403": "The API key is not the operator's.",
    "404": "The model is not served here.",
    "408": "The body did not arrive in time.",
    "409": "The engine's present state does not allow it.",
    "413": "The body is too large.",
    "429": "Too much unfinished work; see Retry-After.",
    "499": "The operator aborted the request.",
    "500": "The engine failed on this request.",
    "503": "The engine is loading, stopping, hung or dead.",
}


def openapi_document(version: str) -> dict[str, Any]:
    """The whole OpenAPI 3.1 document."""
    types = {kind.__name__: kind for kind in _shown_types()}
    schemas, components = msgspec.json.schema_components(
        types.values(), ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, request, response in _BODY_ROUTES:
        paths[path] = {"post": _operation(path, summary, refs, response.__name__, request.__name__)}
    for path, summary, answer in _GET_ROUTES:
        paths[path] = {"get": _operation(path, summary, refs, answer.__name__, None)}
    for path, method, summary, answer in _STORED_ROUTES:
        paths.setdefault(path, {})[method] = _stored_operation(summary, refs, answer.__name__)
    paths["/console/data"]["get"]["parameters"] = [
        {"name": "since", "in": "query", "schema": {"type": "integer", "minimum": 0}}
    ]
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics",
            "security": [],
            "responses": {"200": {"description": "OK", "content": {"text/plain": {}}}},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "compiled-engine", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer"},
                "api_key_header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{"api_key": []}, {"api_key_header": []}, {}],
    }


def _shown_types() -> Iterator[type[msgspec.Struct]]:
    for _, _, request, answer in _BODY_ROUTES:
        yield request
        yield answer
    for _, _, kind in _GET_ROUTES:
        yield kind
    for events in _STREAM_TYPES.values():
        yield from events
    for _, _, _, kind in _STORED_ROUTES:
        yield kind
    yield protocol.ErrorResponse


def _stored_operation(summary: str, refs: dict[str, Any], answer: str) -> dict[str, Any]:
    operation = _operation(_STORED_RESPONSE, summary, refs, answer, None)
    error = {"application/json": {"schema": refs["ErrorResponse"]}}
    operation["responses"]["400"] = {"description": _ERRORS["400"], "content": error}
    operation["responses"]["404"] = {"description": "It is not stored.", "content": error}
    operation["parameters"] = [
        {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return operation


def _operation(
    path: str, summary: str, refs: dict[str, Any], response: str, request: str | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": refs[response]}}
    if path in _STREAM_TYPES:
        events = [refs[kind.__name__] for kind in _STREAM_TYPES[path]]
        schema = events[0] if len(events) == 1 else {"anyOf": events}
        content["text/event-stream"] = {"schema": schema}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": content}},
    }
    if path in ("/health", "/ready", "/progress"):
        operation["responses"]["503"] = {"description": "It is not", "content": content}
    else:
        kind = "MessagesError" if path.startswith("/v1/messages") else "ErrorResponse"
        error = {"application/json": {"schema": refs[kind]}}
        codes = tuple(_ERRORS) if request else ("401", *_GET_ERRORS.get(path, ()))
        for code in codes:
            operation["responses"][code] = {"description": _ERRORS[code], "content": error}
    if path in _OPEN_PATHS:
        operation["security"] = []
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[request]}},
        }
    return operation
