"""The real small model through the whole engine, against transformers and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.engine import Engine
from compiled_engine.models.source import DEFAULT_MODEL
from compiled_engine.request import SamplingParams
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.engines import run_requests, tiny_engine
from tests.helpers.questions import QUESTIONS, chat_prompt

pytestmark = pytest.mark.e2e

NEAR_TIE = 1e-3
ANSWER = SamplingParams(temperature=0.0, max_tokens=48)
SHORT = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def smollm2_engine(**options: Any) -> Engine:
    """SmolLM2 in fp32, eager unless the options say otherwise."""
    defaults = {"max_model_len": 512, "block_size": 16, "chunked_prefill_size": 128}
    return tiny_engine(Path(DEFAULT_MODEL), **{**defaults, **options})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return smollm2_engine()


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(engine.settings.folder)
    return [chat_prompt(tokenizer, question) for question in QUESTIONS]


@pytest.mark.filterwarnings("ignore")  # transformers' own
@torch.no_grad()
def test_greedy_answers_equal_transformers(engine: Engine, prompts: list[list[int]]) -> None:
    """Every token of 20 answers is the best one of transformers given the tokens before it."""
    from transformers import AutoModelForCausalLM

    folder = engine.settings.folder
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = run_requests(engine, prompts, ANSWER).tokens
    num_compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for place, token in enumerate(answer):
            gap = float(best.values[place, 0] - best.values[place, 1])
            if gap < NEAR_TIE:
                continue
            assert token == int(best.indices[place, 0]), (prompt, place)
            num_compared += 1
    assert num_compared >= 500


def test_answers_do_not_depend_on_company_cache_or_retraction(
    engine: Engine, prompts: list[list[int]]
) -> None:
    chosen = prompts[:6]
    together = run_requests(engine, chosen, SHORT).tokens
    assert [run_requests(engine, [p], SHORT).tokens[0] for p in chosen] == together
    warm = run_requests(engine, chosen, SHORT)
    assert warm.tokens == together
    assert min(warm.cached) >= 16
    small = smollm2_engine(max_total_tokens=160, block_size=4)
    assert run_requests(small, chosen, SHORT).tokens == together
    assert small.loop.stats.num_retractions > 0


@pytest.mark.slow
def test_answers_do_not_depend_on_compiling_or_overlap(
    engine: Engine, prompts: list[list[int]]
) -> None:
    expected = run_requests(engine, prompts, ANSWER).tokens
    compiled = smollm2_engine(enforce_eager=False)
    assert run_requests(compiled, prompts, ANSWER, stagger=2).tokens == expected
    overlapped = smollm2_engine(overlap_schedule="on")
    assert run_requests(overlapped, prompts, ANSWER, stagger=3).tokens == expected
