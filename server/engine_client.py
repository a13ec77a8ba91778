"""The server's only door to the engine: submit, read tokens, abort, see its health.

Owns the `EngineClient` interface and its implementation over a ZeroMQ pair socket, with the watch
over the engine process. Does not own the process itself (the CLI starts and ends it) nor the frames
(`ipc`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
import zmq.asyncio
from zmq.constants import SocketType

from compiled_engine.errors import EngineUnavailableError
from compiled_engine.ipc import ClientFrame, EngineFrame, EngineStatus
from compiled_engine.request import ModelLimits, Request, TokenEvent

logger = logging.getLogger(__name__)

# A death must reach waiting clients within one second.
WATCH_INTERVAL_S = 0.2
CLOSE_LINGER_MS = 500


class EngineProcess(Protocol):
    """What is asked of the engine process; `multiprocessing.Process` fits."""

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        ...

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        ...


class TokenStream(Protocol):
    """Token events of one request, up to and including the one with a finish reason."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """The stream itself."""
        ...

    async def __anext__(self) -> TokenEvent:
        """Waits for the next event; a cancelled wait aborts the request."""
        ...

    async def aclose(self) -> None:
        """Ends the stream; aborts the request if it still runs. May be called twice."""
        ...


class EngineClient(Protocol):
    """What the server needs from an engine, wherever it runs."""

    @property
    def limits(self) -> ModelLimits | None:
        """Limits of the loaded model; None until it is loaded."""
        ...

    @property
    def status(self) -> EngineStatus:
        """The latest status the engine sent."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        ...

    @property
    def dead_reason(self) -> str | None:
        """Why the engine cannot work (dead or hung), else None."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether it can never work again; a hung engine may come back, a dead one does not."""
        ...

    async def start(self) -> None:
        """Opens the connection. Called once, in the running event loop, before anything else."""
        ...

    def submit(self, request: Request) -> TokenStream:
        """Hands the request to the engine at once and returns its events.

        Closing the stream early, or cancelling a task that waits on it, aborts the request.

        Raises:
            EngineUnavailableError: the engine is not ready, dead or hung; also raised by the stream
                when that happens later.
        """
        ...

    def abort(self, request_id: int) -> None:
        """Stops a request and ends its stream without a further event; unknown ids are fine."""
        ...

    async def close(self) -> None:
        """Ends every stream, tells the engine to shut down and closes the connection."""
        ...


class _Mailbox:
    """Events of one request that its reader has not taken yet, merged into at most one.

    A reader slower than the engine therefore costs at most the ids of its own answer.
    """

    def __init__(self, client: IpcEngineClient, request_id: int) -> None:
        self._client = client
        self._request_id = request_id
        self._pending: TokenEvent | None = None
        self._error: str | None = None
        self._is_over = False
        self._wakeup: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Adds one event; called by the client's reader."""
        earlier = self._pending
        if earlier is not None:
            earlier.token_ids.extend(event.token_ids)
            event = TokenEvent(
                request_id=event.request_id,
                token_ids=earlier.token_ids,
                finish_reason=event.finish_reason,
                num_cached_tokens=max(earlier.num_cached_tokens, event.num_cached_tokens),
                error=event.error,
            )
        self._pending = event
        self._wake()

    def fail(self, reason: str) -> None:
        """Makes the reader raise EngineUnavailableError once it has taken what is there."""
        self._error = reason
        self._wake()

    def end(self) -> None:
        """Ends the stream without a further event."""
        self._pending = None
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def __aiter__(self) -> _Mailbox:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._pending is None:
            if self._is_over:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_over = True
                raise EngineUnavailableError(self._error)
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
            self._client.abort(self._request_id)


class IpcEngineClient:
    """`EngineClient` over a ZeroMQ pair socket; the API process binds, the engine connects.

    Args:
        endpoint: `ipc://` address from `ipc.new_endpoint`.
        process: the engine process, watched five times a second.
        timeout_s: silence after which the engine counts as hung. It is counted only from the
            engine's first frame on, since before that the process is still importing. A step that
            takes longer than this counts too.
    """

    def __init__(self, endpoint: str, process: EngineProcess, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._process = process
        self._timeout_s = timeout_s
        self._status = EngineStatus()
        self._limits: ModelLimits | None = None
        self._death: str | None = None
        self._hang: str | None = None
        # Seconds without a frame; None before the first one.
        self._silence_s: float | None = None
        self._mailboxes: dict[int, _Mailbox] = {}
        self._outgoing = ClientFrame()
        self._is_flush_due = False
        self._unsent: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineFrame)
        self._context: zmq.asyncio.Context | None = None
        self._socket: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sender: asyncio.Task[None] | None = None

    @property
    def limits(self) -> ModelLimits | None:
        """Limits of the loaded model; None until it is loaded."""
        return self._limits

    @property
    def status(self) -> EngineStatus:
        """The latest status the engine sent."""
        return self._status

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return (
            self.dead_reason is None
            and self._status.phase == "ready"
            and self._limits is not None
            and self._socket is not None
        )

    @property
    def dead_reason(self) -> str | None:
        """Why the engine cannot work (dead or hung), else None."""
        return self._death or self._hang

    @property
    def is_dead(self) -> bool:
        """Whether the engine process is gone for good."""
        return self._death is not None

    async def start(self) -> None:
        """Binds the socket and starts the reader and the watch."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.PAIR)
        # No high-water mark: what is in flight is bounded by admission, and a full queue would
        # otherwise block the reader behind one slow step.
        self._socket.set_hwm(0)
        self._socket.bind(self._endpoint)
        self._tasks = [
            asyncio.create_task(self._read(), name="engine-reader"),
            asyncio.create_task(self._watch(), name="engine-watch"),
        ]

    def submit(self, request: Request) -> TokenStream:
        """See `EngineClient.submit`."""
        if not self.is_ready:
            raise EngineUnavailableError(
                self.dead_reason or f"the engine is not ready: {self._status.phase}"
            )
        mailbox = _Mailbox(self, request.request_id)
        self._mailboxes[request.request_id] = mailbox
        self._outgoing.submits.append(request)
        self._schedule_flush()
        return mailbox

    def abort(self, request_id: int) -> None:
        """See `EngineClient.abort`."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is None:
            return
        mailbox.end()
        if self._death is None:
            self._outgoing.aborts.append(request_id)
            self._schedule_flush()

    async def close(self) -> None:
        """See `EngineClient.close`."""
        if self._socket is None:
            return
        self._outgoing.shutdown = True
        self._flush()
        if self._sender is not None:
            # A dead engine never takes the frame: do not wait for it for long.
            await asyncio.wait([self._sender], timeout=CLOSE_LINGER_MS / 1000)
        tasks = [*self._tasks, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all("the server is shutting down")
        socket, self._socket = self._socket, None
        socket.close(linger=CLOSE_LINGER_MS)
        assert self._context is not None
        self._context.term()

    def _schedule_flush(self) -> None:
        """One frame carries everything asked for in this turn of the event loop."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        frame, self._outgoing = self._outgoing, ClientFrame()
        if self._socket is None or not (frame.submits or frame.aborts or frame.shutdown):
            return
        self._unsent.append(self._encoder.encode(frame))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="engine-sender")

    async def _send(self) -> None:
        while self._unsent:
            await self._socket.send(self._unsent.popleft(), copy=False)

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                frame = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                self._die(f"the engine sent a frame that cannot be read: {error}")
                return
            self._silence_s = 0.0
            self._take(frame)

    def _take(self, frame: EngineFrame) -> None:
        if frame.status is not None:
            self._status = frame.status
            if frame.status.limits is not None:
                self._limits = frame.status.limits
        for event in (*frame.events, *(frame.tokens or ())):
            # Events of requests that were aborted meanwhile find no mailbox.
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                if event.finish_reason is not None:
                    del self._mailboxes[event.request_id]
                mailbox.put(event)
        if frame.fatal is not None:
            self._die(f"the engine stopped: {frame.fatal}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if not self._process.is_alive():
                self._die(f"the engine process has ended (exit code {self._process.exitcode})")
                return
            self._check_hang()

    def _check_hang(self) -> None:
        """Counts silence in watch intervals, so that a stopped API process blames nobody."""
        if self._silence_s is None:
            return
        silence_s, self._silence_s = self._silence_s, self._silence_s + WATCH_INTERVAL_S
        hang = None
        if silence_s > self._timeout_s:
            hang = f"the engine process has been silent for more than {self._timeout_s:g} s"
            # Its last word on this is as old as the silence.
            self._status.step_age_s = max(self._status.step_age_s, silence_s)
        elif self._status.step_age_s > self._timeout_s:
            hang = (
                f"the engine has finished no step for {self._status.step_age_s:.1f} s, which is "
                f"more than {self._timeout_s:g} s"
            )
        if hang is not None and self._hang is None:
            logger.error("%s; requests get 503 until it answers again", hang)
            self._abort_all(hang)
        elif hang is None and self._hang is not None:
            logger.warning("the engine process answers again")
        self._hang = hang

    def _abort_all(self, reason: str) -> None:
        self._outgoing.aborts.extend(self._mailboxes)
        self._schedule_flush()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(reason)

    def _die(self, reason: str) -> None:
        if self._death is None:
            logger.error("%s", reason)
            self._death = reason
            self._fail_all(reason)


@contextlib.asynccontextmanager
async def running_client(client: EngineClient) -> AsyncIterator[EngineClient]:
    """Starts the client and closes it at the end."""
    await client.start()
    try:
        yield client
    finally:
        await client.close()
