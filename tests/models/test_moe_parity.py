"""Logits of our models with experts equal Hugging Face's, from checkpoints in published form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_engine.models.config import load_model_config
from compiled_engine.models.moe import SparseMLP
from compiled_engine.models.moe_config import MoEConfig
from tests.models.test_parity import BASE, TOLERANCE, load, relative_difference

FAMILIES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig"),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-norm": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "qwen-no-norm": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "qwen-7-experts-top-3": ("qwen3_moe", {**QWEN, "num_experts": 7, "num_experts_per_tok": 3}),
    "qwen-top-1": ("qwen3_moe", {**QWEN, "num_experts_per_tok": 1}),
    "qwen-top-all": ("qwen3_moe", {**QWEN, "num_experts_per_tok": 8}),
    "qwen-every-other-dense": ("qwen3_moe", {**QWEN, "decoder_sparse_step": 2}),
    "qwen-first-dense": ("qwen3_moe", {**QWEN, "mlp_only_layers": [0]}),
    "qwen-tied-yarn": (
        "qwen3_moe",
        {**QWEN, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "qwen-bias": ("qwen3_moe", {**QWEN, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 8}),
    "mixtral-5-experts-top-1": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-full-first": (
        "gpt_oss",
        {**GPT_OSS, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gpt-oss-limits": ("gpt_oss", {**GPT_OSS, "swiglu_alpha": 1.2, "swiglu_limit": 0.5}),
    "gpt-oss-yarn-32": ("gpt_oss", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt-oss-window-1": ("gpt_oss", {**GPT_OSS, "sliding_window": 1}),
}


def write_hugging_face_model(folder: Path, family: str, options: dict[str, Any]) -> Any:
    """Saves a random transformers model, biases, norms and sinks included, and returns it."""
    import transformers

    model_name, config_name = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**BASE, **options})
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return model


def assert_same_logits(reference: Any, folder: Path) -> Tensor:
    """Logits of both on 100 random tokens; returns theirs."""
    model = load(folder)
    ids = torch.randint(0, model.config.vocab_size, (100,), generator=torch.manual_seed(5))
    ours, theirs = model(ids, torch.arange(100)), reference(ids[None]).logits[0]
    assert ours.shape == theirs.shape
    assert relative_difference(ours, theirs) <= TOLERANCE
    return theirs


@pytest.mark.filterwarnings("ignore")  # transformers' own, about the length of tiny YaRN models
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_hugging_face(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    assert_same_logits(write_hugging_face_model(tmp_path, family, options), tmp_path)


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen-norm", {"norm_topk_prob": False}),
        ("mixtral-window", {"sliding_window": None}),
        ("gpt-oss", {"sliding_window": 1000}),
        ("gpt-oss-limits", {"swiglu_limit": 7.0}),
        ("gpt-oss-limits", {"swiglu_alpha": 1.7}),
        ("gpt-oss-yarn-32", {"rope_parameters": {**YARN, "truncate": True}}),
    ],
)
@torch.inference_mode()
def test_options_show_in_the_logits(tmp_path: Path, case: str, change: dict[str, Any]) -> None:
    """What the cases above vary would pass for nothing if it changed nothing."""
    family, options = CASES[case]
    reference = write_hugging_face_model(tmp_path / "a", family, options)
    theirs = assert_same_logits(reference, tmp_path / "a")
    other = write_hugging_face_model(tmp_path / "b", family, {**options, **change})
    assert relative_difference(assert_same_logits(other, tmp_path / "b"), theirs) > 10 * TOLERANCE


def pack_experts(folder: Path, reference: Any) -> None:
    """Puts random 4-bit experts, as published, into a gpt-oss folder, and their values into HF's.

    transformers' own unpacking is the oracle: it has no code in common with ours.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    parameters = dict(reference.named_parameters())
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameters[name].copy_(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("num_experts", [4, 3])
@torch.inference_mode()
def test_packed_gpt_oss_equals_hugging_face_on_unpacked_values(tmp_path: Path, num_experts: int):
    options = {**GPT_OSS, "num_local_experts": num_experts}
    reference = write_hugging_face_model(tmp_path, "gpt_oss", options)
    pack_experts(tmp_path, reference)
    assert load_model_config(tmp_path).moe.format == "mxfp4"
    assert_same_logits(reference, tmp_path)


@torch.inference_mode()
def test_deepseek_routing_and_its_shared_expert_equal_hugging_face(tmp_path: Path) -> None:
    """No DeepSeek model is read, but its kind of layer is whole: scores, bias, groups, sharing."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24}
    groups = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    theirs = DeepseekV3MoE(
        DeepseekV3Config(**sizes, **groups, n_shared_experts=2, routed_scaling_factor=2.5)
    )
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        parameter.normal_(0.0, 0.2)
    theirs.gate.e_score_correction_bias.normal_(0.0, 0.3)
    moe = MoEConfig(
        num_experts=12,
        top_k=4,
        intermediate_size=24,
        scoring="sigmoid",
        num_groups=4,
        top_groups=2,
        scale=2.5,
        has_score_bias=True,
        shared_intermediate_size=48,
    )
    write_hugging_face_model(tmp_path, "mixtral", {})
    config = load_model_config(tmp_path)
    object.__setattr__(config, "moe", moe)
    ours = SparseMLP(config)
    values = dict(theirs.state_dict())
    shared = [values.pop(f"shared_experts.{part}_proj.weight") for part in ("gate", "up")]
    ours.load_state_dict(values | {"shared_experts.gate_up_proj.weight": torch.cat(shared)})
    x = torch.randn(50, 64)
    assert relative_difference(ours(x), theirs(x[None])[0]) <= TOLERANCE
