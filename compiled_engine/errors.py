"""Errors a user can meet, and the HTTP status and error type each one becomes.

Everything raised on purpose derives from `EngineError`; whatever else reaches the server is a bug
of ours and becomes a 500 without its text.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error with a message meant for the user.

    Attributes:
        status: HTTP status the server answers with.
        error_type: value of `error.type` in OpenAI's error body.
        code: value of `error.code`, or None.
        param: request field or command-line flag at fault, or None.
    """

    status: int = 500
    error_type: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(EngineError, ValueError):
    """The request cannot be honoured as it stands: names the field and the limit (HTTP 400)."""

    status = 400
    error_type = "invalid_request_error"


class UnknownModelError(EngineError):
    """The request names a model that is not served here (HTTP 404)."""

    status = 404
    error_type = "invalid_request_error"


class AuthenticationError(EngineError):
    """No API key, or a wrong one (HTTP 401)."""

    status = 401
    error_type = "authentication_error"


class OverloadedError(EngineError):
    """A queue limit is reached (HTTP 429 with Retry-After).

    Attributes:
        retry_after_s: whole seconds after which a retry has a chance.
    """

    status = 429
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after_s = retry_after_s


class EngineUnavailableError(EngineError):
    """The engine process is still loading, is draining, or has died (HTTP 503)."""

    status = 503
    error_type = "service_unavailable_error"


class ConflictError(EngineError):
    """A control call cannot be done in the engine's present state (HTTP 409)."""

    status = 409
    error_type = "conflict_error"


class ForbiddenError(EngineError):
    """The API key is right, but not for this route (HTTP 403)."""

    status = 403
    error_type = "permission_error"


class RequestAbortedError(EngineError):
    """The operator ended the request: `/abort_request` (HTTP 499, which clients do not retry)."""

    status = 499
    error_type = "request_aborted"


class ConfigError(EngineError, ValueError):
    """A command-line flag, model folder or environment cannot work (exit code 2)."""
