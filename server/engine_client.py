"""The server's only door to the engine: submit, read tokens, abort, see its health.

Owns the `EngineClient` interface and its implementation over a ZeroMQ pair socket, with the watch
over the engine process. Does not own the process itself (the CLI starts and ends it) nor the frames
(`ipc`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq.asyncio
from zmq.constants import SocketType

from compiled_engine.errors import ConflictError, EngineError, EngineUnavailableError
from compiled_engine.ipc import (
    ClientFrame,
    ControlAction,
    ControlCall,
    ControlResult,
    EngineFrame,
    EngineStatus,
)
from compiled_engine.request import ModelLimits, Request, TokenEvent
from compiled_engine.server.mailbox import Mailbox
from compiled_engine.start_times import StartPhase

logger = logging.getLogger(__name__)

# A death must reach waiting clients within one second.
WATCH_INTERVAL_S = 0.2
# An engine that does well says something at least four times a second.
SHORT_SILENCE_S = 1.0
CLOSE_LINGER_MS = 500
# Writing a long trace takes a while.
CONTROL_TIMEOUT_S = 120.0


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

    @property
    def queue_s(self) -> float | None:
        """Seconds the request waited for a row; None until it has one."""
        ...

    @property
    def grammar_s(self) -> float | None:
        """Seconds it waited for its grammar and for masks so far; None without any."""
        ...

    @property
    def num_retractions(self) -> int:
        """How often its pages were taken back so far."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """The stream itself."""
        ...

    async def __anext__(self) -> TokenEvent:
        """Waits for the next event; a cancelled wait aborts the request."""
        ...

    def listen(self, listener: Callable[[TokenEvent], bool]) -> None:
        """Offers each event to `listener` first, while the reader waits in `__anext__`.

        Args:
            listener: takes an event, or returns False to leave it to the reader; called where the
                event comes in. The reader raises what it raises.
        """
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

    @property
    def step_age_s(self) -> float:
        """Age of the last finished step while there is work, or of its last sign of life."""
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

    def cancel(self, request_id: int, error: EngineError) -> None:
        """As `abort`, but its stream raises `error`."""
        ...

    async def control(
        self, action: ControlAction, *, folder: str = "", num_steps: int = 0
    ) -> ControlResult:
        """Has the engine do something between two steps; see `ipc.ControlCall`.

        Raises:
            ConflictError: it cannot be done in the engine's present state; says why.
            EngineUnavailableError: the engine is not ready, or died meanwhile.
        """
        ...

    async def close(self) -> None:
        """Ends every stream, tells the engine to shut down and closes the connection."""
        ...


class IpcEngineClient:
    """`EngineClient` over a ZeroMQ pair socket; the API process binds, the engine connects.

    Args:
        endpoint: `ipc://` address from `ipc.new_endpoint`.
        process: the engine process, watched five times a second.
        timeout_s: silence after which the engine counts as hung, and as dead after twice that. It
            is counted only from the engine's first frame on, since before that the process is
            still importing. A step that takes longer than this counts too.
    """

    def __init__(self, endpoint: str, process: EngineProcess, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._process = process
        self._timeout_s = timeout_s
        self._status = EngineStatus()
        self.start_phases: list[StartPhase] = []  # of the engine's last start, once it is ready
        self._limits: ModelLimits | None = None
        self._death: str | None = None
        self._hang: str | None = None
        # Seconds without a frame; None before the first one.
        self._silence_s: float | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._call_ids = itertools.count(1)
        self._controls: dict[int, asyncio.Future[ControlResult]] = {}
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

    @property
    def is_hung(self) -> bool:
        """Whether the engine process is there and says nothing, or gets on with no step."""
        return self._hang is not None

    @property
    def step_age_s(self) -> float:
        """See `EngineClient.step_age_s`."""
        silence_s = self._silence_s or 0.0
        return silence_s if silence_s > SHORT_SILENCE_S else self._status.step_age_s

    @property
    def num_unread(self) -> int:
        """Requests whose newest tokens their reader has not taken yet."""
        return sum(mailbox.is_unread for mailbox in self._mailboxes.values())

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
        self._require_ready()
        mailbox = Mailbox(partial(self.abort, request.request_id))
        self._mailboxes[request.request_id] = mailbox
        self._outgoing.submits.append(request)
        self._schedule_flush()
        return mailbox

    def _require_ready(self) -> None:
        if not self.is_ready:
            raise EngineUnavailableError(
                self.dead_reason or f"the engine is not ready: {self._status.phase}"
            )

    def abort(self, request_id: int) -> None:
        """See `EngineClient.abort`."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is None:
            return
        mailbox.end()
        self._send_abort(request_id)

    def cancel(self, request_id: int, error: EngineError) -> None:
        """See `EngineClient.cancel`."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.fail(error)
            self._send_abort(request_id)

    def _send_abort(self, request_id: int) -> None:
        if self._death is None:
            self._outgoing.aborts.append(request_id)
            self._schedule_flush()

    async def control(
        self, action: ControlAction, *, folder: str = "", num_steps: int = 0
    ) -> ControlResult:
        """See `EngineClient.control`."""
        self._require_ready()
        call = ControlCall(
            call_id=next(self._call_ids), action=action, folder=folder, num_steps=num_steps
        )
        done = asyncio.get_running_loop().create_future()
        self._controls[call.call_id] = done
        self._outgoing.controls.append(call)
        self._schedule_flush()
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                result = await done
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"the engine did not do it within {CONTROL_TIMEOUT_S:g} s"
            ) from error
        finally:
            del self._controls[call.call_id]
        if result.refusal is not None:
            raise ConflictError(result.refusal)
        return result

    async def reconnect(self) -> None:
        """Forgets a dead engine and waits at the same address for one that was started anew."""
        await self._disconnect(linger_ms=0)
        self._death = self._hang = self._silence_s = self._limits = None
        self._status = EngineStatus()
        self._outgoing = ClientFrame()
        self._unsent.clear()
        await self.start()

    async def close(self) -> None:
        """See `EngineClient.close`."""
        if self._socket is None:
            return
        self._outgoing.shutdown = True
        self._flush()
        if self._sender is not None:
            # A dead engine never takes the frame: do not wait for it for long.
            await asyncio.wait([self._sender], timeout=CLOSE_LINGER_MS / 1000)
        await self._disconnect(linger_ms=CLOSE_LINGER_MS)
        self._fail_all("the server is shutting down")

    async def _disconnect(self, *, linger_ms: int) -> None:
        tasks = [*self._tasks, *([self._sender] if self._sender else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sender = None
        socket, self._socket = self._socket, None
        socket.close(linger=linger_ms)
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
        is_empty = not (frame.submits or frame.aborts or frame.controls or frame.shutdown)
        if self._socket is None or is_empty:
            return
        self._unsent.append(self._encoder.encode(frame))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="engine-sender")

    async def _send(self) -> None:
        while self._unsent:
            await self._socket.send(self._unsent.popleft(), copy=False)

    async def _read(self) -> None:
        while True:
            if not self.take_frame(await self._socket.recv()):
                return

    def take_frame(self, data: bytes) -> bool:
        """Takes an encoded frame; returns False if it cannot be read, and then nothing follows."""
        try:
            frame = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._die(f"the engine sent a frame that cannot be read: {error}")
            return False
        self._silence_s = 0.0
        self._take(frame)
        return True

    def _take(self, frame: EngineFrame) -> None:
        if frame.status is not None:
            self._status = frame.status
            if frame.status.limits is not None:
                self._limits = frame.status.limits
        if frame.start:
            self.start_phases = frame.start
        for request_id, queue_s in frame.queue_s.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.queue_s = queue_s
        for request_id, grammar_s in frame.grammar_s.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.grammar_s = grammar_s
        for request_id, num_times in frame.retracted.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.num_retractions += num_times
        for result in frame.control_results:
            done = self._controls.get(result.call_id)
            if done is not None and not done.done():
                done.set_result(result)
        # One by one: the first token is on its way before the last one's event is made.
        for event in itertools.chain(frame.events, frame.tokens or ()):
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
            if self._death is not None:
                return

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
        if hang is not None and self.step_age_s > 2 * self._timeout_s:
            self._die(f"{hang}: it is given up")

    def _abort_all(self, reason: str) -> None:
        self._outgoing.aborts.extend(self._mailboxes)
        self._schedule_flush()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(EngineUnavailableError(reason))
        for done in self._controls.values():
            if not done.done():
                done.set_exception(EngineUnavailableError(reason))

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
