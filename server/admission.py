"""Bounds on unfinished work: a permit is taken before anything costs time and travels with it.

Owns the counts of unfinished requests and of their prompt tokens, in all and by API key. Full means
an immediate refusal (HTTP 429), never a wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from compiled_engine.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_S = 1


@dataclass
class Usage:
    """Unfinished work against its limits.

    Attributes:
        max_requests: sampled sequences at most.
        max_tokens: their prompt tokens at most.
        num_requests: sequences admitted and not yet finished.
        num_tokens: prompt tokens of these.
        scope: "" for the whole server, else " with this API key".
    """

    max_requests: int
    max_tokens: int
    num_requests: int = 0
    num_tokens: int = 0
    scope: str = ""


class Admission(Usage):
    """Counts unfinished requests and prompt tokens against their limits.

    Args:
        max_requests: for all calls together.
        max_tokens: likewise.
        max_requests_per_key: for the calls of each named key; None for no limit of its own.
        max_tokens_per_key: likewise.

    Attributes:
        num_rejects: refusals so far, by limit.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        max_requests_per_key: int | None = None,
        max_tokens_per_key: int | None = None,
    ) -> None:
        super().__init__(max_requests, max_tokens)
        self.num_rejects = {"requests": 0, "tokens": 0, "key_requests": 0, "key_tokens": 0}
        self._per_key = (max_requests_per_key or max_requests, max_tokens_per_key or max_tokens)
        self._by_key: dict[str, Usage] = {}

    def usage_of(self, key_name: str) -> Usage:
        """Unfinished work of a named key; made when it is first seen, and keys are few."""
        if key_name not in self._by_key:
            self._by_key[key_name] = Usage(*self._per_key, scope=" with this API key")
        return self._by_key[key_name]

    def enter(self, key_name: str = "") -> Permit:
        """A permit for one request; more is added once the body is known.

        Args:
            key_name: whose limits hold besides the server's; "" for nobody's.

        Raises:
            OverloadedError: the limit on unfinished requests is reached.
        """
        permit = Permit(self, key_name)
        permit.extend_requests(1)
        return permit


class Permit:
    """A share of the limits, given back when the `with` block ends, however it ends."""

    def __init__(self, admission: Admission, key_name: str) -> None:
        self._num_rejects = admission.num_rejects
        # The narrower limit first: its refusal says more.
        self._usages: tuple[Usage, ...] = (admission,)
        if key_name:
            self._usages = (admission.usage_of(key_name), admission)
        self._num_requests = 0
        self._num_tokens = 0

    def extend_requests(self, num_requests: int) -> None:
        """Raises the permit to `num_requests` requests.

        Raises:
            InvalidRequestError: more than could ever be admitted.
            OverloadedError: more than is free now.
        """
        more = num_requests - self._num_requests
        for usage in self._usages:
            limit = usage.max_requests
            if num_requests > limit:
                raise InvalidRequestError(
                    f"the number of prompts times n is {num_requests}; at most {limit} are allowed",
                    param="n",
                )
            if usage.num_requests + more > limit:
                self._reject(
                    usage,
                    "requests",
                    f"too many requests: {usage.num_requests}{usage.scope} are unfinished and at "
                    f"most {limit} are allowed; try again later",
                )
        for usage in self._usages:
            usage.num_requests += more
        self._num_requests = num_requests

    def extend_tokens(self, num_tokens: int) -> None:
        """Raises the permit to `num_tokens` prompt tokens; errors as `extend_requests`."""
        more = num_tokens - self._num_tokens
        for usage in self._usages:
            limit = usage.max_tokens
            if num_tokens > limit:
                raise InvalidRequestError(
                    f"the prompts, each counted n times, have {num_tokens} tokens; at most {limit} "
                    "are allowed in one call",
                    param="prompt",
                )
            if usage.num_tokens + more > limit:
                self._reject(
                    usage,
                    "tokens",
                    f"too much queued work: unfinished requests{usage.scope} hold "
                    f"{usage.num_tokens} prompt tokens and at most {limit} are allowed; try again "
                    "later",
                )
        for usage in self._usages:
            usage.num_tokens += more
        self._num_tokens = num_tokens

    def _reject(self, usage: Usage, limit: str, message: str) -> None:
        self._num_rejects[f"key_{limit}" if usage.scope else limit] += 1
        raise OverloadedError(message, retry_after_s=RETRY_AFTER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for usage in self._usages:
            usage.num_requests -= self._num_requests
            usage.num_tokens -= self._num_tokens
        self._num_requests = self._num_tokens = 0
