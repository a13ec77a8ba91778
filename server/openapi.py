"""`/openapi.json`: a description of the routes, generated from the records of `protocol`."""

from __future__ import annotations

from typing import Any

import msgspec

from compiled_engine.server import protocol

_BODY_ROUTES = (
    ("/v1/completions", "Complete text", protocol.CompletionRequest, protocol.CompletionResponse),
    ("/v1/chat/completions", "Answer a chat", protocol.ChatRequest, protocol.ChatResponse),
    ("/tokenize", "Text or chat to ids", protocol.TokenizeRequest, protocol.TokenizeResponse),
    ("/detokenize", "Ids to text", protocol.DetokenizeRequest, protocol.DetokenizeResponse),
)
_GET_ROUTES = (
    ("/v1/models", "The served model", protocol.ModelList),
    ("/health", "Whether the engine is alive", protocol.HealthResponse),
    ("/ready", "Whether requests are taken", protocol.HealthResponse),
    ("/version", "Version of the server", protocol.VersionResponse),
)
_STREAM_TYPES = {
    "/v1/completions": protocol.CompletionResponse,
    "/v1/chat/completions": protocol.ChatChunk,
}
_OPEN_PATHS = ("/health", "/ready", "/metrics")
_ERRORS = {
    "400": "A field is wrong or cannot be honoured; `param` names it.",
    "401": "No API key, or a wrong one.",
    "404": "The model is not served here.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too much unfinished work; see Retry-After.",
    "500": "The engine failed on this request.",
    "503": "The engine is loading, stopping, hung or dead.",
}


def openapi_document(version: str) -> dict[str, Any]:
    """The whole OpenAPI 3.1 document."""
    types = {
        kind.__name__: kind
        for kind in (
            *(kind for _, _, *kinds in _BODY_ROUTES for kind in kinds),
            *(kind for _, _, kind in _GET_ROUTES),
            *_STREAM_TYPES.values(),
            protocol.ErrorResponse,
        )
    }
    schemas, components = msgspec.json.schema_components(
        types.values(), ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, request, response in _BODY_ROUTES:
        paths[path] = {"post": _operation(path, summary, refs, response.__name__, request.__name__)}
    for path, summary, answer in _GET_ROUTES:
        paths[path] = {"get": _operation(path, summary, refs, answer.__name__, None)}
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
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"api_key": []}, {}],
    }


def _operation(
    path: str, summary: str, refs: dict[str, Any], response: str, request: str | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": refs[response]}}
    if path in _STREAM_TYPES:
        content["text/event-stream"] = {"schema": refs[_STREAM_TYPES[path].__name__]}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": content}},
    }
    if path in ("/health", "/ready"):
        operation["responses"]["503"] = {"description": "It is not", "content": content}
    else:
        error = {"application/json": {"schema": refs["ErrorResponse"]}}
        codes = _ERRORS if request else {"401": _ERRORS["401"]}
        for code, text in codes.items():
            operation["responses"][code] = {"description": text, "content": error}
    if path in _OPEN_PATHS:
        operation["security"] = []
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[request]}},
        }
    return operation
