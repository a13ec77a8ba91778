"""The host's part of a step: requests to rows, the inbox, the token bucket, records to events.

Owns which request sits in which row; the device owns everything else. `normal_loop` reads a step's
record before it launches the next step; `overlap_loop` launches first and reads one step later.
Both give the same tokens: the device never waits for what the host reads.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from compiled_engine.outbox import (
    COLUMN_CACHED,
    COLUMN_FLAGS,
    COLUMN_GEN,
    COLUMN_TOKEN,
    FLAG_EMITTED,
    FLAG_FINISHED,
    FLAG_FREE,
    HostRecord,
)
from compiled_engine.request import FinishReason, ModelLimits, Request, TokenEvent
from compiled_engine.sampler import Variant, build_param_inbox, variant_of
from compiled_engine.scheduler.advance import (
    COUNT_CACHED_PAGES,
    COUNT_ERRORS,
    COUNT_FREE_PAGES,
    COUNT_RESIDENT_ROWS,
    COUNT_RETRACTIONS,
    COUNT_STEP_TOKENS,
    COUNT_WAITING_ROWS,
    COUNT_WANTED_TOKENS,
)
from compiled_engine.scheduler.inbox import InboxBuilder, SubmitEntry
from compiled_engine.step import StepExecutor


@dataclass
class _Seat:
    """A request in a row, from submit until the row is FREE again."""

    request: Request
    row: int
    gen: int
    max_len: int
    stop_ids: tuple[int, ...]
    seed: int
    variant: Variant
    num_tokens: int = 0  # generated
    is_over: bool = False  # finished or aborted: no more events


@dataclass
class LoopStats:
    """Totals since start, and gauges of the newest record read."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_scheduler_errors: int = 0
    num_pages_active: int = 0
    num_pages_cached: int = 0
    num_pages_free: int = 0


class StepLoop:
    """Drives an executor.

    Args:
        executor: launches steps.
        limits: of the loaded model; rows end at `max_model_len`.
        eos_token_ids: end a row unless it ignores them.
        seed: seeds of requests without one come from here.
        is_overlapped: use `overlap_loop`.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: ModelLimits,
        *,
        eos_token_ids: tuple[int, ...],
        seed: int,
        is_overlapped: bool,
    ) -> None:
        self.executor = executor
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.is_overlapped = is_overlapped
        self.stats = LoopStats(num_pages_free=executor.shape.num_pages - 1)
        self.inbox = InboxBuilder(executor.shape)
        self._no_params = build_param_inbox(executor.shape, [])  # most steps submit nothing
        self._random = random.Random(seed)
        self._queue: deque[Request] = deque()
        self._free_rows = list(range(executor.shape.max_rows - 1, -1, -1))
        self._gens = [0] * executor.shape.max_rows
        self._seats: dict[int, _Seat] = {}  # by row
        self._seat_of: dict[int, _Seat] = {}  # by request id
        self._unstarted: dict[int, int] = {}  # row -> prompt tokens, until its first token
        self._arrival = 0
        self._newest: HostRecord | None = None
        self._unread: deque[int] = deque()  # places for prompts, by step launched and not read

    # --- requests -------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a validated request; it gets a row as soon as one is free."""
        self._queue.append(request)

    def abort(self, request_id: int) -> None:
        """Ends a request without further events; unknown or finished ids are ignored."""
        seat = self._seat_of.pop(request_id, None)
        if seat is None:
            self._queue = deque(r for r in self._queue if r.request_id != request_id)
        elif not seat.is_over:
            seat.is_over = True
            self.inbox.abort(seat.row, seat.gen)

    @property
    def has_work(self) -> bool:
        """A step would do something: requests wait, rows are in use, entries are on their way."""
        return bool(self._queue or self._seats) or not self.inbox.is_empty

    @property
    def num_running(self) -> int:
        """Requests that are being computed, as of the newest record."""
        return self._num_live - self._num_waiting_rows

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for a row, for pages, or retracted."""
        return len(self._queue) + self._num_waiting_rows

    @property
    def _num_live(self) -> int:
        return sum(not seat.is_over for seat in self._seats.values())

    @property
    def _num_waiting_rows(self) -> int:
        if self._newest is None:
            return 0
        return min(self._num_live, int(self._newest.counts[COUNT_WAITING_ROWS]))

    # --- the two loops --------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Launches one step and returns the events of what was read back."""
        return self.overlap_loop() if self.is_overlapped else self.normal_loop()

    def normal_loop(self) -> list[TokenEvent]:
        """Launch, then read that step's record: the plain twin."""
        self._launch()
        return self._read()

    def overlap_loop(self) -> list[TokenEvent]:
        """Launch, then read the record of the step before."""
        self._launch()
        return self._read() if self.executor.outbox.num_unread > 1 else []

    def drain(self) -> list[TokenEvent]:
        """Reads every record still unread, without launching."""
        events: list[TokenEvent] = []
        while self.executor.outbox.num_unread:
            events.extend(self._read())
        return events

    # --- launch ---------------------------------------------------------------------------

    def _launch(self) -> None:
        self._seat_requests()
        inbox, applied = self.inbox.take()
        submitted = [self._seats[entry.row] for entry in applied if isinstance(entry, SubmitEntry)]
        entries = [(s.row, s.request.params, s.seed, s.stop_ids) for s in submitted]
        param_inbox = (
            build_param_inbox(self.executor.shape, entries) if entries else self._no_params
        )
        variant = max((s.variant for s in self._seats.values()), default=Variant.GREEDY)
        num_tokens = self._choose_num_tokens()
        self.executor.launch(inbox, param_inbox, num_tokens, variant)
        self._unread.append(max(0, num_tokens - len(self._seats)))
        self.stats.num_steps += 1

    def _seat_requests(self) -> None:
        """Gives free rows to queued requests, in order of priority, then arrival."""
        if not (self._queue and self._free_rows):
            return
        if len({r.priority for r in self._queue}) > 1:
            self._queue = deque(sorted(self._queue, key=lambda r: r.priority))
        while self._queue and self._free_rows:
            self._seat(self._queue.popleft(), self._free_rows.pop())

    def _seat(self, request: Request, row: int) -> None:
        params, prompt = request.params, request.prompt_token_ids
        longest = min(self.limits.max_model_len, self.limits.max_total_tokens)
        room = longest - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = params.stop_token_ids
        if not params.ignore_eos:
            stop_ids = tuple(dict.fromkeys((*self.eos_token_ids, *stop_ids)))
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        self._gens[row] += 1
        self._arrival += 1
        seat = _Seat(
            request=request,
            row=row,
            gen=self._gens[row],
            max_len=len(prompt) + max_new,
            stop_ids=stop_ids,
            seed=seed,
            variant=variant_of(params),
        )
        self._seats[row] = seat
        self._seat_of[request.request_id] = seat
        self._unstarted[row] = len(prompt)
        self.inbox.submit(
            row=row,
            gen=seat.gen,
            arrival=self._arrival,
            priority=request.priority,
            salt=salt_of(request.cache_salt),
            prompt=prompt,
            max_len=seat.max_len,
        )

    def _choose_num_tokens(self) -> int:
        """The step's budget: a bucket for what the device could use, from numbers one step old.

        Whatever is chosen, the device's plan is right. Too small delays, too large pads: resident
        rows get a place each, unserved prompts what they still want, waiting prompts their length.
        """
        if self.executor.reads_plans:
            return self.executor.buckets[-1]
        wanted = len(self._seats)
        if self._newest is not None:
            counts = self._newest.counts
            wanted += int(counts[COUNT_WANTED_TOKENS] - counts[COUNT_STEP_TOKENS])
            resident = int(counts[COUNT_RESIDENT_ROWS])
        else:
            resident = 0
        num_waiting = len(self._unstarted) if resident < len(self._seats) else 0
        if num_waiting:
            wanted += sum(self._unstarted.values())
        # Steps launched and not read yet have served part of that already.
        wanted = max(len(self._seats), wanted - sum(self._unread))
        return self.executor.bucket_of(wanted)

    # --- read -----------------------------------------------------------------------------

    def _read(self) -> list[TokenEvent]:
        record = self.executor.outbox.read()
        self._unread.popleft()
        self._newest = record
        counts, stats = record.counts, self.stats
        stats.num_retractions = int(counts[COUNT_RETRACTIONS])
        stats.num_scheduler_errors = int(counts[COUNT_ERRORS])
        stats.num_pages_cached = int(counts[COUNT_CACHED_PAGES])
        stats.num_pages_free = int(counts[COUNT_FREE_PAGES]) - stats.num_pages_cached
        stats.num_pages_active = self.executor.shape.num_pages - 1 - int(counts[COUNT_FREE_PAGES])
        events = []
        for row, seat in list(self._seats.items()):
            columns = record.rows[row]
            if columns[COLUMN_GEN] != seat.gen:
                continue  # the submit has not reached the device
            event = self._event_of(seat, columns)
            if event is not None:
                events.append(event)
            if columns[COLUMN_FLAGS] & FLAG_FREE:
                self._leave(seat)
        return events

    def _event_of(self, seat: _Seat, columns: np.ndarray) -> TokenEvent | None:
        flags = int(columns[COLUMN_FLAGS])
        if seat.is_over or not flags & FLAG_EMITTED:
            return None
        token = int(columns[COLUMN_TOKEN])
        cached = int(columns[COLUMN_CACHED])
        if seat.num_tokens == 0:
            self._unstarted.pop(seat.row, None)
            self.stats.num_prompt_tokens += len(seat.request.prompt_token_ids)
            self.stats.num_cached_tokens += cached
        seat.num_tokens += 1
        self.stats.num_generated_tokens += 1
        finish_reason: FinishReason | None = None
        if flags & FLAG_FINISHED:
            seat.is_over = True
            finish_reason = "stop" if token in seat.stop_ids else "length"
        return TokenEvent(
            request_id=seat.request.request_id,
            token_ids=[token],
            finish_reason=finish_reason,
            num_cached_tokens=cached,
        )

    def _leave(self, seat: _Seat) -> None:
        assert seat.is_over, f"row {seat.row} is free while its request runs"
        del self._seats[seat.row]
        self._unstarted.pop(seat.row, None)
        self._seat_of.pop(seat.request.request_id, None)
        self._free_rows.append(seat.row)


def salt_of(text: str) -> int:
    """A request's cache salt as the scheduler's non-negative integer; the empty one is 0."""
    if not text:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
