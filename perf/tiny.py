"""The tiny model of the gates, and the engine over it; the tests' own compiled engine is the same.

Its compiled code is therefore in the cache of a test run, and what is counted here is counted of
what the tests have proven right.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perf.model_shapes import write_folder

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of the same sizes, with experts.
SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "num_hidden_layers": 3,
}
FAMILIES = MappingProxyType({"qwen3": CONFIG, "qwen3_moe": CONFIG | SPARSE})

NUM_TOKENS = 260  # of the tokenizer: the last ids of the vocabulary mean nothing

# What the tests build their engines with, besides dtype and device.
ENGINE: Mapping[str, Any] = MappingProxyType(
    {
        "max_model_len": 256,
        "max_num_seqs": 20,
        "chunked_prefill_size": 64,
        "block_size": 4,
        # As in a worker of the tests on the smallest machine; generated code depends on it.
        "num_threads": 1,
    }
)


def write_family(folder: Path, family: str) -> Path:
    """Config and tokenizer of a family, without weights; returns the folder."""
    config = FAMILIES[family]
    place = write_folder(folder / family, config | {"vocab_size": NUM_TOKENS})
    (place / "config.json").write_text(json.dumps(config))
    return place


def processor_s() -> float:
    """Processor time of this process, and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def build(folder: Path, cache_dir: Path, *, is_eager: bool = False) -> Any:
    """The engine on the CPU, with seeded random weights."""
    from compiled_engine.config import EngineConfig
    from compiled_engine.engine import build_engine

    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        enforce_eager=is_eager,
        cache_dir=cache_dir,
        **ENGINE,
    )
    return build_engine(config, lambda *_: None)
