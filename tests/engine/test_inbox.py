"""The way in: long prompts in pieces, limits of a step, aborts on the way, chain sums."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from compiled_engine.scheduler.inbox import AbortEntry, InboxBuilder, MaskEntry, SubmitEntry
from compiled_engine.scheduler.state import known_tokens
from tests.helpers.python_scheduler import RowState
from tests.helpers.scheduler_keys import chain_links, to_signed
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape
from tests.helpers.scheduler_snapshot import tensor_snapshot


def make_pair(**changes: Any) -> Pair:
    shape = small_shape(**{"max_model_len": 60} | changes)
    return Pair(shape, TensorEngine(shape))


def submit_to(builder: InboxBuilder, row: int, prompt: list[int], **fields: Any) -> None:
    values = {"gen": 1, "arrival": row, "priority": 0, "salt": 0, "max_len": len(prompt) + 4}
    builder.submit(row=row, prompt=prompt, **values | fields)


@pytest.mark.parametrize("max_pieces", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 9, 24, 25, 55])
def test_prompt_in_pieces_arrives_whole(length, max_pieces):
    pair = make_pair(max_pieces=max_pieces)
    prompt = [random.Random(length).randrange(2**20) for _ in range(length)]
    pair.submit(2, prompt, 59, salt=77)
    steps = 0
    while pair.state(2) is RowState.FREE:
        pair.step(0)
        steps += 1
    assert steps == math.ceil(math.ceil(length / 8) / max_pieces)
    assert pair.state(2) is RowState.WAITING
    assert pair.engine is not None
    assert known_tokens(pair.shape, pair.engine.state, 2) == prompt
    found = tensor_snapshot(pair.shape, pair.engine.state).rows[2]["links"]
    assert found == [to_signed(link) for link in chain_links(77, prompt, 4)]


@pytest.mark.parametrize(
    ("page_size", "token_page_size"), [(1, 1), (1, 4), (2, 2), (4, 4), (4, 16)]
)
def test_chain_of_prompt_and_answer_is_that_of_the_whole_text(page_size, token_page_size):
    pair = make_pair(page_size=page_size, token_page_size=token_page_size, num_pages=61)
    prompt = [(7 * i) % 13 for i in range(11)]
    pair.submit(0, prompt, 41, salt=2**61)
    texts: list[list[int]] = []
    while not texts or pair.state(0) is not RowState.FINISHED:
        pair.step(sample=lambda row, position: position % 5)
        texts.append(pair.oracle.rows[0].tokens)
    assert pair.engine is not None
    text = prompt + [position % 5 for position in range(11, 41)]
    assert known_tokens(pair.shape, pair.engine.state, 0) == text
    found = tensor_snapshot(pair.shape, pair.engine.state).rows[0]["links"]
    assert found == [to_signed(link) for link in chain_links(2**61, text, page_size)]


def test_several_prompts_share_the_pieces_of_a_step():
    pair = make_pair(max_pieces=3, max_submits=4)
    for row, length in enumerate((5, 20, 3, 9)):
        pair.submit(row, [row + 1] * length, 30)
    arrived = []
    for _ in range(4):
        pair.step(0)
        arrived.append([row for row in range(4) if pair.state(row) is RowState.WAITING])
    # Pieces are sent in order of submission: 1 + 3 + 1 + 2 of them, three a step.
    assert arrived == [[0], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_submits_a_step_are_limited():
    pair = make_pair(max_submits=1)
    for row in range(3):
        pair.submit(row, [1, 2], 4)
    for step in range(3):
        pair.step(0)
        waiting = [row for row in range(4) if pair.state(row) is RowState.WAITING]
        assert waiting == list(range(step + 1))


def test_entries_of_one_step_are_submit_then_abort_then_mask():
    pair = make_pair()
    gens = [pair.submit(row, [1, 2, 3], 9, grammar=True) for row in range(2)]
    for row, gen in enumerate(gens):
        pair.mask(row, 3, gen)
    pair.abort(0, gens[0])  # whose mask is dropped
    pair.step()
    kinds = [SubmitEntry, SubmitEntry, AbortEntry, MaskEntry]
    assert [type(entry) for entry in pair.applied] == kinds
    assert pair.applied[-1].row == 1
    pair.abort(1, gens[1])
    pair.step()
    pair.step()
    pair.check_idle()


@pytest.mark.parametrize("sent_steps", [0, 1, 2, 3])
def test_abort_during_upload_leaves_nothing_behind(sent_steps):
    pair = make_pair(max_pieces=1)
    gen = pair.submit(1, range(30), 40)
    for _ in range(sent_steps):
        pair.step()
        assert pair.state(1) is RowState.FREE
    pair.abort(1, gen)
    for _ in range(4):
        planned = pair.step()
        assert not any(planned.give.values()), "an aborted prompt was computed"
    assert pair.sink.is_empty
    pair.check_idle()
    pair.submit(1, [9, 8, 7, 6, 5], 8)
    pair.step()
    assert pair.oracle.rows[1].tokens == [9, 8, 7, 6, 5, 1]


def test_mask_waits_for_its_submit():
    pair = make_pair(max_pieces=1)
    gen = pair.submit(1, range(20), 30, grammar=True)
    pair.mask(1, 20, gen)
    pair.step(0)
    assert pair.applied == []
    for _ in range(2):
        pair.step(0)
    assert pair.oracle.rows[1].mask_pos == 20


def test_masks_and_aborts_over_the_limit_come_later_in_order():
    shape = small_shape(max_masks=2, max_aborts=1)
    builder = InboxBuilder(shape)
    for position in range(5):
        builder.mask(0, 1, position)
    builder.abort(2, 1)
    builder.abort(3, 1)
    taken = []
    while not builder.is_empty:
        taken.append(builder.take()[1])
    masks = [[e.position for e in step if isinstance(e, MaskEntry)] for step in taken]
    aborts = [[e.row for e in step if isinstance(e, AbortEntry)] for step in taken]
    assert masks == [[0, 1], [2, 3], [4]]
    assert aborts == [[2], [3], []]


def test_inbox_tensors_are_not_shared_between_steps():
    # The device may read a step's tensors while the host fills the next ones.
    builder = InboxBuilder(small_shape())
    submit_to(builder, 0, [1, 2, 3])
    first, _ = builder.take()
    kept = [part.clone() for part in first]
    submit_to(builder, 1, [4, 5, 6])
    builder.take()
    assert all(bool((a == b).all()) for a, b in zip(first, kept, strict=True))


def test_submit_to_used_row_keeps_its_text():
    pair = make_pair()
    pair.submit(0, range(9), 20)
    pair.step()
    pair.submit(0, range(30, 50), 30)
    pair.step()
    assert pair.engine is not None
    assert pair.engine.state.error.tolist() == pair.oracle.errors == [1, 0, 0, 0, 0]
    assert known_tokens(pair.shape, pair.engine.state, 0) == [*range(9), 1]
    free = int(pair.engine.state.num_free_token_pages)
    assert free == pair.shape.num_token_pages - 2, "the dropped prompt kept token pages"


def test_no_token_page_is_counted():
    shape = small_shape(max_rows=2, num_token_pages=1)
    engine = TensorEngine(shape)
    submit_to(engine.builder, 0, list(range(9)))
    engine.take()
    engine.plan(0)
    assert engine.state.error.tolist() == [0, 0, 0, 1, 0]


def test_token_pages_come_back_when_rows_end():
    pair = make_pair(num_token_pages=8, max_rows=2)  # 64 tokens for two rows of up to 30
    for turn in range(6):
        for row in (0, 1):
            pair.submit(row, [turn + row] * 10, 30)
        while not pair.is_idle or not pair.sink.is_empty:
            pair.step()
        pair.check_idle()
