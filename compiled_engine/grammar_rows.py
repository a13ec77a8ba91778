"""Masks of running requests: who waits for a compile, whose mask is being made, who failed.

The step loop's helper, for requests with a grammar, a thinking budget or both. Matchers are
advanced by threads of their own, one request's by one thread at a time. The loop waits a moment for
masks that are usually there at once; what takes longer comes with a later step, and from then on
that request's masks are made in a slow lane, so that it holds up nobody but itself. A request
without a grammar gets one mask that allows everything for as long as nothing has to be forced on
it; meanwhile it is asleep here, and costs a look at each of its tokens.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiled_engine.errors import InvalidRequestError
from compiled_engine.grammar import GrammarService
from compiled_engine.jump_forward import Answer, JumpRule, forced_tokens, jump_rule, jumps
from compiled_engine.outbox import (
    COLUMN_FLAGS,
    COLUMN_GEN,
    COLUMN_TOKEN,
    FLAG_EMITTED,
    FLAG_FINISHED,
)
from compiled_engine.request import Request, TokenEvent
from compiled_engine.sampler import RowMask
from compiled_engine.thinking import WITHOUT_END, ThinkingState

# The loop waits this long for the masks of quick grammars, in all.
MASK_WAIT_S = 0.004
# A request whose mask takes longer than this gets its masks from the slow lane.
SLOW_MASK_S = 0.003
# A request whose mask takes longer than this ends with an error.
STUCK_MASK_S = 10.0
NUM_SLOW_LANES = 2
# Threads given up for good, in which a mask never came.
MAX_LOST_LANES = 4
# How long an otherwise idle loop waits for a compile or a mask.
IDLE_WAIT_S = 0.005
# A row that is asleep asks for its next mask when so few positions are left, not when none is.
EXTEND_BELOW = 16
# Where nobody takes the times, they must not pile up.
MAX_KEPT = 4096


@dataclass
class _Compiling:
    """A request that has no row yet, and what it waits for."""

    request: Request
    grammar: Future[Any] | None
    token_bytes: Future[Any] | None
    begun_at: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0

    @property
    def futures(self) -> list[Future[Any]]:
        return [future for future in (self.grammar, self.token_bytes) if future is not None]


@dataclass(eq=False)
class GrammarRow:
    """A request in a row whose tokens are chosen under masks.

    Attributes:
        position: tokens known, which is where the next mask belongs.
        serves_until: last position that the newest mask is right for.
        rule: what may be given to it at once; None where nothing may.
        forced: tokens that come with the newest mask, in front of `position`; empty once the row
            got a token behind them.
        wait_s: seconds that its compile and its masks took so far.
        mask: the newest mask, [words] int32; written by a lane while one is being made.
        error: what its lane found; no mask comes then.
        is_refusal: the error is the grammar's own, so the client's.
    """

    request_id: int
    row: int
    gen: int
    position: int
    compiled: Any  # None: there is no grammar
    thinking: ThinkingState | None = None
    rule: JumpRule | None = None
    matcher: Any = None
    serves_until: int = -1
    forced: tuple[int, ...] = ()
    tensor: Any = None
    mask: np.ndarray | None = None
    token: int | None = None  # to be accepted before the next mask
    error: str | None = None
    is_refusal: bool = False
    is_slow: bool = False
    wait_s: float = 0.0
    asked_at: float | None = None  # a mask is being made since


class _Lane:
    """Threads that advance matchers from one queue."""

    def __init__(self, service: GrammarService, done: queue.SimpleQueue[GrammarRow]) -> None:
        self.jobs: queue.SimpleQueue[GrammarRow | None] = queue.SimpleQueue()
        self._service, self._done = service, done
        self._threads: list[_LaneThread] = []

    def grow(self) -> None:
        """Adds a thread."""
        thread = _LaneThread(self._service, self.jobs, self._done)
        thread.start()
        self._threads.append(thread)

    def replace_stuck(self, row: GrammarRow) -> bool:
        """Gives up the thread that works on `row`; False where none does."""
        for thread in self._threads:
            if thread.current is row:
                thread.is_lost = True
                self._threads.remove(thread)
                self.grow()
                return True
        return False

    def close(self) -> None:
        """Ends the threads that are not lost."""
        for _ in self._threads:
            self.jobs.put(None)


class _LaneThread(threading.Thread):
    def __init__(
        self,
        service: GrammarService,
        jobs: queue.SimpleQueue[GrammarRow | None],
        done: queue.SimpleQueue[GrammarRow],
    ) -> None:
        super().__init__(name="grammar-masks", daemon=True)
        self._service, self._jobs, self._done = service, jobs, done
        self.current: GrammarRow | None = None
        self.is_lost = False

    def run(self) -> None:
        while not self.is_lost and (row := self._jobs.get()) is not None:
            self.current = row
            start = time.perf_counter()
            try:
                _advance(row, self._service)
            except Exception as error:  # of the library, about this grammar
                row.error = f"the grammar failed: {error}"
            row.is_slow = row.is_slow or time.perf_counter() - start > SLOW_MASK_S
            self.current = None
            self._done.put(row)


def _advance(row: GrammarRow, service: GrammarService) -> None:
    """Accepts the row's newest token, then what is forced behind it, and makes its next mask."""
    if row.mask is None:
        row.tensor = service.compiler.new_mask()
        row.mask = row.tensor.numpy()[0]
        if row.compiled is not None:
            row.matcher = service.compiler.new_matcher(row.compiled)
    token, row.token = row.token, None
    if token is not None:
        if row.thinking is not None:
            row.thinking.take(token)
        if row.matcher is not None and not row.matcher.accept_token(token):
            row.error = f"the grammar refuses token {token}, which was chosen under its mask"
            return
    has_mask = False
    if row.rule is not None:
        assert service.encoder is not None
        answer = Answer(row.matcher, row.tensor, row.thinking, row.position)
        found = forced_tokens(answer, service.encoder, row.rule)
        has_mask, row.forced = found is None, found or ()
        row.position += len(row.forced)
    forced = None if row.thinking is None else row.thinking.forced
    row.serves_until = row.position
    if not has_mask:
        row.mask.fill(-1 if forced is None else 0)
    if forced is not None:
        row.mask.view(np.uint32)[forced // 32] = 1 << forced % 32
    elif row.matcher is not None:
        if not has_mask:
            row.matcher.fill_next_token_bitmask(row.tensor, 0)
        if not row.mask.any():
            row.error, row.is_refusal = "the grammar leaves no token to go on with", True
    else:
        assert row.thinking is not None
        row.serves_until = row.position + row.thinking.num_free - 1


class GrammarRows:
    """All requests of a loop whose tokens are chosen under masks.

    Args:
        service: compiles; None refuses every such request.
        max_forced: tokens that may come with a mask at most.

    Attributes:
        rows: by row, while its request runs.
        awake: rows that a step must be masked for, or that wait for a mask.
    """

    def __init__(self, service: GrammarService | None, max_forced: int) -> None:
        self._service = service
        self._max_forced = max_forced
        self._compiling: dict[int, _Compiling] = {}
        self._compiled: dict[int, _Compiling] = {}  # by request id, until it has a row
        self.rows: dict[int, GrammarRow] = {}
        self.awake: set[int] = set()
        self._waits_s: dict[int, float] = {}  # by request id
        self._refusals: list[TokenEvent] = []
        self._done: queue.SimpleQueue[GrammarRow] = queue.SimpleQueue()
        self._lanes: tuple[_Lane, _Lane] | None = None
        self._num_lost = 0

    # --- before a request has a row -------------------------------------------------------

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is not there yet."""
        return len(self._compiling)

    @property
    def has_work(self) -> bool:
        """Requests wait for their grammar, or to be told that it was refused."""
        return bool(self._compiling or self._refusals)

    def begin(self, request: Request) -> None:
        """Starts the compile of a request's grammar."""
        params = request.params
        if self._service is None:
            text = "grammars and thinking budgets need a tokenizer with an end token"
            self.refuse(request.request_id, text)
        elif self._num_lost >= MAX_LOST_LANES:
            self.refuse(request.request_id, "too many grammars hang; restart the server")
        else:
            start = self._service.start
            self._compiling[request.request_id] = _Compiling(
                request,
                grammar=start(params.grammar) if params.grammar is not None else None,
                token_bytes=start(None) if params.thinking is not None else None,
            )

    def forget(self, request_id: int) -> bool:
        """Drops a request that has no row; False where it does not wait for its grammar."""
        self._compiled.pop(request_id, None)
        return self._compiling.pop(request_id, None) is not None

    def take_ready(self) -> list[Request]:
        """Requests whose grammar is there now; those whose grammar failed are refused."""
        ready = []
        for compiling in list(self._compiling.values()):
            if not all(future.done() for future in compiling.futures):
                continue
            request = compiling.request
            compiling.wait_s = time.perf_counter() - compiling.begun_at
            del self._compiling[request.request_id]
            errors = [future.exception() for future in compiling.futures]
            error = next((error for error in errors if error is not None), None)
            if error is None:
                self._compiled[request.request_id] = compiling
                ready.append(request)
            else:
                message = error.message if isinstance(error, InvalidRequestError) else str(error)
                self.refuse(request.request_id, message)
                self._note_wait(request.request_id, compiling.wait_s)
        return ready

    def wait_for_compile(self) -> None:
        """Waits a moment, where nothing else is to be done."""
        for future in (f for compiling in self._compiling.values() for f in compiling.futures):
            try:
                future.exception(IDLE_WAIT_S)
            except TimeoutError:
                return

    def refuse(self, request_id: int, message: str, *, is_refusal: bool = True) -> None:
        """Ends a request with an error."""
        event = TokenEvent(request_id, [], "error", 0, message, is_refusal)
        self._refusals.append(event)

    def take_refusals(self) -> list[TokenEvent]:
        """Events of requests that ended with an error since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    # --- while it has one -----------------------------------------------------------------

    def seat(
        self,
        request: Request,
        row: int,
        gen: int,
        *,
        max_len: int,
        stop_ids: tuple[int, ...],
    ) -> None:
        """The request got a row: asks for its first mask.

        Args:
            request: whose grammar was compiled.
            row: its row.
            gen: generation of the row.
            max_len: prompt and answer at most.
            stop_ids: tokens that end it.
        """
        compiled = self._compiled.pop(request.request_id)
        position, thinking = len(request.prompt_token_ids), None
        if request.params.thinking is not None:
            assert compiled.token_bytes is not None
            thinking = ThinkingState(request.params.thinking, compiled.token_bytes.result())
        self.rows[row] = grammar = GrammarRow(
            request.request_id,
            row,
            gen,
            position,
            None if compiled.grammar is None else compiled.grammar.result(),
            thinking,
            wait_s=compiled.wait_s,
        )
        assert self._service is not None
        encoder = self._service.encoder
        if encoder is not None and jumps(request.params):
            grammar.rule = jump_rule(
                request.params, stop_ids, encoder, max_len=max_len, max_tokens=self._max_forced
            )
        self._note_wait(request.request_id, grammar.wait_s)
        self._ask(grammar)

    def leave(self, row: int) -> None:
        """The row's request is over, or will need no mask any more."""
        self.awake.discard(row)
        grammar = self.rows.pop(row, None)
        if grammar is not None:
            self._note_wait(grammar.request_id, grammar.wait_s)

    def take_waits(self) -> dict[int, float]:
        """Request id -> seconds waited for grammar and masks; of those that came or left since."""
        taken, self._waits_s = self._waits_s, {}
        return taken

    def _note_wait(self, request_id: int, seconds: float) -> None:
        if len(self._waits_s) >= MAX_KEPT:
            self._waits_s.clear()
        self._waits_s[request_id] = seconds

    @property
    def num_forced(self) -> int:
        """Tokens that rows got with a mask, or will get, and have no token behind yet."""
        return sum(len(self.rows[row].forced) for row in self.awake)

    def take_tokens(self, record_rows: np.ndarray) -> dict[int, tuple[int, ...]]:
        """Asks for the masks behind the tokens of a step's record [R + 1, 4].

        Returns:
            Request id -> tokens that were forced in front of the one of this step.
        """
        found: dict[int, tuple[int, ...]] = {}
        for grammar in list(self.rows.values()):
            gen, flags = record_rows[grammar.row, [COLUMN_GEN, COLUMN_FLAGS]].tolist()
            if gen != grammar.gen or not flags & FLAG_EMITTED:
                continue
            if grammar.forced:
                found[grammar.request_id], grammar.forced = grammar.forced, ()
            if flags & FLAG_FINISHED:
                self.leave(grammar.row)
                continue
            grammar.token = int(record_rows[grammar.row, COLUMN_TOKEN])
            grammar.position += 1
            if not self._sleeps_on(grammar):
                self._ask(grammar)
        return found

    def collect(self, *, is_idle: bool) -> list[GrammarRow]:
        """Rows whose mask is there, or that failed; waits a moment for those that are quick.

        Args:
            is_idle: nothing else runs: wait for the slow ones too.
        """
        pending = [g for g in self.rows.values() if g.asked_at is not None]
        if not pending:
            return []
        quick = {grammar.row for grammar in pending if not grammar.is_slow}
        awaited = quick or ({grammar.row for grammar in pending} if is_idle else set())
        deadline = time.perf_counter() + (IDLE_WAIT_S if is_idle else MASK_WAIT_S)
        found: list[GrammarRow] = []
        while True:
            wait = deadline - time.perf_counter() if awaited else 0.0
            try:
                grammar = self._done.get(timeout=wait) if wait > 0 else self._done.get_nowait()
            except queue.Empty:
                break
            awaited.discard(grammar.row)
            if grammar.asked_at is not None:
                grammar.wait_s += time.perf_counter() - grammar.asked_at
            grammar.asked_at = None
            if self.rows.get(grammar.row) is grammar:
                found.append(grammar)
        return found + self._stuck(pending)

    def mask_of(self, row: int, gen: int) -> RowMask | None:
        """The mask that an inbox entry announces; None where its request is over."""
        grammar = self.rows.get(row)
        if grammar is None or grammar.gen != gen or grammar.mask is None:
            return None
        if grammar.compiled is None and grammar.serves_until > grammar.position:
            self.awake.discard(row)
            if grammar.serves_until - grammar.position >= WITHOUT_END - 1:
                self.leave(row)
        return RowMask(row, grammar.mask)

    def _sleeps_on(self, grammar: GrammarRow) -> bool:
        """Whether the row needs nothing behind its newest token, which is then taken."""
        if grammar.compiled is not None or grammar.row in self.awake:
            return False
        assert grammar.thinking is not None
        assert grammar.token is not None
        grammar.thinking.take(grammar.token)
        grammar.token = None
        num_left = grammar.serves_until - grammar.position + 1
        num_free = 0 if grammar.thinking.forced is not None else grammar.thinking.num_free
        return num_left > 0 and (num_left >= EXTEND_BELOW or num_free <= num_left)

    def _ask(self, grammar: GrammarRow) -> None:
        self.awake.add(grammar.row)
        if grammar.compiled is None:
            assert self._service is not None
            _advance(grammar, self._service)
            if grammar.asked_at is None:
                grammar.asked_at = time.perf_counter()
                self._done.put(grammar)
            return
        if self._lanes is None:
            assert self._service is not None
            self._lanes = (_Lane(self._service, self._done), _Lane(self._service, self._done))
            for count, lane in zip((1, NUM_SLOW_LANES), self._lanes, strict=True):
                for _ in range(count):
                    lane.grow()
                weakref.finalize(self, lane.close)
        grammar.asked_at = time.perf_counter()
        self._lanes[grammar.is_slow].jobs.put(grammar)

    def _stuck(self, pending: list[GrammarRow]) -> list[GrammarRow]:
        now, stuck = time.perf_counter(), []
        for grammar in pending:
            if grammar.asked_at is None or now - grammar.asked_at < STUCK_MASK_S:
                continue
            assert self._lanes is not None
            self._num_lost += any([lane.replace_stuck(grammar) for lane in self._lanes])
            grammar.error = f"the grammar is too complex: a mask takes over {STUCK_MASK_S:g} s"
            grammar.is_refusal = True
            stuck.append(grammar)
        return stuck
