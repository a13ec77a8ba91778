"""From grants to flattened inputs: order, positions, slots and padding, with numbers by hand."""

from __future__ import annotations

import pytest
import torch

from compiled_engine.layout import StepInputs, layout
from tests.helpers.scheduler_pair import Pair, TensorEngine, small_shape


def mixed_step() -> Pair:
    """Row 2 decodes, row 0 goes on with its prompt, row 3 is admitted now; row 1 is FREE."""
    shape = small_shape(max_tokens=16)
    pair = Pair(shape, TensorEngine(shape))
    pair.submit(2, [20, 21, 22, 23, 24], 12)
    pair.step(sample=lambda row, position: 25)
    pair.submit(0, range(100, 111), 20)
    pair.step(5, sample=lambda row, position: 26)
    pair.submit(3, [30, 31], 9)
    pair.half_step(16)
    return pair


def laid_out(pair: Pair, num_tokens: int) -> StepInputs:
    assert pair.engine is not None
    assert pair.engine.last_plan is not None
    return layout(pair.shape, pair.engine.state, pair.engine.last_plan, num_tokens)


@pytest.mark.parametrize("num_tokens", [10, 11, 16, 64])
def test_mixed_step(num_tokens):
    pair = mixed_step()
    tables = {row: pair.oracle.rows[row].pages for row in (0, 2, 3)}
    found = laid_out(pair, num_tokens)
    padding = num_tokens - 10
    assert found.token_ids.tolist()[:10] == [26, *range(104, 111), 30, 31]
    assert found.positions.tolist()[:10] == [6, *range(4, 11), 0, 1]
    assert found.token_rows.tolist()[:10] == [2, *[0] * 7, 3, 3]
    slots = [tables[2][1] * 4 + 2]
    slots += [tables[0][1] * 4 + i for i in range(4)] + [tables[0][2] * 4 + i for i in range(3)]
    slots += [tables[3][0] * 4, tables[3][0] * 4 + 1]
    assert found.slot_mapping.tolist() == slots + [-1] * padding
    assert found.seq_rows.tolist() == [2, 0, 3, 4]
    assert found.seq_lens.tolist() == [7, 11, 2, 0]
    assert found.query_start_loc.tolist() == [0, 1, 8, 10, 10]
    assert found.logits_indices.tolist()[:3] == [0, 7, 9]


def test_padding_is_in_range():
    found = laid_out(mixed_step(), 64)
    assert found.token_ids[10:].min() >= 0
    assert found.positions[10:].min() >= 0
    assert found.positions[10:].max() < 32
    assert set(found.token_rows[10:].tolist()) == {4}, "padding belongs to the padding row"
    assert 0 <= int(found.logits_indices.min())
    assert int(found.logits_indices.max()) < 64


def test_reads_only():
    pair = mixed_step()
    assert pair.engine is not None
    state = pair.engine.state
    before = [tensor.clone() for tensor in (*state.groups[0], state.token_pages, state.num_tokens)]
    laid_out(pair, 16)
    after = (*state.groups[0], state.token_pages, state.num_tokens)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_step_without_work_is_all_padding():
    shape = small_shape()
    pair = Pair(shape, TensorEngine(shape))
    pair.half_step(8)
    found = laid_out(pair, 8)
    assert found.slot_mapping.tolist() == [-1] * 8
    assert found.seq_rows.tolist() == [4] * 4
    assert found.query_start_loc.tolist() == [0] * 5
    assert found.seq_lens.tolist() == [0] * 4


def test_one_token():
    shape = small_shape(max_tokens=1)
    pair = Pair(shape, TensorEngine(shape))
    pair.submit(1, [7, 8], 5)
    pair.step()
    pair.half_step(1)
    found = laid_out(pair, 1)
    assert found.token_ids.tolist() == [8]
    assert found.positions.tolist() == [1]
    assert found.seq_lens.tolist()[0] == 2


def test_dtypes():
    found = laid_out(mixed_step(), 16)
    assert found.slot_mapping.dtype == torch.int64
    assert found.seq_lens.dtype == torch.int32
    assert found.query_start_loc.dtype == torch.int32
    assert found.seq_rows.dtype == torch.int32
