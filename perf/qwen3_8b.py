"""The model of the GPU scenarios: the Qwen3-8B shape with random weights, and what it must cost.

The folder needs no download: a config, and a tokenizer of the same size whose tokens are short byte
strings, so that turning ids into text costs what it costs with the real one.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "qwen3-8b"
DTYPE = "bf16"
DTYPE_BYTES = 2
HIDDEN, INNER, NUM_LAYERS, VOCAB_SIZE = 4096, 12288, 36, 151936
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# (outputs, inputs) of the four products of a layer
LAYER_PRODUCTS = (
    ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, NUM_HEADS * HEAD_DIM),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
)
KV_BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE_BYTES


def step_weight_bytes() -> int:
    """Bytes of the weights one step reads: all but the embedding table, the head once."""
    layer = sum(rows * columns for rows, columns in LAYER_PRODUCTS) + 2 * HIDDEN + 2 * HEAD_DIM
    return (NUM_LAYERS * layer + HIDDEN + VOCAB_SIZE * HIDDEN) * DTYPE_BYTES


def step_bytes(context_tokens: float, batch_size: int) -> float:
    """Fewest bytes of a decode step: weights once, the KV of all rows' contexts, the KV written.

    Args:
        context_tokens: tokens in the cache before the step, summed over the rows.
        batch_size: rows, one token each.
    """
    return step_weight_bytes() + (context_tokens + batch_size) * KV_BYTES_PER_TOKEN


def prefill_flops(prompt_lens: list[int]) -> float:
    """Operations of the layers' products and of causal attention; the head is left out."""
    products = NUM_LAYERS * sum(rows * columns for rows, columns in LAYER_PRODUCTS)
    return 2.0 * products * sum(prompt_lens) + NUM_LAYERS * sum(map(attention_flops, prompt_lens))


def attention_flops(prompt_len: int) -> float:
    """Operations of causal attention of one layer over one prompt."""
    return 4.0 * NUM_HEADS * HEAD_DIM * prompt_len**2 / 2


def write_folder(folder: Path, **changes: Any) -> Path:
    """Writes config and tokenizer, without weights; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spellings = (
        "".join(letters)
        for length in itertools.count(1)
        for letters in itertools.product(alphabet, repeat=length)
    )
    vocabulary = {text: index for index, text in enumerate(itertools.islice(spellings, VOCAB_SIZE))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Prompts:
    """Seeded random token ids; no two prompts are alike."""

    def __init__(self, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def one(self, length: int) -> list[int]:
        """The next prompt."""
        ids: list[int] = self._random.integers(0, self._vocab_size, size=length).tolist()
        return ids

    def many(self, count: int, length: int) -> list[list[int]]:
        """The next prompts of one length."""
        return [self.one(length) for _ in range(count)]
