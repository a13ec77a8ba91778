"""Answers of `/v1/responses` that are made while nobody waits for them.

Owns their tasks, and their events for clients that follow them, now or later. What an answer is
made of is in `responses`, where it is kept in `response_store`. Their number is bounded by
admission: each holds its permit until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from aiohttp import web

from compiled_engine.errors import EngineError, OverloadedError
from compiled_engine.server.responses_protocol import ResponsesEvent
from compiled_engine.server.responses_stream import ResponseWriter
from compiled_engine.server.translation import encode_named_event

logger = logging.getLogger(__name__)

# Of all running answers together; half of what the store keeps.
MAX_EVENT_BYTES = 128 * 1024 * 1024


class EventBytes:
    """Counts the bytes of all events that are kept for running answers.

    Args:
        max_bytes: beyond which an answer fails.

    Attributes:
        num_bytes: kept now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def check(self) -> None:
        """Raises OverloadedError where they are too many."""
        if self.num_bytes > self._max_bytes:
            raise OverloadedError(
                f"events of running background answers take more than {self._max_bytes} bytes"
            )


class Job:
    """One answer on its way.

    Args:
        writer: makes the answer.
        keeps_events: clients may follow it.
        total: gets the bytes of its events while it runs.

    Attributes:
        writer: holds the answer so far.
        events: as they are sent, by their numbers; None where they are not kept.
    """

    def __init__(self, writer: ResponseWriter, *, keeps_events: bool, total: EventBytes) -> None:
        self.writer = writer
        self.events: list[bytes] | None = [] if keeps_events else None
        self._total = total
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._news = asyncio.Event()

    def run(self, work: AsyncGenerator[ResponsesEvent, None], end: Callable[[], None]) -> None:
        """Starts the task; called once.

        Args:
            work: makes the answer by the writer.
            end: called when the answer has its last state.
        """
        for event in self.writer.queue():
            self._add(event)
        self._task = asyncio.create_task(self._run(work, end), name=self.writer.response.id)

    async def _run(
        self, work: AsyncGenerator[ResponsesEvent, None], end: Callable[[], None]
    ) -> None:
        try:
            async with contextlib.aclosing(work):
                async for event in work:
                    self._add(event)
                    self._total.check()
        except asyncio.CancelledError:
            self._add(self.writer.cancelled())
        except EngineError as error:
            self._add(self.writer.failed(error))
        except Exception:
            logger.exception("a background answer failed")
            self._add(self.writer.failed(EngineError("internal error")))
        finally:
            self._is_over = True
            self._total.num_bytes -= sum(map(len, self.events or ()))
            self._tell()
            end()

    async def cancel(self) -> None:
        """Ends the task and waits until the answer has its last state."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    def _add(self, event: ResponsesEvent) -> None:
        if self.events is not None:
            data = encode_named_event(event)
            self.events.append(data)
            self._total.num_bytes += len(data)
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Events from number `start` on, up to the last, as they come."""
        assert self.events is not None
        while True:
            news = self._news
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self._is_over:
                return
            await news.wait()


class Jobs:
    """The running background answers; each is seen by its own API key only.

    Args:
        max_event_bytes: of events that running answers keep, together.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._running: dict[tuple[str, str], Job] = {}
        self._total = EventBytes(max_event_bytes)

    def get(self, owner: str, response_id: str) -> Job | None:
        """A running answer; None if there is none."""
        return self._running.get((owner, response_id))

    def start(
        self,
        owner: str,
        writer: ResponseWriter,
        work: AsyncGenerator[ResponsesEvent, None],
        *,
        keeps_events: bool,
        keep: Callable[[Job], None],
    ) -> Job:
        """Starts an answer.

        Args:
            owner: name of the API key.
            writer: makes the answer.
            work: has the writer do so.
            keeps_events: clients may follow it.
            keep: called when the answer has its last state.
        """
        key = (owner, writer.response.id)
        job = Job(writer, keeps_events=keeps_events, total=self._total)

        def end() -> None:
            del self._running[key]
            keep(job)

        self._running[key] = job
        job.run(work, end)
        return job

    async def close(self) -> None:
        """Cancels every running answer."""
        for job in list(self._running.values()):
            await job.cancel()


JOBS = web.AppKey("background_jobs", Jobs)


async def run_jobs(app: web.Application) -> AsyncIterator[None]:
    """Ends the background answers with the application."""
    yield
    await app[JOBS].close()
