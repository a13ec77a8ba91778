"""The attention kernels for single tokens in Triton's CPU interpreter, against their oracles.

Run as a program of its own with TRITON_INTERPRET=1 (`run_interpreted` of `interpreted.py`). Without
arguments it runs all checks, else those named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor
from triton.runtime import interpreter

from compiled_engine.custom_ops import attention_work_spec, attention_work_triton
from compiled_engine.custom_ops.attention_decode import DecodeCall, Options, Tuning
from compiled_engine.custom_ops.attention_work import Heads, WorkShape, work_shape
from compiled_engine.custom_ops.attention_work_spec import work_list_spec
from compiled_engine.custom_ops.attention_work_triton import launch_work
from compiled_engine.custom_ops.reference_quant import quantize_fp8
from tests.helpers.paged_case import FP8, CaseShape, PagedCase, Row, make_case
from tests.helpers.tolerances import assert_close

SMALL = Tuning(block=32, merge_block=4)


@contextmanager
def readable_loop_bounds() -> Iterator[None]:
    """Lets loop bounds be tensors of one element, which newer numpy refuses to take as numbers."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: object) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with mock.patch.object(interpreter, "_patch_lang_tensor", patch):
        yield


def shape_of(case: PagedCase, lanes: int, *, is_decode: bool) -> WorkShape:
    heads = Heads(case.shape.num_heads, case.shape.num_kv_heads)
    counts = (case.q.shape[0], case.step.seq_rows.shape[0])
    return work_shape(lanes, heads, *counts, is_decode=is_decode)


def work_of(case: PagedCase, lanes: int, *, is_decode: bool) -> tuple[Tensor, WorkShape]:
    """The work list from the kernels, which must equal the plain spelling."""
    shape, size = shape_of(case, lanes, is_decode=is_decode), case.shape.page_size
    expected = work_list_spec(shape, case.step, size, is_decode=is_decode)
    work = torch.zeros_like(expected)
    launch_work(work, shape, case.step, size, is_decode=is_decode)
    for name, region in shape.split(work).items():
        assert torch.equal(region, shape.split(expected)[name]), f"region {name} differs"
    return work, shape


def check_call(case: PagedCase, lanes: int, *, is_decode: bool = True) -> None:
    """The decode kernels' results and zeros; tokens of longer queries are left alone."""
    work, shape = work_of(case, lanes, is_decode=is_decode)
    options = Options(case.scale, case.window, case.soft_cap, case.sinks)
    caches, table, positions = (case.k_cache, case.v_cache), case.step[0], case.step[2]
    call = DecodeCall(case.q, caches, table, positions, work, shape, options, tuning=SMALL)
    call.partials.fill_(float("nan"))
    call.sums.fill_(float("nan"))
    out = torch.full_like(case.q, float("nan"))
    call.split(out)
    call.merge(out)
    expected, served = case.oracle(), torch.ones(len(out), dtype=torch.bool)
    if not is_decode:
        starts = case.step.query_start_loc.tolist()
        for begin, end in pairwise(starts):
            served[begin:end] = end - begin == 1
    factor = 4 if case.shape.dtype == torch.float32 else 2  # weights are rounded too
    assert_close("served", out[served], expected[served], factor=factor)
    assert_quantized(call, out, served)
    assert out[~served].isnan().all(), "a token of a longer query was written"
    assert not out[case.num_real :].any(), "padding tokens must be 0"


def assert_quantized(call: DecodeCall, out: Tensor, served: Tensor) -> None:
    """In e4m3 the same results, quantised; some are beyond the largest."""
    static_scale = torch.tensor([1.0 / 300])
    options = replace(call.options, out_scale=static_scale)
    given = (call.q, call.caches, call.block_table, call.positions, call.work, call.shape, options)
    got = torch.full(out.shape, 7.0).to(FP8)
    DecodeCall(*given, tuning=SMALL).launch(got)
    expected = quantize_fp8(out.flatten(1), "tensor", static_scale)[0].view(out.shape)
    assert torch.equal(got[served].float(), expected[served].float())
    assert (got[~served].float() == 7).all(), "a token of a longer query was written"


DECODE = [Row(1, 1), Row(1, 2), Row(1, 63), Row(1, 64), Row(1, 65), Row(1, 130)]
CHUNKS = [Row(3, 70), Row(1, 40), Row(2, 2)]


def check_plain() -> None:
    """Odd lengths, one lane and many, chunks served token by token, few tokens, none."""
    check_call(make_case(DECODE, CaseShape()), 4)
    check_call(make_case(CHUNKS, CaseShape(2, 1)), 1)
    check_call(make_case([Row(1, 200)], CaseShape(3, 1)), 11)
    check_call(make_case([], CaseShape(2, 1)), 2)


def check_mixed() -> None:
    """Sequences with one query token among longer ones."""
    rows = [Row(1, 40), Row(7, 7), Row(1, 90), Row(133, 195), Row(1, 1)]
    check_call(make_case(rows, CaseShape(2, 1)), 3, is_decode=False)
    check_call(make_case([], CaseShape(2, 1, num_padding=0)), 3, is_decode=False)


def check_groups() -> None:
    """One group, several, none that is large enough, members that share less, chunks as a group."""
    one = [Row(1, 60 + 9 * i, 0, 3) for i in range(6)]
    two = [*one, *(Row(1, 90 + i, 1, 5) for i in range(4)), Row(1, 77)]
    with fewer_shared_positions():
        check_call(make_case(two, CaseShape(2, 1)), 5)
        check_call(make_case([Row(4, 64), *two], CaseShape(2, 1)), 3, is_decode=False)
        check_call(make_case([*one, Row(1, 80, 0, 1)], CaseShape(20, 1)), 3)
        check_call(make_case([Row(1, 48, 0, 3)] * 5, CaseShape(2, 1)), 2)
        check_call(make_case([Row(6, 70), Row(1, 30)], CaseShape(3, 1)), 1)
        check_call(make_case(one[:3], CaseShape(2, 1)), 2)


def check_costs() -> None:
    """Work lists with other costs of units and tiles, with prefixes and without."""
    one = [Row(1, 60 + 9 * i, 0, 3) for i in range(6)]
    two = [*one, *(Row(1, 90 + i, 1, 5) for i in range(4)), Row(1, 77)]
    short = [*(Row(1, 1 + i % 3) for i in range(9)), Row(1, 700), Row(1, 5)]
    for unit, group, own in ((0, 1, 1), (3, 1, 1), (1, 1, 2), (9, 3, 4), (40, 5, 4)):
        costs = {"UNIT_COST": unit, "GROUP_COST": group, "OWN_COST": own}
        fields = {name.lower(): value for name, value in costs.items()}
        config = partial(attention_work_triton.WorkConfig, **fields)
        with (
            fewer_shared_positions(),
            mock.patch.object(attention_work_triton, "WorkConfig", config),
            mock.patch.multiple(attention_work_spec, **costs),
        ):
            for lanes in (2, 5, 13, 33):
                work_of(make_case(two, CaseShape(2, 1)), lanes, is_decode=True)
                work_of(make_case(short, CaseShape(2, 1)), lanes, is_decode=True)
            work_of(make_case([Row(4, 64), *two], CaseShape(2, 1)), 7, is_decode=False)
            work_of(make_case([Row(1, 200)], CaseShape(2, 1)), 4, is_decode=True)


@contextmanager
def fewer_shared_positions() -> Iterator[None]:
    """Lets short prefixes make groups, so that a case stays small."""
    modules = (attention_work_triton, attention_work_spec)
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "MIN_SHARED_POSITIONS", 32))
        yield


def check_options() -> None:
    """Window, soft cap and sinks, for single tokens and for groups."""
    rows = [*(Row(1, 66 + 9 * i, 0, 3) for i in range(4)), Row(1, 7), Row(2, 100)]
    sinks = torch.linspace(-2, 3, 3)
    with fewer_shared_positions():
        for window, soft_cap, sink in ((1, 0.0, None), (30, 1.5, sinks), (75, 0.0, sinks)):
            case = make_case(rows, CaseShape(3, 1))
            case.window, case.soft_cap, case.sinks = window, soft_cap, sink
            check_call(case, 3)


def check_shapes() -> None:
    """Head dims, page sizes, groups of heads and dtypes."""
    rows = [Row(1, 65), Row(1, 17)]
    for shape in (
        CaseShape(3, 1, 80, 32),
        CaseShape(2, 2, 96, 64),
        CaseShape(40, 2, 64, 16),
        CaseShape(4, 1, 256, 16, torch.float16),
        CaseShape(4, 2, 64, 16, torch.float16, FP8),
    ):
        check_call(make_case(rows, shape), 3)


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    checks = {name: value for name, value in globals().items() if name.startswith("check_")}
    del checks["check_call"]
    with readable_loop_bounds():
        for name in names or checks:
            checks[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
