"""Log probabilities: equal to Hugging Face's log-softmax, however the steps were cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compiled_engine import logprob_rows, logprobs
from compiled_engine.engine import Engine
from compiled_engine.errors import InvalidRequestError
from compiled_engine.logprob_data import LOWEST_LOGPROB, finite, read_records
from compiled_engine.request import Request, SamplingParams, validate_request
from compiled_engine.step_key import StepKey
from tests.helpers.engines import Run, run_requests, tiny_engine
from tests.helpers.scheduler_cuda import CheckedPlan
from tests.helpers.tiny_model import write_tiny_model

# Of the tokenizer: the model has padding behind it, which counts for nothing.
VOCAB = 260
TOLERANCE = 2e-4


def asking(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 4,
        "prompt_logprobs": 3,
    }
    return SamplingParams(**{**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logprobs") / "llama"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def truth(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return tiny_engine(folder)


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def log_softmax(truth: Any, token_ids: list[int]) -> Tensor:
    """Of the token behind each position, [T, vocab]."""
    logits = truth(torch.tensor([token_ids])).logits[0, :, :VOCAB]
    return logits.double().log_softmax(-1)


def check(truth: Any, run: Run, index: int, prompt: list[int], params: SamplingParams) -> None:
    """Every record of one request against Hugging Face's model."""
    wanted = log_softmax(truth, prompt + run.tokens[index])
    parts = []
    if params.prompt_logprobs is not None:
        start = params.logprob_start
        data, k = run.prompt_logprobs[index], params.prompt_logprobs
        parts.append((read_records(data, prompt[start + 1 :], k), k, start))
    if params.logprobs is not None:
        data, k = run.logprobs[index], params.logprobs
        parts.append((read_records(data, run.tokens[index], k), k, len(prompt) - 1))
    for records, k, first in parts:
        for place, record in enumerate(records, start=first):
            row = wanted[place]
            expected = float(row[record.token_id])
            assert record.logprob == pytest.approx(expected, abs=TOLERANCE)
            is_near = (row > expected - TOLERANCE) & (row < expected + TOLERANCE)
            assert abs(record.rank - 1 - int((row > expected).sum())) < int(is_near.sum())
            assert len(record.top) == len({token for token, _ in record.top}) == k
            best = row.topk(k).values.tolist()
            assert [v for _, v in record.top] == pytest.approx(best, abs=TOLERANCE)
            assert [v for _, v in record.top] == pytest.approx(
                [float(row[token]) for token, _ in record.top], abs=TOLERANCE
            )


@pytest.mark.parametrize("lengths", [(1,), (2, 1, 5), (64, 65, 130, 200, 3)])
@pytest.mark.parametrize("stagger", [0, 2])
def test_equal_hugging_face(engine, truth, lengths, stagger):
    prompts = prompts_of(sum(lengths), *lengths)
    run = run_requests(engine, prompts, asking(), stagger=stagger)
    for index, prompt in enumerate(prompts):
        check(truth, run, index, prompt, asking())


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 200},
        {"overlap_schedule": "off"},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"block_size": 16, "chunked_prefill_size": 24},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_equal_hugging_face_in_steps_of_any_size(folder, truth, options):
    engine = tiny_engine(folder, **options)
    prompts = prompts_of(5, 3, 40, 90, 17)
    for _ in range(2):
        run = run_requests(engine, prompts, asking(), stagger=1)
        for index, prompt in enumerate(prompts):
            check(truth, run, index, prompt, asking())


def test_rows_that_ask_stand_beside_rows_that_do_not(engine, truth):
    prompts = prompts_of(9, 30, 31, 32, 33, 34, 5)
    shared = prompts[0][:24]
    prompts = [shared + prompt for prompt in prompts]
    params = [
        asking(prompt_logprobs=None),
        asking(logprobs=None),
        asking(logprobs=None, prompt_logprobs=None),
        asking(logprobs=20, prompt_logprobs=0, logprob_start=30),
        asking(logprobs=0, prompt_logprobs=20, temperature=1.0, seed=3, top_k=5),
        asking(logprob_start=28),
    ]
    run = run_requests(engine, prompts, params, stagger=1)
    assert run.logprobs[2] == run.prompt_logprobs[2] == run.prompt_logprobs[0] == b""
    for index, prompt in enumerate(prompts):
        check(truth, run, index, prompt, params[index])


def test_retracted_rows_lose_and_double_nothing(folder, truth):
    """Few pages: rows are retracted inside their prompts and behind them, and start over."""
    engine = tiny_engine(folder, max_total_tokens=200, chunked_prefill_size=16)
    prompts = prompts_of(11, 40, 60, 50, 33, 20)
    params = asking(max_tokens=60)
    run = run_requests(engine, prompts, params, stagger=1)
    assert engine.loop.stats.num_retractions > 0
    for index, prompt in enumerate(prompts):
        assert len(run.tokens[index]) == 60
        check(truth, run, index, prompt, params)


def test_equal_under_the_kernels_of_the_scheduler(folder, truth, monkeypatch):
    """The CUDA plan, emulated, admits rows that score their prompts as the dense one does."""
    engine = tiny_engine(folder, max_num_seqs=3, max_total_tokens=400)
    monkeypatch.setattr("compiled_engine.pieces.plan", CheckedPlan())
    prompts = prompts_of(13, 25, 25, 40)
    prompts[1][:20] = prompts[2][:20] = prompts[0][:20]
    params = [asking(), asking(logprob_start=9), asking(prompt_logprobs=None)]
    run = run_requests(engine, prompts, params, stagger=3)
    for index, prompt in enumerate(prompts):
        check(truth, run, index, prompt, params[index])


def test_scored_prompts_come_from_the_cache_up_to_the_start_only(engine, truth):
    (prompt,) = prompts_of(15, 60)
    assert run_requests(engine, [prompt], asking(prompt_logprobs=None)).cached == [0]
    for start, num_cached in ((0, 0), (17, 16), (59, 56)):
        params = asking(logprob_start=start)
        run = run_requests(engine, [prompt], params)
        assert run.cached == [num_cached]
        check(truth, run, 0, prompt, params)
    assert run_requests(engine, [prompt], asking(prompt_logprobs=None)).cached == [56]


def test_logprobs_are_the_models_own(engine, truth):
    """Before penalties, bias, temperature and the cut of top-k."""
    (prompt,) = prompts_of(17, 12)
    plain = run_requests(engine, [prompt], asking(max_tokens=1))
    best = plain.tokens[0][0]
    for changes in (
        {"logit_bias": {best: -100.0}},
        {"top_k": 1, "temperature": 2.0},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "min_tokens": 3},
    ):
        params = asking(**changes)
        run = run_requests(engine, [prompt], params)
        check(truth, run, 0, prompt, params)
        first = read_records(run.logprobs[0], run.tokens[0], 4)[0]
        assert first.top[0][0] == best
        assert (first.token_id != best) == ("logit_bias" in changes)


def test_steps_without_a_row_that_asks_make_none(engine, monkeypatch):
    keys: list[StepKey] = []
    launch = engine.loop.executor.launch

    def spy(*args: Any, **named: Any) -> None:
        keys.append(args[2])
        launch(*args, **named)

    monkeypatch.setattr(engine.loop.executor, "launch", spy)
    prompts = prompts_of(19, 100, 5)
    params = [asking(logprobs=None, prompt_logprobs=None, max_tokens=20), asking(max_tokens=2)]
    run_requests(engine, prompts, params)
    assert any(key.num_scored for key in keys)
    num_after = next(i for i, key in enumerate(keys[::-1]) if key.has_logprobs)
    assert num_after > 10
    keys.clear()
    run_requests(engine, prompts, asking(logprobs=None, prompt_logprobs=None))
    assert keys
    assert not any(key.has_logprobs for key in keys)


@pytest.mark.parametrize("length", [40, 200])
def test_logits_of_a_prompt_exist_in_chunks_only(engine, monkeypatch, length):
    sizes = []
    make = logprobs.records
    monkeypatch.setattr(logprobs, "records", lambda *a: (sizes.append(a[0].shape[0]), make(*a))[1])
    run_requests(engine, prompts_of(21, length), asking(max_tokens=1, logprobs=None))
    assert max(sizes) <= engine.loop.executor.shape.max_rows
    assert sum(sizes) == length - 1


def test_small_vocabulary_and_odd_rows():
    """Fewer tokens than the step's own number of likeliest ones; padded columns never appear."""
    logits = torch.randn(3, 7)
    made = logprobs.records(logits, torch.tensor([0, 6, 3]), 20)
    records = read_records(made.numpy().tobytes(), [0, 6, 3], 20)
    for row, record in zip(logits.log_softmax(-1), records, strict=True):
        assert len(record.top) == 7
        assert record.logprob == pytest.approx(float(row[record.token_id]), abs=1e-5)
    by_row = logprobs.row_records(
        torch.randn(2, 9), torch.tensor([[1], [2], [3], [0]]), torch.tensor([2, 3]), 8, 5
    )
    assert by_row.shape == (4, 12)
    assert not by_row[:2].any()


def test_places_of_scored_tokens_fit_a_bound(engine):
    """The form for a GPU, which cannot know the number: unused places are marked."""
    executor = engine.loop.executor
    state, shape = executor.state, executor.shape
    rows = torch.tensor([4, 4, 4, 2, 2, shape.max_rows, shape.max_rows])
    positions = torch.tensor([5, 6, 7, 0, 1, 0, 0])
    state.num_prompt[[2, 4]] = torch.tensor([2, 9], dtype=torch.int32)
    state.score_from[[2, 4]] = torch.tensor([0, 6], dtype=torch.int32)
    found = logprobs.scored_places(shape, state, rows, positions, 7)
    assert found.places.tolist() == [1, 2, 3]
    assert found.labels[:, 0].tolist() == [4, 4, 2]
    assert found.labels[:, 2].tolist() == [7, 8, 1]


def test_values_json_cannot_carry_become_the_floor():
    assert finite(float("-inf")) == finite(float("nan")) == finite(-1e30) == LOWEST_LOGPROB
    assert finite(-3.5) == -3.5


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("logprob_start", {"logprob_start": -2}),
        ("logprob_start", {"logprob_start": 1, "prompt_logprobs": None}),
        ("logprob_start", {"logprob_start": 3}),
    ],
)
def test_values_out_of_range_are_refused(engine, field, changes):
    def check_all() -> None:
        request = Request(request_id=1, prompt_token_ids=[3, 4, 5], params=asking(**changes))
        validate_request(request, engine.limits)

    with pytest.raises(InvalidRequestError) as refusal:
        check_all()
    assert refusal.value.param == field


def test_too_many_scores_of_one_prompt_are_refused(engine, monkeypatch):
    monkeypatch.setattr("compiled_engine.request.MAX_PROMPT_LOGPROB_ENTRIES", 11)
    request = Request(request_id=1, prompt_token_ids=[3, 4, 5], params=asking())
    with pytest.raises(InvalidRequestError, match="12 entries"):
        validate_request(request, engine.limits)


def test_an_aborted_row_leaves_nothing_behind(engine):
    (prompt,) = prompts_of(23, 150)
    loop = engine.loop
    loop.submit(Request(request_id=77, prompt_token_ids=prompt, params=asking()))
    for _ in range(2):
        loop.step()
    loop.abort(77)
    while loop.has_work:
        assert not list(loop.step())
    loop.drain()
    assert not loop._logprobs.rows
    assert isinstance(loop._logprobs, logprob_rows.LogprobRows)
