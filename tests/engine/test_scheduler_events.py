"""Every row state against every event: what changes, and what is counted.

The expected changes are written by hand. Inbox events are applied by the device half of the inbox
alone, so that the rest of `plan` cannot hide what they did; the oracle must agree as well.
"""

from __future__ import annotations

import pytest
import torch

from compiled_engine.scheduler.advance import advance
from compiled_engine.scheduler.inbox import apply_inbox
from compiled_engine.scheduler.plan import plan
from compiled_engine.scheduler.state import new_state
from tests.helpers.python_scheduler import RowState
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_snapshot import assert_equal, oracle_snapshot, tensor_snapshot

FREE, WAITING, PREFILL, DECODE, BLOCKED, RETRACTED, FINISHED, ABORTING = RowState
ROW = 1  # the row under test; row 0 only helps
LIVE = (WAITING, PREFILL, DECODE, BLOCKED, RETRACTED)
USED = (*LIVE, FINISHED, ABORTING)

SUBMIT_ERROR, MASK_ERROR, TOKENS_ERROR = [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]
NO_ERROR = [0, 0, 0, 0, 0]


def new_pair() -> Pair:
    shape = small_shape(max_rows=2, num_pages=7, max_releases=1, max_tokens=16, num_candidates=2)
    return Pair(shape, TensorEngine(shape))


def row_in(state: RowState, *, grammar: bool = False) -> Pair:
    """Returns a pair whose row 1 is in `state`, reached by ordinary steps."""
    pair = new_pair()
    if state is FREE:
        return pair
    if state is RETRACTED:
        return retracted_row(grammar=grammar)
    if state is ABORTING:  # the one release of this step goes to row 0
        pair.submit(0, [1, 2], 4)
    gen = pair.submit(ROW, range(10, 16), 20, grammar=grammar or state is BLOCKED)
    if state is WAITING:
        pair.step(0)
    elif state is PREFILL:
        pair.step(4)
    elif state is DECODE and not grammar:
        pair.step()
    elif state in (DECODE, BLOCKED):
        pair.mask(ROW, 6, gen)
        pair.step()
        if state is DECODE:
            pair.mask(ROW, 7)
            pair.step(0)
    elif state is FINISHED:
        if grammar:
            pair.mask(ROW, 6, gen)
        pair.step(stops=lambda row, position: True)
    else:
        pair.step(stops=lambda row, position: row == 0)
        pair.abort(ROW)
        pair.step()
    assert pair.state(ROW) is state
    return pair


def retracted_row(*, grammar: bool) -> Pair:
    """Row 0 grows until the pool is empty; row 1 came later and loses its pages."""
    pair = new_pair()
    pair.submit(0, range(9), 25)
    pair.submit(ROW, range(10, 13), 20, grammar=grammar)
    pair.step()
    for _ in range(20):
        if pair.state(ROW) is RETRACTED:
            return pair
        if grammar and pair.oracle.rows[ROW].num_tokens < 7:
            pair.mask(ROW)
        pair.step()
    raise AssertionError("nobody was retracted")


def apply_only_inbox(pair: Pair) -> None:
    """Applies what is queued, on both sides, without the rest of a plan."""
    assert pair.engine is not None
    inbox, applied = pair.engine.builder.take()
    apply_inbox(pair.shape, pair.engine.state, inbox)
    pair.oracle.apply_inbox(applied)
    found = tensor_snapshot(pair.shape, pair.engine.state)
    assert_equal(oracle_snapshot(pair.oracle), found, "inbox")


def check(pair: Pair, state: RowState, errors: list[int]) -> None:
    assert pair.engine is not None
    assert RowState(int(pair.engine.state.state[ROW])) is state
    assert pair.engine.state.error.tolist() == errors


def test_reachable_states_are_all_of_them():
    for state in RowState:
        assert row_in(state).state(ROW) is state


@pytest.mark.parametrize("state", RowState)
def test_submit(state):
    pair = row_in(state)
    before = oracle_snapshot(pair.oracle)
    pair.submit(ROW, range(20, 29), 12)
    apply_only_inbox(pair)
    if state is FREE:
        check(pair, WAITING, NO_ERROR)
        assert pair.oracle.rows[ROW].tokens == list(range(20, 29))
    else:
        check(pair, state, SUBMIT_ERROR)
        assert oracle_snapshot(pair.oracle).rows == before.rows


@pytest.mark.parametrize("state", RowState)
def test_abort(state):
    pair = row_in(state)
    pair.abort(ROW)
    apply_only_inbox(pair)
    check(pair, ABORTING if state in LIVE else state, NO_ERROR)


@pytest.mark.parametrize("state", RowState)
def test_abort_of_old_generation(state):
    pair = row_in(state)
    pair.abort(ROW, gen=pair.oracle.rows[ROW].gen - 1)
    apply_only_inbox(pair)
    check(pair, state, NO_ERROR)


@pytest.mark.parametrize("state", RowState)
def test_abort_gives_every_page_back(state):
    pair = row_in(state)
    pair.abort(ROW)
    pair.abort(0)
    for _ in range(4):
        pair.step()
    pair.check_idle()


@pytest.mark.parametrize("state", USED)
def test_mask(state):
    pair = row_in(state, grammar=True)
    position = pair.oracle.rows[ROW].num_tokens
    old = pair.oracle.rows[ROW].mask_pos
    pair.mask(ROW)
    apply_only_inbox(pair)
    check(pair, DECODE if state is BLOCKED else state, NO_ERROR)
    assert pair.oracle.rows[ROW].mask_pos == (position if state in LIVE else old)


@pytest.mark.parametrize("state", USED)
def test_mask_of_old_generation(state):
    pair = row_in(state, grammar=True)
    before = oracle_snapshot(pair.oracle)
    pair.mask(ROW, gen=pair.oracle.rows[ROW].gen - 1)
    apply_only_inbox(pair)
    check(pair, state, NO_ERROR)
    assert oracle_snapshot(pair.oracle) == before


@pytest.mark.parametrize("state", USED)
def test_mask_of_past_position(state):
    pair = row_in(state, grammar=True)
    row = pair.oracle.rows[ROW]
    old = row.mask_pos
    pair.mask(ROW, row.num_tokens - 1)
    apply_only_inbox(pair)
    check(pair, state, NO_ERROR)
    past = row.num_tokens - 1 if state in LIVE else old
    assert pair.oracle.rows[ROW].mask_pos == max(old, past)


@pytest.mark.parametrize("state", [s for s in RowState if s is not BLOCKED])
def test_mask_for_row_without_grammar(state):
    pair = row_in(state)
    pair.mask(ROW, 3)
    apply_only_inbox(pair)
    check(pair, state, MASK_ERROR if state in LIVE else NO_ERROR)


def test_mask_for_free_row():
    pair = new_pair()
    pair.mask(ROW, 3, gen=0)
    apply_only_inbox(pair)
    check(pair, FREE, NO_ERROR)


def advance_by(
    pair: Pair, *, give: int = 0, emit: bool = False, stop: bool = False, victim: int = -1
) -> None:
    """Advances the tensors by a plan of our own for row 1."""
    assert pair.engine is not None
    empty = TensorEngine(pair.shape)
    inbox, _ = empty.builder.take()
    budget = torch.tensor(0, dtype=torch.int32)
    mine = plan(pair.shape, new_state(pair.shape), inbox, budget)
    mine.give[ROW] = give
    mine.emit[ROW] = emit
    mine.rank[ROW] = 0 if give else pair.shape.max_rows
    mine = mine._replace(victim=torch.tensor(victim, dtype=torch.int32))
    rows = pair.shape.max_rows + 1
    tokens = torch.full((rows, 1), 3, dtype=torch.int32)
    count = torch.zeros(rows, dtype=torch.int32)
    count[ROW] = int(emit)
    is_stop = torch.full((rows, 1), stop)
    advance(pair.shape, pair.engine.state, mine, tokens, count, is_stop)


@pytest.mark.parametrize("stop", [False, True], ids=["token", "stop"])
@pytest.mark.parametrize("state", RowState)
def test_token_granted(state, stop):
    pair = row_in(state)
    assert pair.engine is not None
    row = pair.oracle.rows[ROW]
    before = oracle_snapshot(pair.oracle)
    give = row.num_tokens - row.num_computed if state in (PREFILL, DECODE) else 1
    advance_by(pair, give=give, emit=True, stop=stop)
    if state in (PREFILL, DECODE):
        check(pair, FINISHED if stop else DECODE, NO_ERROR)
        assert int(pair.engine.state.num_tokens[ROW]) == row.num_tokens + 1
        assert int(pair.engine.state.num_computed[ROW]) == row.num_tokens
        return
    check(pair, state, TOKENS_ERROR)
    found = tensor_snapshot(pair.shape, pair.engine.state)
    assert found.rows == before.rows
    assert found.ring == before.ring


def test_token_granted_to_grammar_row_blocks_it():
    pair = row_in(DECODE, grammar=True)
    advance_by(pair, give=1, emit=True)
    check(pair, BLOCKED, NO_ERROR)


def test_last_token_finishes_the_row_whatever_it_is():
    pair = new_pair()
    pair.submit(ROW, [1, 2, 3], 4)
    pair.step()
    check(pair, FINISHED, NO_ERROR)


@pytest.mark.parametrize("state", RowState)
def test_victim(state):
    pair = row_in(state)
    advance_by(pair, victim=ROW)
    is_resident = state in (PREFILL, DECODE, BLOCKED)
    check(pair, RETRACTED if is_resident else state, NO_ERROR)


def test_victim_that_finishes_is_not_retracted():
    pair = row_in(DECODE)
    advance_by(pair, give=1, emit=True, stop=True, victim=ROW)
    check(pair, FINISHED, NO_ERROR)


def test_retracted_row_waits_without_pages_and_resumes():
    pair = row_in(RETRACTED)
    assert pair.oracle.rows[ROW].pages
    pair.abort(0)
    pair.step(0)  # the abort takes this step's release
    assert pair.state(ROW) is RETRACTED
    for _ in range(20):
        pair.step()
        if pair.state(ROW) is DECODE:
            break
    assert pair.state(ROW) is DECODE
    pair.abort(ROW)
    for _ in range(3):
        pair.step()
    pair.check_idle()
