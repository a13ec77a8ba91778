"""The step on a GPU: every fast path against its plain twin, and what steady decoding costs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from compiled_engine import engine as build
from compiled_engine.engine import Engine
from compiled_engine.errors import ConfigError
from compiled_engine.faults import Fault
from compiled_engine.ipc import ClientFrame
from compiled_engine.memory import MemoryNeeds
from compiled_engine.request import Request, SamplingParams, ThinkingBudget
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import assert_idle, run_requests, tiny_engine
from tests.helpers.gpu_engine import (
    LENGTHS,
    OPTIONS,
    SHAPE,
    agents,
    exact_engine,
    prompts_of,
    write_exact_model,
)
from tests.helpers.grammar_runs import run_grammars
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.turned_engine import TurnedEngine

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "qwen3"
    write_tiny_model(path, family="qwen3", **SHAPE)
    return path


@pytest.fixture(scope="module")
def kept(folder: Path) -> Engine:
    return tiny_engine(folder, **OPTIONS)


@pytest.fixture
def compiled(kept: Engine) -> Engine:
    """The module's engine without what earlier tests left in its cache: prompts found there make
    steps of other sizes, and those other sums."""
    kept.loop.reset_prefix_cache()
    return kept


@pytest.fixture(scope="module")
def exact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact_model(tmp_path_factory.mktemp("gpu-exact") / "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_mode": "none"},
        {"cudagraph_mode": "piecewise"},
        {"scheduler": "torch"},
        {"check_graphs": True},
        {"inductor_pdl": True},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_gpu_paths_give_equal_tokens(folder, compiled, options):
    """The same kernels in another arrangement: not a token may differ."""
    other = tiny_engine(folder, **OPTIONS, **options)
    for stagger, prompts in ((0, prompts_of(1, *LENGTHS)), (3, agents(2))):
        expected = run_requests(compiled, prompts, GREEDY, stagger=stagger)
        got = run_requests(other, prompts, GREEDY, stagger=stagger)
        assert got.tokens == expected.tokens
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=4, max_tokens=8)
    biased = SamplingParams(temperature=0.0, logit_bias={7: 5.0}, max_tokens=8, ignore_eos=True)
    for params in (drawn, biased):
        prompts = prompts_of(3, 20, 40)
        expected = run_requests(compiled, prompts, params)
        assert run_requests(other, prompts, params).tokens == expected.tokens
    assert_idle(other)


@pytest.mark.parametrize(
    "options", [{"device_loop": True}, {"overlap_schedule": "off"}], ids=["device-loop", "in-turn"]
)
def test_gpu_steps_of_one_size_give_equal_tokens(folder, compiled, options):
    """Steps of one size give the same tokens wherever and whenever they are launched.

    A loop keeps its size until it ends, and steps that follow one another in turn know sooner how
    many rows go on; another size may mean other kernels, and near-ties may then fall otherwise.
    """
    other = tiny_engine(folder, **OPTIONS, **options)
    for count in (1, 3, 8):
        together = prompts_of(count, *[20] * count)
        expected = run_requests(compiled, together, GREEDY).tokens
        assert run_requests(other, together, GREEDY).tokens == expected
    for stagger, prompts in ((0, prompts_of(1, *LENGTHS)), (3, agents(2))):
        expected = run_requests(compiled, prompts, GREEDY, stagger=stagger).tokens
        got = run_requests(other, prompts, GREEDY, stagger=stagger).tokens
        same = sum(a == b for a, b in zip(expected, got, strict=True))
        assert same >= len(prompts) * 2 // 3, (same, len(prompts))
    assert_idle(other)


def test_gpu_fp8_cache_halves_pages_and_keeps_answers_close(folder, compiled):
    """A cast to 8 bits moves logits a little; most greedy tokens of a short answer stay."""
    small = tiny_engine(folder, **OPTIONS, kv_cache_dtype="fp8_e4m3")
    cache = small.loop.executor.caches[0].k_cache
    assert cache.dtype == torch.float8_e4m3fn
    assert 2 * cache.nbytes == compiled.loop.executor.caches[0].k_cache.nbytes
    prompts = prompts_of(51, *LENGTHS)
    expected = run_requests(compiled, prompts, GREEDY).tokens
    got = run_requests(small, prompts, GREEDY).tokens
    firsts = sum(a[0] == b[0] for a, b in zip(expected, got, strict=True))
    assert firsts >= len(prompts) - 3, (firsts, len(prompts))
    assert_idle(small)


def test_gpu_shared_prefix_equals_alone(compiled):
    """Groups of rows that read a shared prefix once answer as each of them does alone."""
    prompts = agents(11)
    alone = [run_requests(compiled, [prompt], GREEDY).tokens[0] for prompt in prompts]
    together = run_requests(compiled, prompts, GREEDY).tokens
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    # Sums in another order: a near-tie may fall otherwise, and near-ties are common in a random
    # model's 12 tokens; the kernels themselves are compared with fp64 elsewhere.
    assert same >= len(prompts) * 2 // 3, (same, len(prompts))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_gpu_steady_decode_never_synchronises(compiled):
    loop = compiled.loop
    for index, prompt in enumerate(prompts_of(21, 20, 30, 40)):
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))
    for _ in range(10):
        loop.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while loop.has_work:
        loop.step()
    loop.drain()
    assert_idle(compiled)


def test_gpu_captured_steps_cover_what_runs(compiled):
    """Nothing is captured or compiled while greedy and sampled requests are served."""
    executor = compiled.loop.executor
    graphs = executor._graphs
    assert graphs is not None
    # The counters are torch's, of the whole process: other engines count in them too.
    before, compiled_before = len(graphs), compiled.driver.refresh().num_graphs
    drawn = SamplingParams(temperature=0.8, seed=1, max_tokens=6, ignore_eos=True)
    run_requests(compiled, prompts_of(31, *LENGTHS), GREEDY)
    run_requests(compiled, prompts_of(32, *LENGTHS), drawn, stagger=2)
    assert len(graphs) == before
    counters = compiled.driver.refresh()
    assert counters.num_graphs == compiled_before
    assert counters.num_graph_breaks == 0


def test_gpu_moved_tensor_is_noticed(folder):
    made = tiny_engine(folder, **OPTIONS, check_graphs=True)
    module = made.loop.executor.model.model.norm
    module.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)
    with pytest.raises(AssertionError, match=r"weight model\.norm\.weight"):
        run_requests(made, prompts_of(41, 5), GREEDY)


def test_gpu_memory_stays_below_the_ceiling(compiled, folder):
    memory = compiled.memory
    assert memory is not None
    assert memory.used <= memory.allowed
    # A little more than is taken now, so that other tests on the device keep theirs.
    free, total = torch.cuda.mem_get_info()
    ceiling = (total - free) / total + 0.04
    options = {"max_total_tokens": None, "max_model_len": 2048, "gpu_memory_utilization": ceiling}
    made = tiny_engine(folder, **{**OPTIONS, **options})
    assert made.memory is not None
    assert made.memory.used <= made.memory.allowed
    run_requests(made, prompts_of(42, *LENGTHS), GREEDY)
    assert torch.cuda.max_memory_reserved() <= total * ceiling


@pytest.fixture
def own_ceiling():
    """Takes back the limit on the process's memory that a start sets."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
def test_gpu_a_start_that_has_the_device_alone_fits_below_its_ceiling(
    mode, tmp_path, monkeypatch, own_ceiling
):
    wide = {"intermediate_size": 16384, "num_hidden_layers": 1}  # steps need 0.5 GiB
    heads = {"num_key_value_heads": 8, "head_dim": 128}  # rows at full length 2 GiB
    folder = write_tiny_model(tmp_path / "wide", family="qwen3", **{**SHAPE, **wide, **heads})
    total = torch.cuda.mem_get_info()[1]

    def alone(device: Any = None) -> tuple[int, int]:
        return total - torch.cuda.memory_reserved(), total

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "mem_get_info", alone)
    probes, probe = [], build._probe_memory

    def noted(*given: Any) -> MemoryNeeds:
        probes.append(probe(*given))
        return probes[-1]

    monkeypatch.setattr(build, "_probe_memory", noted)
    options = {
        "cudagraph_mode": mode,
        "chunked_prefill_size": 4096,
        "max_num_seqs": 256,
        "max_model_len": 2048,
        "max_total_tokens": None,
        "gpu_memory_utilization": (before + 2**31) / total,
        "enforce_eager": True,
    }
    made = tiny_engine(folder, **{**OPTIONS, **options})
    assert made.memory is not None
    assert made.loop.executor.shape.num_pages <= 256 * 2048 // 16  # not all that rows could use
    biased = msgspec.structs.replace(GREEDY, logit_bias={7: 5.0})
    for params in (GREEDY, biased):
        run_requests(made, prompts_of(43, *([900] * 6)), params)
    executor = made.loop.executor
    assert not executor._uncaptured
    if mode == "none":
        return
    # The estimate, and what captured steps really hold: within 10 % or 256 MiB.
    (needs,) = probes
    pool = tuple(executor._graphs._pool)
    segments = torch.cuda.memory_snapshot()
    held = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == pool)
    assert held > 0
    assert abs(needs.pool - held) <= max(needs.pool / 10, 2**28)


def test_gpu_a_start_that_cannot_fit_ends_with_the_sums(folder, own_ceiling):
    options = {"max_total_tokens": None, "gpu_memory_utilization": 0.001}
    with pytest.raises(
        ConfigError, match=r"--gpu-memory-utilization 0\.001 allows 0\.1; .* in use"
    ):
        tiny_engine(folder, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nan", {}),
        ("nan", {"cudagraph_mode": "none"}),
        ("nan", {"scheduler": "torch"}),
        ("nan", {"device_loop": True}),
        ("token", {"cudagraph_mode": "none"}),
        ("token", {"cudagraph_mode": "none", "scheduler": "torch"}),
    ],
    ids=["graphs", "none", "torch", "device-loop", "token-none", "token-torch"],
)
def test_gpu_bad_sample_ends_one_row_with_an_error_and_leaves_the_others_alone(
    exact_folder, kind, options
):
    engine = exact_engine(exact_folder, **options)
    prompts, long = prompts_of(61, 20, 33, 50), msgspec.structs.replace(GREEDY, max_tokens=150)
    drawn = msgspec.structs.replace(long, temperature=0.8, top_p=0.9, seed=3)
    for params in (long, drawn):
        expected = run_requests(engine, prompts, params).tokens
        fault = Fault(kind, step=engine.loop.stats.num_steps + 7)
        answers = run_grammars(
            engine,
            [params] * 3,
            prompts=prompts,
            after_step=lambda *_, fault=fault: fault.before_step(engine.loop),
        )
        error = answers[2].error
        assert error is not None
        assert {"nan": "NaN", "token": "no such id"}[kind] in str(error.error)
        assert answers[2].tokens == expected[2][: len(answers[2].tokens)]
        assert [answer.tokens for answer in answers[:2]] == expected[:2]
        # What it wrote was not published: the same prompts give the same answers.
        assert run_requests(engine, prompts, params).tokens == expected


def test_gpu_step_without_memory_for_its_graph_is_launched_without_one(folder, compiled):
    engine = tiny_engine(folder, **OPTIONS)
    executor = engine.loop.executor
    biased = msgspec.structs.replace(GREEDY, logit_bias={7: 5.0})
    prompts = prompts_of(71, 20, 40)
    expected = run_requests(compiled, prompts, biased).tokens
    plain = run_requests(compiled, prompts, GREEDY).tokens
    head = executor.pieces.head

    def fails_in_captures(residual: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("on purpose")
        return head(residual)

    executor.pieces.head = fails_in_captures  # type: ignore[method-assign]
    assert run_requests(engine, prompts, biased).tokens == expected
    assert executor._uncaptured
    assert run_requests(engine, prompts, GREEDY).tokens == plain
    executor.pieces.head = head  # type: ignore[method-assign]
    assert run_requests(engine, prompts, biased).tokens == expected


def test_gpu_out_of_memory_ends_what_asked_for_too_much(exact_folder):
    engine = exact_engine(exact_folder)
    short = prompts_of(81, 20, 40)
    expected = run_requests(engine, short, GREEDY).tokens
    turned = TurnedEngine(engine)
    turned.submit(short, GREEDY)
    for _ in range(3):
        turned.turn()
    # Greedy steps are replayed; the first biased one is not.
    Fault("oom", step=engine.loop.stats.num_steps + 1).before_step(engine.loop)
    biased = msgspec.structs.replace(GREEDY, logit_bias={7: 5.0})
    (prompt,) = prompts_of(82, 200)
    request = Request(request_id=9, prompt_token_ids=prompt, params=biased)
    turned.turn(ClientFrame(submits=[request]))
    turned.finish(3)
    assert turned.ends.pop(9).finish_reason == "error"
    assert [turned.tokens[i] for i in range(2)] == expected
    assert_idle(engine)


@pytest.mark.parametrize("options", [{}, {"device_loop": True}], ids=["graphs", "device-loop"])
def test_gpu_thinking_budgets_are_exact(exact_folder, options):
    """Rows asleep under replayed steps and loops on the device, then forced, then free again."""
    engine = exact_engine(exact_folder, **options)
    tokenizer = Tokenizer.from_folder(exact_folder)
    closing = "</think>"
    closing_ids = tuple(tokenizer.encode(closing, add_special_tokens=False))
    prompts, budgets = prompts_of(91, 20, 33, 50, 7), (0, 9, 70, 300)
    free = msgspec.structs.replace(GREEDY, max_tokens=120)
    expected = run_requests(engine, prompts, free).tokens
    params = [
        msgspec.structs.replace(
            free,
            thinking=ThinkingBudget(max_tokens=n, closing=closing, closing_ids=closing_ids),
        )
        for n in budgets
    ]
    for answer, plain, n in zip(
        run_grammars(engine, params, prompts=prompts), expected, budgets, strict=True
    ):
        assert answer.error is None
        assert len(answer.tokens) == 120
        assert answer.tokens[:n] == plain[:n]
        assert answer.tokens[n : n + len(closing_ids)] == list(closing_ids)[: max(0, 120 - n)]
