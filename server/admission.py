"""Bounds on unfinished work: a permit is taken before anything costs time and travels with it.

Owns the counts of unfinished requests and of their prompt tokens. Full means an immediate refusal
(HTTP 429), never a wait.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from compiled_engine.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_S = 1


class Admission:
    """Counts unfinished requests and prompt tokens against their limits.

    Attributes:
        num_requests: sampled sequences admitted and not yet finished.
        num_tokens: prompt tokens of these.
        num_rejects: refusals so far, by limit.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self.num_rejects = {"requests": 0, "tokens": 0}

    def enter(self) -> Permit:
        """A permit for one request; more is added once the body is known.

        Raises:
            OverloadedError: the limit on unfinished requests is reached.
        """
        permit = Permit(self)
        permit.extend_requests(1)
        return permit


class Permit:
    """A share of the limits, given back when the `with` block ends, however it ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_requests = 0
        self._num_tokens = 0

    def extend_requests(self, num_requests: int) -> None:
        """Raises the permit to `num_requests` requests.

        Raises:
            InvalidRequestError: more than could ever be admitted.
            OverloadedError: more than is free now.
        """
        limit = self._admission.max_requests
        if num_requests > limit:
            raise InvalidRequestError(
                f"the number of prompts times n is {num_requests}; at most {limit} are allowed",
                param="n",
            )
        more = num_requests - self._num_requests
        if self._admission.num_requests + more > limit:
            self._admission.num_rejects["requests"] += 1
            raise OverloadedError(
                f"too many requests: {self._admission.num_requests} are unfinished and at most "
                f"{limit} are allowed; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._admission.num_requests += more
        self._num_requests = num_requests

    def extend_tokens(self, num_tokens: int) -> None:
        """Raises the permit to `num_tokens` prompt tokens; errors as `extend_requests`."""
        limit = self._admission.max_tokens
        if num_tokens > limit:
            raise InvalidRequestError(
                f"the prompts, each counted n times, have {num_tokens} tokens; at most {limit} are "
                "allowed in one call",
                param="prompt",
            )
        more = num_tokens - self._num_tokens
        if self._admission.num_tokens + more > limit:
            self._admission.num_rejects["tokens"] += 1
            raise OverloadedError(
                f"too much queued work: unfinished requests hold {self._admission.num_tokens} "
                f"prompt tokens and at most {limit} are allowed; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._admission.num_tokens += more
        self._num_tokens = num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission.num_requests -= self._num_requests
        self._admission.num_tokens -= self._num_tokens
        self._num_requests = self._num_tokens = 0
