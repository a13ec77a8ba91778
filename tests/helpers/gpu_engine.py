"""The tiny bf16 model of the tests on a GPU, engines that serve it side by side, and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compiled_engine.engine import Engine
from tests.helpers.engines import tiny_engine
from tests.helpers.tiny_model import write_tiny_model

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cuda",
    "enforce_eager": False,
    "max_model_len": 1024,
    "max_num_seqs": 48,
    "chunked_prefill_size": 256,
    "block_size": 16,
    "max_total_tokens": 16384,
    "gpu_memory_utilization": 0.95,
}
LENGTHS = (1, 5, 15, 16, 17, 33, 100, 255, 257, 600)


def write_exact_model(folder: Path) -> Path:
    """The same model in fp32, whose tokens do not depend on who computes beside them."""
    return write_tiny_model(folder, family="qwen3", **{**SHAPE, "torch_dtype": "float32"})


def exact_engine(folder: Path, **options: Any) -> Engine:
    """An engine in fp32."""
    return tiny_engine(folder, **{**OPTIONS, "dtype": "float32", **options})


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    """Seeded random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def agents(seed: int) -> list[list[int]]:
    """Twelve prompts that share 70 tokens, in two groups that share 200, and two alone."""
    first, second, own = prompts_of(seed, 70, 130, 130)
    tails = prompts_of(seed + 1, *range(3, 17))
    long = [first + second + tail for tail in tails[:5]]
    return long + [first + own + tail for tail in tails[5:10]] + [first + t for t in tails[10:]]
