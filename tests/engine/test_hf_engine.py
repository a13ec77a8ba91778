"""Models without a file here through the whole engine: greedy tokens as Hugging Face's."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError
from compiled_engine.settings import preview_settings
from tests.helpers.engines import GREEDY, run_requests, tiny_engine
from tests.helpers.hf_models import write_hf_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SERVED = ("phi3", "olmo2", "granite", "stablelm", "olmoe", "gemma2", "gemma3", "qwen2")
PARAMS = msgspec.structs.replace(GREEDY, max_tokens=10)
# What the tokenizer knows: the engine chooses no others.
NUM_TOKENS = 260
# Below this share of the largest logit, rounding may choose either of two tokens.
NEAR_TIE = 1e-3


def prompts() -> list[list[int]]:
    """Of 5 to 71 tokens: short ones, and some longer than a step or a window."""
    return [[(7 * i + 3 * j) % 300 + 3 for j in range(5 + 22 * i)] for i in range(4)]


def cpu_seconds() -> float:
    """CPU time of this process and of those it has waited for: what does not hang on neighbours."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def assert_greedy(theirs: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the best after the ones before it, or nearly."""
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    rows = logits[len(prompt) - 1 : -1, :NUM_TOKENS]
    chosen = rows.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert ((rows.amax(-1) - chosen) <= NEAR_TIE * rows.abs().amax()).all()


@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_equal_hugging_face(tmp_path: Path, family: str):
    theirs = write_hf_model(tmp_path, family)
    engine = tiny_engine(tmp_path)
    asked = prompts()
    for run in (0, 1):  # the second time the prompts are in the prefix cache
        found = run_requests(engine, asked, PARAMS, stagger=2)
        for prompt, tokens in zip(asked, found.tokens, strict=True):
            assert_greedy(theirs, prompt, tokens)
        assert bool(found.cached[-1] > 40) == bool(run)


def test_what_is_settled_without_weights_is_what_an_engine_has(tmp_path: Path):
    write_hf_model(tmp_path, "gpt2")
    engine = tiny_engine(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_num_seqs=20, max_model_len=256)
    settings = preview_settings(config)
    assert settings.vocab_size == engine.settings.vocab_size == NUM_TOKENS
    assert settings.eos_token_ids == engine.settings.eos_token_ids
    assert engine.loop.executor.caches[0].k_cache.shape[2:] == (4, 16)


def test_a_model_that_is_not_served_ends_the_start(tmp_path: Path):
    write_hf_model(tmp_path, "falcon")
    with pytest.raises(ConfigError, match="FalconForCausalLM has no model file here"):
        tiny_engine(tmp_path)


# Matches in the whole of a model's pieces: layers for one and for many tokens, of every kind, and
# the head.
COUNTS = {
    "phi3": {"lift_rms_norm": 5, "lift_gated_activation": 2, "lift_rope": 2, "merge_linears": 0},
    "olmo2": {"lift_rms_norm": 9, "lift_gated_activation": 2, "lift_rope": 2, "merge_linears": 4},
    "granite": {"lift_rms_norm": 5, "lift_gated_activation": 2, "lift_rope": 2, "merge_linears": 4},
    "stablelm": {
        "lift_rms_norm": 0, "lift_gated_activation": 2, "lift_rope": 2, "merge_linears": 4,
    },
    "olmoe": {
        "lift_rms_norm": 9, "lift_gated_activation": 0, "lift_rope": 2, "lift_route": 2,
        "merge_linears": 2,
    },
    "gemma2": {"lift_rms_norm": 17, "lift_gated_activation": 4, "lift_rope": 4, "merge_linears": 8},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", COUNTS)
def test_compiled_engines_choose_the_same_tokens(tmp_path: Path, family: str):
    theirs = write_hf_model(tmp_path, family)
    start = cpu_seconds()
    engine = tiny_engine(tmp_path, enforce_eager=False)
    print(f"{family}: compiled in {cpu_seconds() - start:.0f} CPU s")
    counters = engine.driver.refresh()
    matches = {name: counters.num_matches[name] for name in COUNTS[family]}
    assert matches == COUNTS[family]
    assert counters.num_graph_breaks == 0
    asked = prompts()
    with counters.expect(num_graphs=0, num_recompiles=0):
        found = run_requests(engine, asked, PARAMS, stagger=2)
        engine.driver.refresh()
    for prompt, tokens in zip(asked, found.tokens, strict=True):
        assert_greedy(theirs, prompt, tokens)
