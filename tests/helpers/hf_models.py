"""Tiny random models of transformers' own classes, as folders with a tokenizer.

Families that have no model file here, and some that are refused. Importing this module does not
import transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_model import write_tiny_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Family -> its config class without "Config", and fields beside `BASE`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "stablelm": ("StableLm", {}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "tie_word_embeddings": True},
    ),
    "cohere": ("Cohere", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 0,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    # Refused.
    "falcon": ("Falcon", {}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "bart": ("Bart", {}),
    "t5": ("T5", {}),
    "mamba": ("Mamba", {}),
    "jamba": ("Jamba", {}),
    "qwen3_next": ("Qwen3Next", {}),
    "llama4": ("Llama4Text", {}),
    "gemma3_vision": ("Gemma3", {}),
}


def write_hf_model(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Writes a random model and returns it, in fp32 with transformers' eager attention.

    Matrices have a standard deviation of 0.2, so that attention and MLP matter beside the residual;
    biases are random and norms lie around their start.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **options, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return model


def write_hf_config(folder: Path, family: str, **overrides: Any) -> Path:
    """Writes `config.json` alone."""
    import transformers

    name, options = FAMILIES[family]
    fields = options if family in ("gemma3_vision", "t5") else {**BASE, **options}
    config = getattr(transformers, f"{name}Config")(**{**fields, **overrides})
    config.architectures = config.architectures or [_class_of(config)]
    config.save_pretrained(folder)
    return folder


def _class_of(config: Any) -> str:
    from transformers.models.auto import modeling_auto

    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        if config.model_type in names:
            return str(names[config.model_type])
    raise AssertionError(config.model_type)
