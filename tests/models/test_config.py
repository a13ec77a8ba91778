"""`load_model_config`: both spellings of transformers, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compiled_engine.errors import ConfigError
from compiled_engine.models import ARCHITECTURES
from compiled_engine.models.config import (
    SUPPORTED_ARCHITECTURES,
    load_model_config,
)
from compiled_engine.models.rope_config import RopeScaling
from tests.helpers.tiny_model import tiny_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Writes the config with changes; a value of `...` removes the field."""
    merged = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    return folder


def test_supported_architectures_are_those_with_a_class() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(ARCHITECTURES)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_load_model_config_reads_every_field(tmp_path: Path, family: str) -> None:
    config = load_model_config(
        write(tmp_path, tiny_config(family), rope_theta=5e5, attention_bias=True, mlp_bias=True)
    )
    assert SUPPORTED_ARCHITECTURES[config.architecture] == family
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings) == (320, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 5e5, None)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float32", 1, (2,))


def test_load_model_config_takes_family_defaults(tmp_path: Path) -> None:
    absent: dict[str, Any] = {
        name: ...
        for name in (
            "head_dim",
            "num_key_value_heads",
            "rope_theta",
            "rms_norm_eps",
            "tie_word_embeddings",
            "max_position_embeddings",
            "torch_dtype",
            "attention_bias",
            "hidden_act",
        )
    }
    llama = load_model_config(write(tmp_path, tiny_config("llama"), **absent))
    assert (llama.head_dim, llama.num_kv_heads, llama.rope_theta) == (16, 4, 10000.0)
    assert (llama.rms_norm_eps, llama.tie_word_embeddings) == (1e-6, False)
    assert llama.dtype == "bfloat16"
    qwen3 = load_model_config(write(tmp_path, tiny_config("qwen3"), **absent))
    assert (qwen3.head_dim, qwen3.max_position_embeddings) == (128, 32768)


def test_load_model_config_without_dtype_takes_the_checkpoints(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert load_model_config(write(tmp_path, tiny_config(), torch_dtype=...)).dtype == "float16"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_load_model_config_reads_both_dtype_spellings(tmp_path: Path, key: str) -> None:
    write(tmp_path, tiny_config() | {"torch_dtype": ...}, **{key: "float16"})
    assert load_model_config(tmp_path).dtype == "float16"


def test_load_model_config_prefers_generation_config_for_eos(tmp_path: Path) -> None:
    write(tmp_path, tiny_config())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_load_model_config_reads_old_rope_scaling(tmp_path: Path, type_key: str) -> None:
    write(tmp_path, tiny_config(), rope_scaling={type_key: "linear", "factor": 2})
    config = load_model_config(tmp_path)
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=2.0)
    assert config.rope_theta == 10000.0


def test_load_model_config_reads_new_rope_parameters(tmp_path: Path) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    write(tmp_path, tiny_config(), rope_theta=..., rope_parameters=parameters)
    config = load_model_config(tmp_path)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(rope_type="llama3", **LLAMA3)
    write(tmp_path, tiny_config(), rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    config = load_model_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("architectures", ["GPT2LMHeadModel"], "LlamaForCausalLM, MixtralForCausalLM"),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}, "rope_type"),
        ("rope_scaling", {"type": "linear"}, "factor"),
        ("rope_scaling", {"full_attention": {"rope_type": "default"}}, "one set"),
        ("rope_scaling", {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "above"),
        ("sliding_window", 128, "sliding_window is 128"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types"),
        ("hidden_act", "gelu", "hidden_act"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
        ("hidden_size", ..., "hidden_size is missing"),
        ("hidden_size", "64", "whole number"),
        ("num_hidden_layers", 0, "num_layers is 0"),
        ("num_key_value_heads", 3, "no multiple"),
        ("head_dim", 15, "head_dim is 15"),
        ("torch_dtype", "int8", "torch_dtype"),
        ("rms_norm_eps", -1.0, "rms_norm_eps"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("eos_token_id", ["</s>"], "eos_token_id"),
    ],
)
def test_load_model_config_refusal_names_the_field(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    write(tmp_path, tiny_config(), **{field: value})
    with pytest.raises(ConfigError, match=said):
        load_model_config(tmp_path)


def test_load_model_config_qwen3_window_counts_only_when_switched_on(tmp_path: Path) -> None:
    write(tmp_path, tiny_config("qwen3"), sliding_window=64, use_sliding_window=False)
    assert load_model_config(tmp_path).num_layers == 2
    write(tmp_path, tiny_config("qwen3"), sliding_window=64, use_sliding_window=True)
    with pytest.raises(ConfigError, match="sliding_window"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_load_model_config_bad_json_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_load_model_config_missing_file_says_what_a_folder_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
