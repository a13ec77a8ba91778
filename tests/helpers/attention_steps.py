"""Steps of rows that decode, and their work lists."""

from __future__ import annotations

from compiled_engine.custom_ops.attention_work import Heads, WorkShape, work_shape
from compiled_engine.custom_ops.attention_work_spec import work_list_spec
from tests.helpers.paged_case import PagedCase, Row

SHARED = [Row(1, 300 + 9 * i, 0, 16) for i in range(9)]
OWN = [Row(1, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 130, 400)]
CHUNKS = [Row(20, 300), Row(1, 40), Row(9, 9), Row(1, 200), Row(2, 2)]
STEPS = {
    "own": OWN,
    "shared": SHARED,
    "both": [*OWN, *SHARED, *(Row(1, 200 + i, 1, 9) for i in range(4))],
    "chunks": CHUNKS,
    "one": [Row(1, 1150)],
    "none": [],
}


def lists_of(
    case: PagedCase, lanes: int, *, is_decode: bool
) -> tuple[WorkShape, dict[str, list[int]]]:
    heads = Heads(case.shape.num_heads, case.shape.num_kv_heads)
    counts = (case.q.shape[0], case.step.seq_rows.shape[0])
    shape = work_shape(lanes, heads, *counts, is_decode=is_decode)
    work = work_list_spec(shape, case.step, case.shape.page_size, is_decode=is_decode)
    return shape, {name: region.tolist() for name, region in shape.split(work).items()}
