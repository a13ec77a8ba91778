"""The host's part of a step: requests to rows, the inbox, the token bucket, records to events.

Owns which request sits in which row; the device owns everything else. `normal_loop` reads a step's
record before it launches the next step; `overlap_loop` launches first and reads one step later.
Both give the same tokens: the device never waits for what the host reads. While grammars run, the
overlapped loop reads first too, since the next masks follow from the tokens (`grammar_loop`).
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from compiled_engine.grammar import GrammarService
from compiled_engine.grammar_rows import GrammarRows
from compiled_engine.logprob_rows import (
    NOTHING,
    LogprobRows,
    StepLogprobs,
    score_from,
)
from compiled_engine.loop_stats import LoopStats
from compiled_engine.outbox import (
    COLUMN_CACHED,
    COLUMN_FLAGS,
    COLUMN_GEN,
    COLUMN_TOKEN,
    FLAG_EMITTED,
    FLAG_FAILED,
    FLAG_FINISHED,
    FLAG_FREE,
    HostRecord,
    RingOutbox,
    failure_of,
)
from compiled_engine.prefix_guess import PrefixGuess
from compiled_engine.queue_times import QueueTimes
from compiled_engine.request import FinishReason, ModelLimits, Request, TokenEvent
from compiled_engine.sampler import ParamInbox, RowMask, Variant, build_param_inbox, variant_of
from compiled_engine.scheduler.advance import (
    COUNT_DECODE_ROWS,
    COUNT_RESIDENT_ROWS,
    COUNT_WAITING_ROWS,
    NUM_COUNTS,
)
from compiled_engine.scheduler.inbox import Inbox, InboxBuilder, MaskEntry, SubmitEntry
from compiled_engine.scheduler.keys import salt_of
from compiled_engine.scheduler.prefix import forget_all
from compiled_engine.seats import Seat, SeatColumns
from compiled_engine.step import StepExecutor
from compiled_engine.step_choice import Seen, StepChoice
from compiled_engine.step_key import StepKey
from compiled_engine.step_times import StepTimes
from compiled_engine.token_batch import TokenBatch

# Steps of one loop on the device at most: how long a new request can wait for its end.
LOOP_STEPS = 32
# The later ones can do all that the earlier ones can.
_VARIANTS = tuple(reversed(Variant))
# What a step brings the device.
_Entries = tuple[Inbox, ParamInbox, list[RowMask]]
# The last fields of a `TokenBatch`: by request id, log probabilities and what was forced.
_More = tuple[dict[int, bytes], dict[int, bytes], dict[int, tuple[int, ...]]]


class _Launched(NamedTuple):
    """A step that was launched and whose record was not read yet."""

    key: StepKey
    num_prompt_places: int
    at: float  # seconds, host clock


class StepLoop:
    """Drives an executor.

    Args:
        executor: launches steps.
        limits: of the loaded model; rows end at `max_model_len`.
        eos_token_ids: end a row unless it ignores them.
        seed: seeds of requests without one come from here.
        is_overlapped: use `overlap_loop`.
        step_times: limits the time of mixed steps; None does not.
        loops_on_device: use `device_loop`.
        grammars: compiles grammars; None refuses requests that have one.
    """

    def __init__(
        self,
        executor: StepExecutor,
        limits: ModelLimits,
        *,
        eos_token_ids: tuple[int, ...],
        seed: int,
        is_overlapped: bool,
        step_times: StepTimes | None = None,
        loops_on_device: bool = False,
        grammars: GrammarService | None = None,
    ) -> None:
        self.executor = executor
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.is_overlapped = is_overlapped
        self.stats = LoopStats(num_pages_free=executor.shape.num_pages - 1)
        self.inbox = InboxBuilder(executor.shape)
        self._grammars = GrammarRows(grammars, executor.shape.max_forced)
        self._logprobs = LogprobRows()
        # Most steps hand nothing to the device.
        nobody = build_param_inbox(executor.shape, [])
        self._no_entries: _Entries = (self.inbox.take()[0], nobody, [])
        self._random = random.Random(seed)
        self._queue: deque[Request] = deque()
        self._free_rows = list(range(executor.shape.max_rows - 1, -1, -1))
        self._gens = [0] * executor.shape.max_rows
        self._columns = SeatColumns(executor.shape.max_rows)
        self._seats: dict[int, Seat] = {}  # by row
        self._num_live = 0  # seats whose request is not over
        self._num_by_variant = [0] * len(Variant)  # seats
        self._variant = Variant.GREEDY  # serves every seat
        self._seat_of: dict[int, Seat] = {}  # by request id
        self._unstarted: dict[int, int] = {}  # row -> prompt tokens, until its first token
        shape = executor.shape
        self._guess = PrefixGuess(is_caching=shape.prefix_caching, page_size=shape.page_size)
        self.choice = StepChoice(executor, self._guess, step_times)
        self.queue_times = QueueTimes()
        self._arrival = 0
        self._counts = [0] * NUM_COUNTS  # of the newest record
        self._unread: deque[_Launched] = deque()  # steps launched and not read
        self._loops_on_device = loops_on_device
        self._read_at = 0.0
        self._is_looping = False

    # --- requests -------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a validated request; it gets a row as soon as one is free.

        One with a grammar is queued once that is compiled, or refused; see `take_refusals`.
        """
        self.queue_times.arrive(request.request_id)
        if request.params.is_masked:
            self._grammars.begin(request)
        else:
            self._queue.append(request)

    def take_refusals(self) -> list[TokenEvent]:
        """Events of requests that failed since the last call."""
        refusals = self._grammars.take_refusals()
        for event in refusals:
            self.queue_times.forget(event.request_id)
        return refusals

    def take_grammar_waits(self) -> dict[int, float]:
        """Request id -> seconds waited for a grammar and masks so far, where that changed."""
        return self._grammars.take_waits()

    def abort(self, request_id: int) -> None:
        """Ends a request without further events; unknown or finished ids are ignored."""
        self.queue_times.forget(request_id)
        if self._grammars.forget(request_id):
            return
        seat = self._seat_of.pop(request_id, None)
        if seat is None:
            self._queue = deque(r for r in self._queue if r.request_id != request_id)
        elif not seat.is_over:
            self._end(seat)
            self.inbox.abort(seat.row, seat.gen)

    def rows_in_use(self) -> dict[int, int]:
        """Request id -> row of the requests that have one and go on, oldest first."""
        return {n: seat.row for n, seat in self._seat_of.items() if not seat.is_over}

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; no request may be running."""
        assert not self.has_work, "requests are running: the prefix cache is in use"
        self.drain()  # what was launched for the last of them must not publish behind our back
        forget_all(self.executor.state.groups[0])
        self._guess.clear()

    @property
    def has_work(self) -> bool:
        """A step would do something: requests wait, rows are in use, entries are on their way."""
        is_waiting = bool(self._queue or self._seats or self._grammars.has_work)
        return is_waiting or not self.inbox.is_empty

    @property
    def num_running(self) -> int:
        """Requests that are being computed, as of the newest record."""
        return self._num_live - self._num_waiting_rows

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for a row, for pages, or retracted."""
        return len(self._queue) + self._grammars.num_compiling + self._num_waiting_rows

    @property
    def _num_waiting_rows(self) -> int:
        return min(self._num_live, self._counts[COUNT_WAITING_ROWS])

    # --- the two loops --------------------------------------------------------------------

    def step(self) -> TokenBatch:
        """Launches one step and returns the tokens of what was read back."""
        if self._grammars.num_compiling:
            for request in self._grammars.take_ready():
                self.queue_times.arrive(request.request_id)
                self._queue.append(request)
            if not (self._queue or self._seats or self._is_looping):  # nothing to launch
                if self.executor.outbox.num_unread:
                    return self._read()
                self.executor.before_launch()  # it may take up what was compiled meanwhile
                self._grammars.wait_for_compile()
                return TokenBatch()
        if self._loops_on_device:
            return self.device_loop()
        return self.overlap_loop() if self.is_overlapped else self.normal_loop()

    def normal_loop(self) -> TokenBatch:
        """Launch, then read that step's record: the plain twin."""
        self._launch()
        return self._read()

    def overlap_loop(self) -> TokenBatch:
        """Launch, then read the record of the step before."""
        if self._grammars.awake:
            return self.grammar_loop()
        self._launch()
        return self._read() if self.executor.outbox.num_unread > 1 else TokenBatch()

    def grammar_loop(self) -> TokenBatch:
        """Read, then launch: one step stays in flight between two calls, with all masks there."""
        tokens = self._read() if self.executor.outbox.num_unread else TokenBatch()
        self._launch()
        return tokens

    def device_loop(self) -> TokenBatch:
        """Lets the device repeat steady decode steps; else as `overlap_loop`."""
        if self._is_looping:
            tokens = self._read_loop()
            if tokens is not None:
                return tokens
        if not self._is_steady():
            return self.overlap_loop()
        if self.executor.outbox.num_unread:
            return self._read()  # a loop starts with nothing unread
        key = self.executor.key_of(self._num_live, self._variant, is_mixed=False)
        self._is_looping = self._loops_on_device = self.executor.launch_loop(
            key, max_steps=LOOP_STEPS, has_waiting=self.num_waiting > 0
        )
        return TokenBatch()

    def drain(self) -> list[TokenEvent]:
        """Reads every record still unread, without launching."""
        events: list[TokenEvent] = []
        while self.executor.outbox.num_unread:
            read = self._read_loop if self._is_looping else self._read
            events.extend(read() or ())
        return events

    def _is_steady(self) -> bool:
        """All that runs is decoding, and the host has nothing to hand to the device."""
        if not self._num_live or not self.inbox.is_empty:
            return False
        if self._grammars.awake or self._logprobs.rows:
            return False
        counts = self._counts
        is_decoding = counts[COUNT_DECODE_ROWS] == counts[COUNT_RESIDENT_ROWS] > 0
        is_all_started = len(self._unstarted) == counts[COUNT_WAITING_ROWS]
        return is_decoding and is_all_started and not (self._queue and self._free_rows)

    def _read_loop(self) -> TokenBatch | None:
        """Tokens of the running loop's next record; None once it has ended."""
        executor = self.executor
        assert isinstance(executor.outbox, RingOutbox)
        assert executor.loop_control is not None
        has_news = self._grammars.awake or not self.inbox.is_empty
        if has_news or (self._queue and self._free_rows):
            executor.loop_control.interrupt()
        record = executor.outbox.read_loop()
        if record is None:
            self._is_looping = False
            return None
        self.stats.num_steps += 1
        return self._take_record(record)

    # --- launch ---------------------------------------------------------------------------

    def _launch(self) -> None:
        if self._queue:
            self._seat_requests()
        if self._grammars.awake:
            self._collect_masks()
        has_entries = not self.inbox.is_empty
        inbox, param_inbox, masks = self._take_entries() if has_entries else self._no_entries
        key = self._choose_step()
        if self._grammars.awake:
            key = key._replace(is_masked=True)
        if self._logprobs.rows:
            key = self._logprobs.extend(key)
        self.executor.launch(inbox, param_inbox, key, has_entries=has_entries, masks=masks)
        spare = max(0, key.num_tokens - self._num_live)
        self._unread.append(_Launched(key, spare, time.perf_counter()))
        self.stats.num_steps += 1

    def _collect_masks(self) -> None:
        """Hands the device the masks that are there; ends rows whose grammar failed."""
        is_idle = len(self._grammars.awake) == self._num_live and not self._unread
        for grammar in self._grammars.collect(is_idle=is_idle):
            if grammar.error is None:
                self.inbox.mask(grammar.row, grammar.gen, grammar.serves_until, grammar.forced)
                continue
            self.inbox.abort(grammar.row, grammar.gen)
            is_refusal = grammar.is_refusal
            self._fail(self._seats[grammar.row], grammar.error, is_refusal=is_refusal)

    def _take_entries(self) -> _Entries:
        """The next step's entries; parameters of the requests submitted in it, masks it brings."""
        inbox, applied = self.inbox.take()
        submitted = [self._seats[entry.row] for entry in applied if isinstance(entry, SubmitEntry)]
        for seat in submitted:
            if not seat.is_over:
                salt = salt_of(seat.request.cache_salt)
                most = score_from(seat.request)
                self._guess.add(seat.row, seat.request.prompt_token_ids, salt, most)
        entries = [(s.row, s.request.params, s.seed, s.stop_ids) for s in submitted]
        arrived = (
            self._grammars.mask_of(e.row, e.gen) for e in applied if isinstance(e, MaskEntry)
        )
        masks = [mask for mask in arrived if mask is not None]
        return inbox, build_param_inbox(self.executor.shape, entries), masks

    def _count_variant(self, variant: Variant, change: int) -> None:
        """A seat asks for the sampler, or leaves."""
        self._num_by_variant[variant] += change
        self._variant = next((v for v in _VARIANTS if self._num_by_variant[v]), Variant.GREEDY)

    def _seat_requests(self) -> None:
        """Gives free rows to queued requests, in order of priority, then arrival."""
        if not self._free_rows:
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
        if not params.ignore_eos or params.grammar is not None:
            stop_ids = tuple(dict.fromkeys((*self.eos_token_ids, *stop_ids)))
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        self.queue_times.seat(request.request_id)
        self._gens[row] += 1
        self._arrival += 1
        seat = Seat(
            request=request,
            row=row,
            gen=self._gens[row],
            max_len=len(prompt) + max_new,
            stop_ids=stop_ids,
            seed=seed,
            variant=variant_of(params),
            num_prompt=len(prompt),
        )
        self._seats[row] = seat
        self._columns.take(row, seat.gen, request.request_id)
        self._num_live += 1
        self._count_variant(seat.variant, 1)
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
            grammar=params.is_masked,
            score_from=score_from(request),
        )
        self._logprobs.seat(request, row, seat.gen)
        if params.is_masked:
            self._grammars.seat(request, row, seat.gen, max_len=seat.max_len, stop_ids=stop_ids)

    def _choose_step(self) -> StepKey:
        """The step to launch; where all that runs decodes, nothing has to be weighed."""
        is_mixed = self._unstarted or self._num_waiting_rows or self._grammars.num_forced
        if not (is_mixed or self.executor.reads_plans):
            return self.executor.key_of(self._num_live, self._variant, is_mixed=False)
        return self.choice.choose(self._seen(), self._variant)

    def _seen(self) -> Seen:
        return Seen(
            num_live=self._num_live,
            num_seats=len(self._seats),
            unstarted=self._unstarted,
            counts=self._counts,
            num_prompt_places=sum(step.num_prompt_places for step in self._unread),
            num_forced=self._grammars.num_forced,
        )

    # --- read -----------------------------------------------------------------------------

    def _read(self) -> TokenBatch:
        record, launched = self.executor.outbox.read(), self._unread.popleft()
        self._note_time(launched)
        if not launched.key.has_logprobs:
            return self._take_record(record)
        found = self._logprobs.take(record.rows, self.executor.logprobs.read())
        return self._take_record(record, found)

    def _take_record(self, record: HostRecord, found: StepLogprobs = NOTHING) -> TokenBatch:
        self._counts = record.counts
        self.stats.take(record, self.executor.shape.num_pages, self._columns)
        forced = self._grammars.take_tokens(record.rows) if self._grammars.rows else {}
        self.stats.take_forced(forced)
        more = (*found, forced)
        started = self._columns.started()
        # One column behind the other: generations, flags, cached tokens, tokens.
        columns = record.rows.take(started.places).tobytes()
        is_steady = started.num_rows == len(self._seats) and columns.startswith(started.expected)
        if not is_steady:
            return self._take_changes(record.rows[:-1], more)
        # Every seat gained a token and nothing else happened.
        self.stats.num_generated_tokens += started.num_rows
        half, third = len(columns) // 2, len(columns) // 4 * 3
        return TokenBatch(started.request_ids, columns[third:], columns[half:third], {}, *more)

    def _take_changes(self, rows: np.ndarray, more: _More) -> TokenBatch:
        """Array operations for all rows; single seats only where one starts, ends or is left."""
        columns, flags = self._columns, rows[:, COLUMN_FLAGS]
        # Rows whose generation differs have not seen their submit yet.
        is_known = (columns.gens > 0) & (rows[:, COLUMN_GEN] == columns.gens)
        emitted = np.nonzero(is_known & ~columns.is_over & ((flags & FLAG_EMITTED) != 0))[0]
        failed = np.nonzero(is_known & ~columns.is_over & ((flags & FLAG_FAILED) != 0))[0]
        for row in failed.tolist():
            self._fail(self._seats[row], failure_of(rows[row]), is_refusal=False)
        free = np.nonzero(is_known & ((flags & FLAG_FREE) != 0))[0]
        request_ids, news = columns.request_ids[emitted].tobytes(), rows[emitted]
        for place in np.nonzero(~columns.has_started[emitted])[0].tolist():
            self._start(self._seats[int(emitted[place])], int(news[place, COLUMN_CACHED]))
        self.stats.num_generated_tokens += len(emitted)
        ends: dict[int, FinishReason] = {}
        for place in np.nonzero(news[:, COLUMN_FLAGS] & FLAG_FINISHED)[0].tolist():
            seat = self._seats[int(emitted[place])]
            self._end(seat)
            is_stop = int(news[place, COLUMN_TOKEN]) in seat.stop_ids
            ends[place] = "stop" if is_stop else "length"
        for row in free.tolist():
            self._leave(self._seats[row])
        tokens, cached = news[:, COLUMN_TOKEN].tobytes(), news[:, COLUMN_CACHED].tobytes()
        return TokenBatch(request_ids, tokens, cached, ends, *more)

    def _note_time(self, launched: _Launched) -> None:
        """Learns what a step took, where the device had no pause before it."""
        now, before = self.executor.outbox.read_at, self._read_at
        self._read_at = now
        key = launched.key
        if key.is_mixed and not key.num_scored and launched.at < before:
            self.choice.learn(self._seen(), key, now - before)

    def _start(self, seat: Seat, num_cached: int) -> None:
        """The seat's first token is there."""
        self._columns.start(seat.row)
        self._unstarted.pop(seat.row, None)
        self._guess.leave(seat.row)
        self.stats.num_prompt_tokens += seat.num_prompt
        self.stats.num_cached_tokens += num_cached

    def _end(self, seat: Seat) -> None:
        """No more events for the seat's request."""
        seat.is_over = True
        self._columns.end(seat.row)
        self._grammars.leave(seat.row)
        self._logprobs.end(seat.row)
        self._num_live -= 1
        self._unstarted.pop(seat.row, None)
        self._guess.leave(seat.row)

    def _fail(self, seat: Seat, message: str, *, is_refusal: bool) -> None:
        """The seat's request ends with an error, which `take_refusals` hands out."""
        self._end(seat)
        self._grammars.refuse(seat.request.request_id, message, is_refusal=is_refusal)

    def _leave(self, seat: Seat) -> None:
        assert seat.is_over, f"row {seat.row} is free while its request runs"
        del self._seats[seat.row]
        self._logprobs.leave(seat.row)
        self._columns.leave(seat.row)
        self._count_variant(seat.variant, -1)
        self._seat_of.pop(seat.request.request_id, None)
        self._free_rows.append(seat.row)
