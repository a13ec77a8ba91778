"""The tiny bf16 model of the tests on a GPU, and options of engines that serve it side by side."""

from __future__ import annotations

from typing import Any

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
