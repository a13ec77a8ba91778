"""The events of one request between the engine client, which puts them in, and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from compiled_engine.errors import EngineError
from compiled_engine.request import TokenEvent


class Mailbox:
    """Events of one request that its reader has not taken yet, merged into at most one.

    A reader slower than the engine therefore costs at most the ids of its own answer.

    A listener, if there is one, is offered each event first, while the reader waits.

    Args:
        abort: called once by a reader that leaves before the end.

    Attributes:
        queue_s: seconds the request waited for a row; None until it has one.
        grammar_s: seconds it waited for its grammar and for masks so far; None without any.
        num_retractions: how often its pages were taken back so far.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._pending: TokenEvent | None = None
        self._error: Exception | None = None
        self._listener: Callable[[TokenEvent], bool] | None = None
        self.queue_s: float | None = None
        self.grammar_s: float | None = None
        self.num_retractions = 0
        self._is_over = False
        self._is_failed = False
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def is_unread(self) -> bool:
        """Whether there is an event that the reader has not taken."""
        return self._pending is not None

    def put(self, event: TokenEvent) -> None:
        """Adds one event; called by the client's reader."""
        # A reader that waits has dealt with every event so far.
        wakeup, listener = self._wakeup, self._listener
        if listener is not None and wakeup is not None and not wakeup.done():
            try:
                if listener(event):
                    return
            except Exception as error:  # the reader's own, so it is the one to raise it
                self._error = error
                self._wake()
                return
        earlier = self._pending
        if earlier is not None:
            earlier.token_ids.extend(event.token_ids)
            event = TokenEvent(
                request_id=event.request_id,
                token_ids=earlier.token_ids,
                finish_reason=event.finish_reason,
                num_cached_tokens=max(earlier.num_cached_tokens, event.num_cached_tokens),
                error=event.error,
                is_refusal=event.is_refusal,
                logprobs=earlier.logprobs + event.logprobs,
                prompt_logprobs=earlier.prompt_logprobs + event.prompt_logprobs,
            )
        self._pending = event
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Makes the reader raise `error` once it has taken what is there."""
        self._error = error
        self._is_failed = True
        self._wake()

    def end(self) -> None:
        """Ends the stream without a further event."""
        self._pending = None
        self._is_over = True
        self._wake()

    def listen(self, listener: Callable[[TokenEvent], bool]) -> None:
        """See `TokenStream.listen`."""
        self._listener = listener

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._pending is None:
            if self._is_over:
                raise StopAsyncIteration
            if self._error is not None:
                # After a listener's error the request still runs.
                self._is_over = self._is_failed
                raise self._error
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._wakeup = None
        event, self._pending = self._pending, None
        self._is_over = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Aborts the request unless it has ended."""
        if not self._is_over:
            self._abort()
