"""Log probabilities on a GPU: every fast path against Hugging Face's model, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled_engine.engine import Engine
from compiled_engine.logprob_data import read_records
from compiled_engine.request import Request, SamplingParams
from tests.helpers.engines import assert_idle, run_requests, tiny_engine
from tests.helpers.gpu_engine import OPTIONS, SHAPE, prompts_of
from tests.helpers.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu

ASKING = SamplingParams(
    temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=20
)
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 33, 100, 255, 257, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "qwen3"
    write_tiny_model(path, family="qwen3", **SHAPE)
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """Hugging Face's model in fp32, and as the engine runs it."""
    fp32, bf16 = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    return fp32, bf16


@torch.inference_mode()
def check(models: tuple[Any, Any], engine: Engine, prompt: list[int], run: Any, index: int) -> None:
    """Values are within bf16's rounding, for which Hugging Face's own loss is the yardstick."""
    tokens = prompt + run.tokens[index]
    ids = torch.tensor([tokens], device="cuda")
    vocab_size = engine.limits.vocab_size
    truth, rounded = (
        model(ids).logits[0, :-1, :vocab_size].float().log_softmax(-1) for model in models
    )
    records = read_records(run.prompt_logprobs[index], prompt[1:], 20)
    records += read_records(run.logprobs[index], run.tokens[index], 4)
    assert len(records) == len(tokens) - 1
    chosen = ids[0, 1:, None]
    got = torch.tensor([record.logprob for record in records], device="cuda")
    expected = truth.gather(1, chosen).squeeze(1)
    own_error = (rounded.gather(1, chosen).squeeze(1) - expected).norm()
    assert (got - expected).norm() <= 1.5 * own_error + 0.01
    best = torch.tensor([record.top[0] for record in records], device="cuda")
    values = truth.gather(1, best[:, :1].long()).squeeze(1)
    own_error = (rounded.amax(1) - truth.amax(1)).norm()
    assert (best[:, 1] - values).norm() <= 2 * own_error + 0.01
    assert (truth.amax(1) - values).max() <= 4 * (rounded - truth).abs().max()
    for record in records:
        top = [value for _, value in record.top]
        assert top == sorted(top, reverse=True)
        assert (record.rank == 1) == (record.logprob == top[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheduler": "torch"},
        {"cudagraph_mode": "none"},
        {"cudagraph_mode": "piecewise"},
        {"overlap_schedule": "off"},
        {"device_loop": True},
        {"max_num_seqs": 3, "max_total_tokens": 1200},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "default",
)
def test_gpu_logprobs_equal_hugging_face(folder, models, options):
    engine = tiny_engine(folder, **{**OPTIONS, **options})
    prompts = prompts_of(1, *LENGTHS)
    prompts[8][:200] = prompts[9][:200]
    for stagger in (0, 2):
        run = run_requests(engine, prompts, ASKING, stagger=stagger)
        for index, prompt in enumerate(prompts):
            check(models, engine, prompt, run, index)
    assert_idle(engine)


def test_gpu_logprobs_change_no_token(folder):
    """Beside rows that do not ask, and with sampling; the steps differ only in what they add."""
    engine = tiny_engine(folder, **OPTIONS)
    prompts = prompts_of(2, 20, 30, 40)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=9, ignore_eos=True)
    for params in (PLAIN, drawn):
        expected = run_requests(engine, prompts, params).tokens
        asking = msgspec.structs.replace(params, logprobs=20)
        run = run_requests(engine, prompts, [asking, params, asking])
        assert run.tokens == expected
        assert run.logprobs[1] == b""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_gpu_logprobs_of_steady_decode_never_synchronise(folder):
    engine = tiny_engine(folder, **OPTIONS)
    loop, graphs = engine.loop, engine.loop.executor._graphs
    assert graphs is not None
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=5)
    for index, prompt in enumerate(prompts_of(3, 20, 30, 40)):
        loop.submit(Request(request_id=index, prompt_token_ids=prompt, params=params))
    for _ in range(10):
        loop.step()
    num_graphs = len(graphs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            assert loop.step().logprobs
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(graphs) == num_graphs, "each kind of step is captured once"
    while loop.has_work:
        loop.step()
    loop.drain()
    assert_idle(engine)
