"""The model of the GPU scenarios: the Qwen3-8B shape with random weights, and what it must cost.

Sizes by name, as the parts of one layer's time need them; what steps cost is counted by hand here,
which a test compares with the model's own parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perf import model_shapes

MODEL = "qwen3-8b"
DTYPE = "bf16"
DTYPE_BYTES = 2
HIDDEN, INNER, NUM_LAYERS, VOCAB_SIZE = 4096, 12288, 36, 151936
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128

CONFIG: dict[str, Any] = model_shapes.QWEN3_8B.config
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
    return model_shapes.write_folder(folder, CONFIG | changes)


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
