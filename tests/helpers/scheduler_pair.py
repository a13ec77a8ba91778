"""The oracle and the tensor scheduler, stepped side by side with everything compared.

Owns one step: inbox, plan, layout, fake KV, advance, and the checks after each half. Does not own
traffic: `scheduler_harness` drives random requests through it, tests drive it by hand. Without an
engine the oracle runs alone, which is fast enough to try wrong schedulers on many seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_engine.layout import layout
from compiled_engine.scheduler.advance import advance
from compiled_engine.scheduler.inbox import InboxBuilder
from compiled_engine.scheduler.plan import Plan, plan
from compiled_engine.scheduler.state import SchedulerShape, SchedulerState, new_state
from tests.helpers.fake_kv import FakeKv, ScheduledRow
from tests.helpers.python_scheduler import PythonPlan, PythonScheduler, RowState
from tests.helpers.scheduler_snapshot import (
    assert_equal,
    check_invariants,
    oracle_snapshot,
    tensor_snapshot,
)
from tests.helpers.scheduler_traffic import SimpleSink

RUBBISH_TOKEN = 977


def small_shape(**changes: Any) -> SchedulerShape:
    """Returns a small shape; every field can be changed by name."""
    values: dict[str, Any] = {
        "max_rows": 4,
        "num_pages": 16,
        "page_size": 4,
        "max_model_len": 32,
        "max_tokens": 8,
        "num_candidates": 4,
        "max_releases": 4,
        "index_buckets": 8,
        "index_ways": 8,
        "key_bits": 64,
        "max_submits": 4,
        "max_pieces": 8,
        "max_aborts": 4,
        "max_masks": 4,
        "prefix_caching": True,
        "vocab_size": RUBBISH_TOKEN + 1,
    }
    values |= changes
    values.setdefault("token_page_size", 2 * values["page_size"])
    return SchedulerShape(**values)


class TensorEngine:
    """The tensor scheduler with an inbox, driven from plain Python values.

    Args:
        shape: sizes of everything.
        plan_fn: `plan`, or a compiled form of it.
        advance_fn: `advance`, or a compiled form of it.
        device: where the state lives.
    """

    def __init__(
        self,
        shape: SchedulerShape,
        plan_fn: Callable[..., Plan] = plan,
        advance_fn: Callable[..., Any] = advance,
        device: str = "cpu",
    ) -> None:
        self.shape = shape
        self.device = device
        self.state: SchedulerState = new_state(shape, torch.device(device))
        self.builder = InboxBuilder(shape)
        self.plan_fn = plan_fn
        self.advance_fn = advance_fn
        self.last_plan: Plan | None = None
        self._inbox: Any = None

    def take(self) -> list[Any]:
        """Fixes this step's inbox and returns what takes effect in it."""
        self._inbox, applied = self.builder.take()
        if self.device != "cpu":
            self._inbox = type(self._inbox)(*(part.to(self.device) for part in self._inbox))
        return list(applied)

    def plan(self, budget: int) -> Plan:
        """Plans with the inbox of the last `take`."""
        scalar = torch.tensor(budget, dtype=torch.int32, device=self.device)
        self.last_plan = self.plan_fn(self.shape, self.state, self._inbox, scalar)
        return self.last_plan

    def advance(self, tokens: dict[int, int], stops: dict[int, bool]) -> Any:
        """Advances with one token for each row of `tokens`; other rows are handed rubbish."""
        rows = self.shape.max_rows + 1
        ids = torch.full((rows, 1), RUBBISH_TOKEN, dtype=torch.int32)
        count = torch.zeros(rows, dtype=torch.int32)
        ends = torch.ones((rows, 1), dtype=torch.bool)
        for row, token in tokens.items():
            ids[row, 0], count[row], ends[row, 0] = token, 1, stops.get(row, False)
        parts = (part.to(self.device) for part in (ids, count, ends))
        return self.advance_fn(self.shape, self.state, self.last_plan, *parts)


class Pair:
    """Steps the oracle and, if there is one, an engine; compares and checks everything."""

    def __init__(
        self,
        shape: SchedulerShape,
        engine: TensorEngine | None = None,
        oracle: PythonScheduler | None = None,
    ) -> None:
        self.shape = shape
        self.engine = engine
        self.oracle = oracle or PythonScheduler(shape)
        self.kv = FakeKv(shape.num_pages, shape.page_size)
        self.sink: Any = engine.builder if engine else SimpleSink()
        self.applied: list[Any] = []
        self.num_steps = 0
        self.num_retractions = 0
        self._arrivals = 0

    def submit(self, row: int, prompt: Sequence[int], max_len: int, **fields: Any) -> int:
        """Queues a submit with the next generation and arrival; returns the generation."""
        values: dict[str, Any] = {
            "gen": self.oracle.rows[row].gen + 1,
            "arrival": self._arrivals,
            "priority": 0,
            "salt": 0,
            "grammar": False,
        }
        values |= fields
        self._arrivals = max(self._arrivals, values["arrival"]) + 1
        self.sink.submit(row=row, prompt=list(prompt), max_len=max_len, **values)
        return int(values["gen"])

    def abort(self, row: int, gen: int | None = None) -> None:
        """Queues an abort, of the row's present request unless told otherwise."""
        self.sink.abort(row, self.oracle.rows[row].gen if gen is None else gen)

    def mask(
        self,
        row: int,
        position: int | None = None,
        gen: int | None = None,
        forced: tuple[int, ...] = (),
    ) -> None:
        """Queues a mask, for the row's next position unless told otherwise."""
        state = self.oracle.rows[row]
        at = state.num_tokens + len(forced) if position is None else position
        self.sink.mask(row, state.gen if gen is None else gen, at, forced)

    def state(self, row: int) -> RowState:
        """Returns the oracle's state of a row; the engine's equals it after every step."""
        return self.oracle.rows[row].state

    def step(
        self,
        budget: int | None = None,
        sample: Callable[[int, int], int] = lambda row, position: 1,
        stops: Callable[[int, int], bool] = lambda row, position: False,
        spoils: Callable[[int, int], bool] = lambda row, position: False,
    ) -> PythonPlan:
        """Runs one whole step.

        Args:
            budget: tokens of the step.
            sample: gets (row, position).
            stops: likewise.
            spoils: whether a chunk that ends before `position` gets no token of the vocabulary.
        """
        planned = self.half_step(self.shape.max_tokens if budget is None else budget)
        places = {row: self.oracle.rows[row].num_tokens for row in planned.emit}
        tokens = {row: sample(row, place) for row, place in places.items()}
        for row in planned.rank:
            if spoils(row, self.oracle.rows[row].num_computed + planned.give[row]):
                vocab_size = self.shape.vocab_size
                tokens[row] = (-1, vocab_size, -(2**31), 2**31 - 1)[self.num_steps % 4]
        self.finish_step(tokens, {row: stops(row, place) for row, place in places.items()})
        return planned

    def half_step(self, budget: int) -> PythonPlan:
        """Plans one step and runs the fake KV cache on it."""
        where = f"step {self.num_steps}, plan"
        self.applied = self.engine.take() if self.engine else self.sink.take()
        planned = self.oracle.plan(self.applied, budget)
        assert sum(planned.give.values()) <= budget, "more tokens granted than the budget"
        scheduled = scheduled_rows(self.oracle)
        slots = slots_by_table(self.kv, scheduled)
        picture = oracle_snapshot(self.oracle)
        check_invariants(picture)
        if self.engine:
            self.engine.plan(budget)
            compare_plan(self.engine, planned, where)
            assert_equal(picture, tensor_snapshot(self.shape, self.engine.state), where)
            slots = compare_layout(self.engine, scheduled, max(budget, 1))
        check_writable(self.oracle, slots)
        self.kv.step(scheduled, slots)
        return planned

    def finish_step(self, tokens: dict[int, int], stops: dict[int, bool]) -> None:
        """Advances with the sampled tokens of the rows that emit."""
        self.oracle.advance(tokens, stops)
        victim = self.oracle.current.victim
        if victim >= 0 and self.state(victim) is RowState.RETRACTED:
            self.num_retractions += 1
        picture = oracle_snapshot(self.oracle)
        check_invariants(picture)
        if self.engine:
            self.engine.advance(tokens, stops)
            found = tensor_snapshot(self.shape, self.engine.state)
            assert_equal(picture, found, f"step {self.num_steps}, advance")
        self.num_steps += 1

    @property
    def is_idle(self) -> bool:
        """True if every row is FREE: no request lives and none awaits its release."""
        return all(row.state is RowState.FREE for row in self.oracle.rows)

    def check_idle(self) -> None:
        """Fails unless every page and token page came back and no error was counted."""
        assert self.is_idle, "a row is not FREE"
        assert self.oracle.pool.num_free == self.shape.num_pages - 1, "pages are lost"
        assert not any(self.oracle.errors), f"errors were counted: {self.oracle.errors}"
        if self.engine:
            state = self.engine.state
            assert int(state.num_free_token_pages) == self.shape.num_token_pages
            stack = state.free_token_pages[: self.shape.num_token_pages].tolist()
            assert sorted(stack) == list(range(1, len(stack) + 1)), "a token page is lost"


def compare_plan(engine: TensorEngine, expected: PythonPlan, where: str) -> None:
    """Fails unless the tensors planned exactly what the oracle planned."""
    found = engine.last_plan
    assert found is not None
    rows = engine.shape.max_rows
    give, emit, rank = found.give.tolist(), found.emit.tolist(), found.rank.tolist()
    order = sorted((rank[row], row) for row in range(rows + 1) if give[row] > 0)
    granted = {row: count for row, count in expected.give.items() if count}
    pairs = {
        "give": (granted, {row: count for row, count in enumerate(give) if count}),
        "emit": (sorted(expected.emit), [row for row, flag in enumerate(emit) if flag]),
        "rank": (list(enumerate(expected.rank)), order),
        "victim": (expected.victim, int(found.victim)),
        "admitted": (
            sorted(expected.admitted),
            [row for row, flag in enumerate(found.admitted.tolist()) if flag],
        ),
    }
    for name, (want, have) in pairs.items():
        assert want == have, f"{where}: {name}: oracle {want}, found {have}"
    idle = {rank[row] for row in range(rows + 1) if give[row] == 0}
    assert idle <= {rows}, f"{where}: rows without tokens have ranks {idle}"


def scheduled_rows(oracle: PythonScheduler) -> list[ScheduledRow]:
    """Returns the rows of the planned step in the order of its tokens."""
    scheduled: list[ScheduledRow] = []
    for index in oracle.current.rank:
        row = oracle.rows[index]
        scheduled.append(
            ScheduledRow(
                row=index,
                salt=row.salt,
                tokens=row.tokens,
                start=row.num_computed,
                give=oracle.current.give[index],
                pages=row.pages,
            )
        )
    return scheduled


def slots_by_table(kv: FakeKv, scheduled: Sequence[ScheduledRow]) -> list[int]:
    """Returns the slot of every token of a step by the block tables."""
    return [
        kv.slot(item.pages, position)
        for item in scheduled
        for position in range(item.start, item.start + item.give)
    ]


def compare_layout(
    engine: TensorEngine, scheduled: Sequence[ScheduledRow], num_tokens: int
) -> list[int]:
    """Checks a layout of `num_tokens` places and returns the slots of its real tokens."""
    assert engine.last_plan is not None
    inputs = layout(engine.shape, engine.state, engine.last_plan, num_tokens)
    rows = engine.shape.max_rows
    total = sum(item.give for item in scheduled)
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    starts = [0]
    for item in scheduled:
        ids += item.tokens[item.start : item.start + item.give]
        positions += range(item.start, item.start + item.give)
        owners += [item.row] * item.give
        starts.append(len(ids))
    count = len(scheduled)
    assert inputs.token_ids.shape == (num_tokens,)
    assert inputs.token_ids.tolist()[:total] == ids
    assert inputs.positions.tolist()[:total] == positions
    assert inputs.token_rows.tolist()[:total] == owners
    assert inputs.seq_rows.tolist() == [i.row for i in scheduled] + [rows] * (rows - count)
    assert inputs.seq_lens.tolist()[:count] == [item.start + item.give for item in scheduled]
    assert not any(inputs.seq_lens.tolist()[count:])
    assert inputs.query_start_loc.tolist() == starts + [total] * (rows - count)
    assert inputs.logits_indices.tolist()[:count] == [start - 1 for start in starts[1:]]
    slots: list[int] = inputs.slot_mapping.tolist()
    assert slots[total:] == [-1] * (num_tokens - total)
    return slots[:total]


def check_writable(oracle: PythonScheduler, slots: Sequence[int]) -> None:
    """Fails if a step writes into a page that others read or that is published."""
    for page in {slot // oracle.shape.page_size for slot in slots}:
        assert oracle.pool.ref[page] == 1, f"page {page} is written while shared"
        assert oracle.pool.uid[page] == 0, f"page {page} is written after it was published"
