"""Logits of our model files equal Hugging Face's, from checkpoints that Hugging Face wrote.

Tiny random models over the shapes a family may have; and the real SmolLM2: perplexity always,
and token for token against transformers in the slow tier.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.models import ARCHITECTURES, CausalLM
from compiled_engine.models.config import load_model_config
from compiled_engine.models.weights import build_model, load_weights
from compiled_engine.tokenizer import Tokenizer
from tests.helpers.questions import QUESTIONS, chat_prompt

CPU = torch.device("cpu")
# Largest difference over largest logit, float32: reductions in another order, nothing else.
TOLERANCE = 1e-4
REFERENCE_PERPLEXITY = 15.25
# Below this gap between the best two logits, rounding may choose either token.
NEAR_TIE = 1e-3

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    # Larger than the usual 0.02: attention and MLP then matter beside the residual.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "gqa-4-2": {},
    "mqa-4-1": {"num_key_value_heads": 1},
    "mha-4-4": {"num_key_value_heads": 4},
    "gqa-7-1": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "wide-heads": {"head_dim": 32},
    "gqa-3-1": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gqa-5-1": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1},
    "gqa-16-2": {"num_attention_heads": 16, "num_key_value_heads": 2},
    **{f"head-dim-{size}": {"head_dim": size} for size in (64, 80, 96, 112, 128, 256)},
    "vocab-1003": {"vocab_size": 1003},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "theta-1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "eps-1e-3": {"rms_norm_eps": 1e-3},
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
}


# Qwen3 has no bias in its MLP.
PAIRS = [
    (family, case)
    for family in FAMILIES
    for case, options in CASES.items()
    if family == "llama" or "mlp_bias" not in options
]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = load_model_config(folder)
    model = build_model(ARCHITECTURES[config.architecture], config, dtype=dtype, device=CPU)
    load_weights(model, folder, dtype=dtype, device=CPU)
    return model


def write_hugging_face_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """Saves a random transformers model whose biases and norms are random too, and returns it."""
    import transformers

    model_name, config_name = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**BASE, **options})
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return model


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(("family", "case"), PAIRS)
@torch.inference_mode()
def test_logits_equal_hugging_face(tmp_path: Path, family: str, case: str) -> None:
    reference = write_hugging_face_model(tmp_path, family, CASES[case])
    model = load(tmp_path)
    ids = torch.randint(0, model.config.vocab_size, (100,))
    ours = model(ids, torch.arange(100))
    theirs = reference(ids[None]).logits[0]
    assert ours.shape == theirs.shape
    assert relative_difference(ours, theirs) <= TOLERANCE


@torch.inference_mode()
def test_logits_move_when_rope_scaling_is_dropped(tmp_path: Path) -> None:
    """The scaled cases above would pass for nothing if their scaling did not show."""
    reference = write_hugging_face_model(tmp_path / "a", "llama", {"rope_parameters": LLAMA3})
    ids = torch.arange(100)
    plain = write_hugging_face_model(tmp_path / "b", "llama", {})
    difference = relative_difference(plain(ids[None]).logits, reference(ids[None]).logits)
    assert difference > 100 * TOLERANCE


def stdlib_windows(tokenizer: Tokenizer) -> Tensor:
    """Four windows of 512 tokens of the standard library's own help texts: [4, 512]."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))[:20_000]
    return torch.tensor(tokenizer.encode(text)[: 4 * 512]).view(4, 512)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> CausalLM:
    return load(smollm2_folder)


@torch.inference_mode()
def test_smollm2_perplexity(smollm2: CausalLM, smollm2_tokenizer: Tokenizer) -> None:
    losses = [
        torch.nn.functional.cross_entropy(smollm2(window, torch.arange(512))[:-1], window[1:])
        for window in stdlib_windows(smollm2_tokenizer)
    ]
    perplexity = math.exp(float(torch.stack(losses).mean()))
    assert perplexity == pytest.approx(REFERENCE_PERPLEXITY, rel=0.005)


@torch.inference_mode()
def test_smollm2_answers_sensibly(smollm2: CausalLM, smollm2_tokenizer: Tokenizer) -> None:
    ids = chat_prompt(smollm2_tokenizer, "What is the capital of France?")
    answer = greedy(smollm2, ids, 10, smollm2_tokenizer.eos_token_ids)
    assert smollm2_tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == 2


def greedy(model: CausalLM, prompt: list[int], num_tokens: int, ends: tuple[int, ...]) -> list[int]:
    """Greedy answer by whole forward passes, its end token included."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens and (len(ids) == len(prompt) or ids[-1] not in ends):
        logits = model(torch.tensor(ids), torch.arange(len(ids)))
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads a GGUF file
@torch.inference_mode()
def test_smollm2_greedy_tokens_equal_transformers(
    smollm2: CausalLM, smollm2_tokenizer: Tokenizer
) -> None:
    """Every greedy token of transformers' answer is ours too, except after a near-tie of its two
    best logits; and the converted weights and tokenizer are those transformers reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from compiled_engine.models.source import default_gguf

    path = default_gguf()
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ends = smollm2_tokenizer.eos_token_ids
    for question in QUESTIONS:
        prompt = chat_prompt(smollm2_tokenizer, question)
        message = [{"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True
        )
        assert prompt == list(rendered["input_ids"])
        output = reference.generate(
            torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=list(ends)
        )
        answer = output[0, len(prompt) :]
        logits = smollm2(output[0], torch.arange(output.shape[1]))[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for index, token_id in enumerate(answer.tolist()):
            if float(best[index, 0] - best[index, 1]) < NEAR_TIE:
                break
            assert int(logits[index].argmax()) == token_id, (question, index)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@torch.inference_mode()
def test_smollm2_logits_equal_transformers(
    smollm2: CausalLM, smollm2_folder: Path, smollm2_tokenizer: Tokenizer
) -> None:
    """transformers reads the converted folder as the ordinary model it is."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    window = stdlib_windows(smollm2_tokenizer)[0]
    ours = smollm2(window, torch.arange(512))
    assert relative_difference(ours, reference(window[None]).logits[0]) <= TOLERANCE
