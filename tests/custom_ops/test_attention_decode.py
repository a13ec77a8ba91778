"""Attention of single tokens on a GPU: its work list, and its kernels.

The Triton kernels run here in Triton's CPU interpreter, in one process of their own, and the CUDA
kernel on emulated warps; on a GPU they run as the op does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import attention_decode_cuda, attention_work_spec
from compiled_engine.custom_ops.attention_choice import (
    CANDIDATES,
    attention_traits,
    select_attention,
)
from compiled_engine.custom_ops.attention_decode_cuda import (
    CudaDecode,
    CudaTuning,
    Options,
)
from compiled_engine.custom_ops.attention_work_spec import reference_work, work_list_spec
from compiled_engine.custom_ops.reference_quant import quantize_fp8
from compiled_engine.custom_ops.registry import Target
from tests.helpers.attention_steps import CHUNKS, OWN, SHARED, STEPS, lists_of
from tests.helpers.cuda_emulator import EmulatorError
from tests.helpers.emulated_attention import run_emulated
from tests.helpers.interpreted import run_interpreted
from tests.helpers.paged_case import FP8, CaseShape, PagedCase, Row, make_case


def test_the_kernels_in_the_interpreter():
    run_interpreted("tests.helpers.interpreted_attention")


# --- the CUDA kernel, on emulated warps -----------------------------------------------------------

EMULATED = {
    "own": (OWN, CaseShape(4, 2, 64, 16, torch.bfloat16)),
    "shared": (SHARED, CaseShape(4, 1, 64, 16, torch.bfloat16)),
    "both": (STEPS["both"], CaseShape(3, 1, 80, 32, torch.float16)),
    "many-members": ([Row(1, 140 + 3 * i, 0, 8) for i in range(17)], CaseShape(4, 1, 64, 16)),
    "chunks": (CHUNKS, CaseShape(8, 8, 64, 64, torch.bfloat16)),
    "group-12": ([Row(1, 65), Row(1, 300)], CaseShape(24, 2, 128, 16, torch.bfloat16)),
    "long": ([Row(1, 2200)], CaseShape(4, 1, 64, 16, torch.bfloat16)),
    "none": ([], CaseShape(2, 1, 64, 16, torch.bfloat16)),
    "same-row": ([Row(40, 300), Row(1, 50)], CaseShape(4, 2, 64, 32, torch.bfloat16)),
    "page-ends": ([Row(1, 160 + 16 * (i % 2), 0, 10) for i in range(5)], CaseShape(2, 1, 64, 16)),
}


def call_of(
    case: PagedCase,
    lanes: int,
    *,
    is_decode: bool = True,
    tuning: CudaTuning | None = None,
) -> CudaDecode:
    shape, _ = lists_of(case, lanes, is_decode=is_decode)
    work = work_list_spec(shape, case.step, case.shape.page_size, is_decode=is_decode)
    options = Options(case.scale, case.window, case.soft_cap, case.sinks)
    step = ((case.k_cache, case.v_cache), case.step[0], case.step[2], work, shape, options)
    call = CudaDecode(case.q, *step, tuning=tuning)
    call.partials.fill_(float("nan"))
    return call


def emulate(case: PagedCase, lanes: int, *, is_decode: bool = True, stages: int = 3) -> Tensor:
    call = call_of(case, lanes, is_decode=is_decode, tuning=CudaTuning(stages=stages))
    before = call.work.clone()
    results = []
    for order in (0, 2, 5):  # of threads
        out = torch.full_like(case.q, float("nan"))
        run_emulated(call, out, order, case.new_kv())
        results.append(out)
    assert all(torch.equal(results[0].nan_to_num(9), r.nan_to_num(9)) for r in results)
    assert torch.equal(call.work, before), "the work list must be as it was, counters and slots 0"
    return results[0]


@pytest.mark.parametrize("lanes", [1, 3, 20])
@pytest.mark.parametrize("name", EMULATED)
def test_the_cuda_kernel_emulated(name, lanes):
    rows, shape = EMULATED[name]
    if shape.dtype == torch.float32:
        shape = replace(shape, dtype=torch.bfloat16)
    case = make_case(rows, shape)
    assert_near(case, emulate(case, lanes, stages=1 + lanes % 3))


@pytest.mark.parametrize(
    ("costs", "lanes"), [((0, 1, 1), 7), ((5, 3, 4), 5), ((20, 1, 1), 12), ((2, 5, 4), 33)]
)
@pytest.mark.parametrize("name", ["both", "own"])
def test_costs_change_no_result_emulated(name, costs, lanes, monkeypatch):
    """High costs of units leave lanes without tiles."""
    for field, cost in zip(("UNIT_COST", "GROUP_COST", "OWN_COST"), costs, strict=True):
        monkeypatch.setattr(attention_work_spec, field, cost)
    case = make_case(STEPS[name], CaseShape(4, 2, 64, 16, torch.bfloat16))
    assert_near(case, emulate(case, lanes, stages=2))


@pytest.mark.parametrize("size", [16, 48, 64])
def test_tiles_of_a_prefix_may_have_any_size_emulated(size, monkeypatch):
    """The size changes no result."""
    case = make_case(STEPS["both"], CaseShape(4, 1, 64, 32, torch.bfloat16))
    for module in (attention_work_spec, attention_decode_cuda):
        monkeypatch.setattr(module, "GROUP_TILE", size)
    assert_near(case, emulate(case, 6))


@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (100, 2.0), (250, 0.0)])
def test_options_of_the_cuda_kernel_emulated(window, soft_cap):
    case = make_case(STEPS["both"], CaseShape(4, 1, 64, 16, torch.bfloat16))
    case.window, case.soft_cap = window, soft_cap
    case.sinks = torch.linspace(-2, 3, 4)
    assert_near(case, emulate(case, 5))


@pytest.mark.parametrize("name", ["own", "both", "chunks", "none"])
def test_results_in_8_bits_are_the_plain_ones_quantised_emulated(name):
    rows, shape = EMULATED[name]
    case = make_case(rows, shape)
    case.sinks = torch.linspace(-2, 3, shape.num_heads)
    call, plain = call_of(case, 5), torch.full_like(case.q, float("nan"))
    run_emulated(call, plain, 0, case.new_kv())
    static_scale = torch.tensor([1.0 / 300])  # some are beyond the largest
    call.options = replace(call.options, out_scale=static_scale)
    got = torch.full_like(case.q, 7.0, dtype=FP8)
    run_emulated(call, got, 0, case.new_kv())
    expected = quantize_fp8(plain.flatten(1), "tensor", static_scale)[0].view(plain.shape)
    assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("factor", [0.01, 8, 60])
@pytest.mark.parametrize("name", ["own", "shared", "long"])
def test_scores_of_any_size_emulated(name, factor):
    """Sums are made relative to new maxima seldom, or often."""
    rows, shape = EMULATED[name]
    case = make_case(rows, replace(shape, dtype=torch.float16 if name == "own" else torch.bfloat16))
    case.q *= factor
    assert_near(case, emulate(case, 5, stages=2))


def test_the_cuda_kernel_leaves_longer_queries_alone_emulated():
    case = make_case([*CHUNKS, *SHARED], CaseShape(4, 1, 64, 16, torch.bfloat16))
    out = emulate(case, 4, is_decode=False)
    starts = case.step.query_start_loc.tolist()
    longer = torch.zeros(len(out), dtype=torch.bool)
    for begin, end in pairwise(starts):
        longer[begin:end] = end - begin > 1
    assert out[longer].isnan().all()
    out[longer] = case.oracle()[longer].to(out.dtype)
    assert_near(case, out)


@pytest.mark.parametrize("name", ["own", "both", "long"])
def test_early_copies_change_nothing_emulated(name):
    rows, shape = EMULATED[name]
    case = make_case(rows, replace(shape, dtype=torch.bfloat16))
    results, counts = [], []
    for early in (0, 2):
        out = torch.empty_like(case.q)
        call = call_of(case, 7, tuning=CudaTuning(early=early))
        counts.append(run_emulated(call, out, fresh=case.new_kv()))
        results.append(out)
    assert counts[0] == 0 < counts[1]
    assert torch.equal(*results)


def test_the_emulator_sees_copies_that_are_too_early():
    case = make_case([Row(1, 100)], CaseShape(4, 2, 64, 16, torch.bfloat16))
    call, out = call_of(case, 2), torch.empty_like(case.q)
    with pytest.raises(EmulatorError, match="copies what an earlier kernel still writes"):
        run_emulated(call, out, fresh=[case.k_cache])


@pytest.mark.parametrize(
    ("limits", "stages"),
    [((232448, 233472), 2), ((166912, 167936), 2), ((101376, 102400), 1)],
    ids=["sm_90", "sm_80", "sm_86"],
)
def test_two_blocks_of_the_cuda_kernel_fit_a_multiprocessor(limits, stages):
    case = make_case(OWN, CaseShape(32, 8, 128, 16, torch.bfloat16))
    assert call_of(case, 3).variant(limits).stages == stages


# --- which implementation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 20}, "has head dims (64, 80, 96, 128, 256), not 20"),
        ({"page_size": 8}, "has page sizes (16, 32, 64), not 8"),
        ({"has_query_cache": 0}, "needs a KV cache of the dtype of the queries or float8_e4m3fn"),
        ({"num_rows": 1025}, "serves at most 1024 rows, not 1025"),
        ({"has_fp8_cache": 1, "arch": 80}, "reads float8_e4m3fn from sm_89 on, this is sm_80"),
        ({}, None),
    ],
)
def test_triton_says_why_it_cannot_serve(change, reason):
    q, cache = torch.empty(2, 4, 64), torch.empty(3, 16, 2, 64)
    traits = {**attention_traits(q, cache, 2), "arch": 90, **change}
    triton = next(c for c in CANDIDATES if c.name == "triton")
    assert triton.rejection(Target("cuda", 90), torch.float32, traits) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 256}, "has head dims (64, 80, 96, 128), not 256"),
        ({"page_size": 8}, "has page sizes (16, 32, 64), not 8"),
        ({"group": 17}, "has at most 16 query heads a KV head, not 17"),
        ({"has_query_cache": 0}, "needs a KV cache of the dtype of the queries"),
        ({"has_nvrtc": 0}, "needs the cuda-bindings package"),
        ({"num_rows": 1025}, "serves at most 1024 rows, not 1025"),
        ({}, None),
    ],
)
def test_cuda_says_why_it_cannot_serve(change, reason):
    q, cache = torch.empty(2, 4, 64), torch.empty(3, 16, 2, 64)
    traits = {**attention_traits(q, cache, 2), "has_nvrtc": 1, **change}
    cuda = next(c for c in CANDIDATES if c.name == "cuda")
    assert cuda.rejection(Target("cuda", 90), torch.bfloat16, traits) == reason
    assert cuda.rejection(Target("cuda", 90), torch.float32, traits) == (
        "has no version for torch.float32"
    )


# --- on a GPU -------------------------------------------------------------------------------------

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
GPU_SHAPES = {
    "8b": CaseShape(32, 8, 128, 16, torch.bfloat16),
    "mha-64-page-32": CaseShape(8, 8, 64, 32, torch.float16),
    "gqa-5-80": CaseShape(40, 8, 80, 16, torch.bfloat16),
    "mqa-96-page-64": CaseShape(8, 1, 96, 64, torch.bfloat16),
    "256": CaseShape(16, 2, 256, 16, torch.bfloat16),
    "fp8": CaseShape(32, 8, 128, 16, torch.bfloat16, FP8),
    "fp32": CaseShape(4, 2, 64, 16, torch.float32),
}


def assert_near(case: PagedCase, got: Tensor) -> None:
    expected = case.oracle()
    error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= LIMITS[case.shape.dtype]
    assert not got[case.num_real :].any(), "padding tokens must be 0"


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("impl", ["cuda", "triton"])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES.keys())
def test_the_op_on_a_gpu(shape, step, is_decode, impl):
    case = make_case(STEPS[step], shape, device="cuda")
    if impl == "cuda" and select_attention("", case.q, case.k_cache, 8) != impl:
        pytest.skip("the CUDA kernel does not serve this shape")
    arguments = case.work_arguments(is_decode=is_decode)
    work = torch.ops.ce.attention_work.default(*arguments)
    assert torch.equal(work, reference_work(*arguments))
    inputs = case.arguments(work, is_decode=is_decode, kernel=impl)
    assert_near(case, torch.ops.ce.paged_attention.default(*inputs))
    assert torch.equal(work, reference_work(*arguments)), "the counters must be 0 again"


@pytest.mark.gpu
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (100, 2.0), (250, 0.0)])
def test_options_on_a_gpu(window, soft_cap, is_decode):
    case = make_case([*STEPS["both"], *CHUNKS], GPU_SHAPES["8b"], device="cuda")
    case.window, case.soft_cap = window, soft_cap
    case.sinks = torch.linspace(-2, 3, 32, device="cuda")
    work = torch.ops.ce.attention_work.default(*case.work_arguments(is_decode=is_decode))
    got = torch.ops.ce.paged_attention.default(*case.arguments(work, is_decode=is_decode))
    assert_near(case, got)


@pytest.mark.gpu
def test_one_captured_graph_serves_other_lengths():
    small, large = ([Row(1, n + 10 * i) for i in range(6)] for n in (5, 900))
    shape = CaseShape(32, 8, 128, 16, torch.bfloat16)
    case, other = (make_case(rows, shape, device="cuda") for rows in (large, small))
    step = [tensor.clone() for tensor in case.step]

    def run() -> Tensor:
        work = torch.ops.ce.attention_work.default(*step, 16, 32, 8, True)
        tensors = (step[0], step[3], step[4], step[5], step[1], step[2], work)
        caches = (case.k_cache, case.v_cache)
        options = (0, 0.0, None, True, "")
        return torch.ops.ce.paged_attention.default(case.q, *caches, *tensors, case.scale, *options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    step[2].copy_(other.step.positions)
    step[4].copy_(other.step.seq_lens)
    graph.replay()
    case.step = case.step._replace(positions=step[2], seq_lens=step[4])
    assert_near(case, out)
