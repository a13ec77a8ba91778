"""What `config.json` says of experts, windows and YaRN; refusals name the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from compiled_engine.errors import ConfigError
from compiled_engine.models.config import load_model_config
from compiled_engine.models.layers import inverse_frequencies
from tests.helpers.tiny_model import tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def load(folder: Path, family: str, **changes: Any) -> Any:
    """The model config; a value of `...` removes the field."""
    merged = tiny_config(family) | changes
    kept = {key: value for key, value in merged.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return load_model_config(folder)


def test_qwen3_moe_fields(tmp_path: Path):
    moe = load(tmp_path, "qwen3_moe").moe
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (5, 2, 48)
    assert (moe.dense_layers, moe.renormalize, moe.scoring) == ((1,), True, "softmax")
    every_third = load(tmp_path, "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=3)
    assert every_third.moe.dense_layers == (0, 1, 3, 4)
    renamed = load(tmp_path, "qwen3_moe", num_experts=..., num_local_experts=6)
    assert renamed.moe.num_experts == 6
    absent = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"), ...
    )
    default = load(tmp_path, "qwen3_moe", **absent).moe
    assert (default.num_experts, default.top_k, default.intermediate_size) == (128, 8, 768)
    assert not default.renormalize


def test_mixtral_fields(tmp_path: Path):
    config = load(tmp_path, "mixtral")
    assert (config.moe.num_experts, config.moe.top_k) == (4, 2)
    assert (config.moe.intermediate_size, config.moe.renormalize) == (96, True)
    assert config.windows == ()
    assert load(tmp_path, "mixtral", sliding_window=9).windows == (9, 9)
    absent = dict.fromkeys(("rope_theta", "rms_norm_eps", "max_position_embeddings"), ...)
    default = load(tmp_path, "mixtral", **absent)
    assert (default.rope_theta, default.rms_norm_eps) == (1e6, 1e-5)
    assert default.max_position_embeddings == 131072


def test_gpt_oss_fields(tmp_path: Path):
    config = load(tmp_path, "gpt_oss")
    assert config.windows == (11, 0, 11)
    moe = config.moe
    assert (moe.format, moe.activation, moe.alpha, moe.limit) == (
        "mxfp4",
        "swiglu_clamped",
        1.702,
        7.0,
    )
    assert moe.has_bias
    assert moe.has_router_bias
    plain = load(tmp_path, "gpt_oss", quantization_config=..., layer_types=..., swiglu_limit=3.0)
    assert plain.windows == (11, 0, 11)
    assert (plain.moe.format, plain.moe.limit) == ("", 3.0)
    old = load(tmp_path, "gpt_oss", num_experts_per_tok=..., experts_per_token=1)
    assert old.moe.top_k == 1
    assert load(tmp_path, "gpt_oss", attention_bias=...).attention_bias
    rope = load(tmp_path, "gpt_oss", rope_theta=...)
    assert (rope.rope_theta, rope.rope_scaling.rope_type) == (150000.0, "yarn")
    assert (rope.rope_scaling.factor, rope.rope_scaling.truncate) == (32.0, False)


@pytest.mark.parametrize(
    ("family", "field", "value", "said"),
    [
        ("qwen3_moe", "num_experts_per_tok", 6, "num_experts_per_tok is 6; the model has 5"),
        ("qwen3_moe", "num_experts_per_tok", 0, "num_experts_per_tok is 0"),
        ("qwen3_moe", "num_experts", 0, "num_experts is 0"),
        ("qwen3_moe", "moe_intermediate_size", 0, "moe_intermediate_size is 0"),
        ("qwen3_moe", "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("qwen3_moe", "mlp_only_layers", "1", "mlp_only_layers"),
        ("qwen3_moe", "norm_topk_prob", "yes", "norm_topk_prob"),
        ("qwen3_moe", "quantization_config", {"quant_method": "mxfp4"}, "'mxfp4'"),
        ("mixtral", "num_local_experts", 1, "num_experts_per_tok is 2; the model has 1"),
        ("gpt_oss", "quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ("gpt_oss", "hidden_size", 72, "mxfp4 needs a multiple of 32"),
        ("gpt_oss", "intermediate_size", 40, "mxfp4 needs a multiple of 32"),
        ("gpt_oss", "sliding_window", 0, "sliding_window is 0"),
        ("gpt_oss", "layer_types", ["full_attention"], "it must hold 3"),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 3, "layer_types"),
        ("llama", "rope_scaling", {**YARN, "beta_fast": 1.0}, "above beta_slow"),
        ("llama", "rope_scaling", {**YARN, "factor": "x"}, "factor"),
        ("llama", "rope_scaling", {**YARN, "original_max_position_embeddings": 0}, "at least 1"),
    ],
)
def test_refusal_names_the_field(tmp_path: Path, family: str, field: str, value: Any, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        load(tmp_path, family, **{field: value})
    assert caught.value.param


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones(tmp_path: Path):
    plain = inverse_frequencies(load(tmp_path, "llama", head_dim=64))
    config = load(tmp_path, "llama", head_dim=64, rope_scaling=YARN)
    stretched = inverse_frequencies(config)
    ratio = (plain / stretched).tolist()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert ratio == sorted(ratio)
    assert config.rope_scaling.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1)
    given = load(tmp_path, "llama", rope_scaling={**YARN, "attention_factor": 1.5})
    assert given.rope_scaling.attention_factor == 1.5
    scaled = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    both = load(tmp_path, "llama", rope_scaling=scaled).rope_scaling.attention_factor
    assert both == pytest.approx((0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1))


def test_yarn_without_a_trained_length_takes_the_models(tmp_path: Path):
    absent = {"rope_type": "yarn", "factor": 2.0}
    scaling = load(tmp_path, "qwen3", rope_scaling=absent).rope_scaling
    assert scaling.original_max_position_embeddings == 512
