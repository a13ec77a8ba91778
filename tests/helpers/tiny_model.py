"""Writes a tiny model folder with random weights, without importing transformers.

Used by every test that needs a model: `config.json`, `generation_config.json`, `model.safetensors`
with Hugging Face tensor names, a byte-level `tokenizer.json` that can spell any text, and a chat
template in ChatML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# family -> architecture, and the fields its config has more
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # A window above what a page holds and below the prompts' lengths; experts packed as published.
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "attention_bias": True,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "quantization_config": {"quant_method": "mxfp4"},
        },
    ),
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A `config.json` of 2 layers, hidden 64, 4 query and 2 KV heads of 16, vocabulary 320."""
    architecture, more = _FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
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
        **more,
    }
    unknown = set(overrides) - set(config) - {"rope_scaling", "rope_parameters", "sliding_window"}
    if unknown:
        raise KeyError(f"unknown config fields: {sorted(unknown)}")
    return config | overrides


def tiny_weights(
    config: dict[str, Any], *, seed: int = 0, std: float = 0.2
) -> dict[str, torch.Tensor]:
    """Hugging Face names -> seeded random weights; norms lie near 1, biases are not 0.

    The standard deviation is larger than a trained model's, so that greedy answers vary and a
    swapped or missing tensor moves the logits.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    hidden = config["hidden_size"]
    head_dim, vocab = config["head_dim"], config["vocab_size"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    weights = {"model.embed_tokens.weight": normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (q_size, hidden, config["attention_bias"]),
            "self_attn.k_proj": (kv_size, hidden, config["attention_bias"]),
            "self_attn.v_proj": (kv_size, hidden, config["attention_bias"]),
            "self_attn.o_proj": (hidden, q_size, config["attention_bias"]),
            **_mlp_linears(config, layer),
        }
        for name, (num_out, num_in, has_bias) in linears.items():
            weights[f"{prefix}{name}.weight"] = normal(num_out, num_in)
            if has_bias:
                weights[f"{prefix}{name}.bias"] = normal(num_out)
        weights[f"{prefix}input_layernorm.weight"] = norm(hidden)
        weights[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            weights[f"{prefix}self_attn.q_norm.weight"] = norm(head_dim)
            weights[f"{prefix}self_attn.k_norm.weight"] = norm(head_dim)
        if config["model_type"] == "gpt_oss":
            weights[f"{prefix}self_attn.sinks"] = normal(config["num_attention_heads"]) * 5
            packed = _packed_experts(config, generator)
            weights |= {f"{prefix}mlp.experts.{name}": value for name, value in packed.items()}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden)
    return weights


def _mlp_linears(config: dict[str, Any], layer: int) -> dict[str, tuple[int, int, bool]]:
    """Name -> (outputs, inputs, has a bias) of what a layer has behind its attention."""
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    if family == "gpt_oss":
        return {"mlp.router": (config["num_local_experts"], hidden, True)}
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    prefixes, has_bias = [f"{block}."], config["mlp_bias"]
    linears = {}
    if family == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    if family == "mixtral" or layer not in config.get("mlp_only_layers", [layer]):
        num_experts = config.get("num_experts") or config["num_local_experts"]
        inner = config.get("moe_intermediate_size", inner)
        linears[f"{block}.gate"] = (num_experts, hidden, False)
        prefixes = [f"{block}.experts.{expert}." for expert in range(num_experts)]
        has_bias = False
    gate, up, down = names
    for prefix in prefixes:
        linears[f"{prefix}{gate}"] = linears[f"{prefix}{up}"] = (inner, hidden, has_bias)
        linears[f"{prefix}{down}"] = (hidden, inner, has_bias)
    return linears


def _packed_experts(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """gpt-oss: all experts of a layer in 4-bit floats, gate and up in turn."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    made = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        shape = (config["num_local_experts"], rows, columns // 32)
        codes = torch.randint(0, 256, (*shape, 16), generator=generator)
        made[f"{name}_blocks"] = codes.to(torch.uint8)
        exponents = torch.randint(121, 125, shape, generator=generator)
        made[f"{name}_scales"] = exponents.to(torch.uint8)
        bias = torch.randn(shape[:2], generator=generator) * 0.2
        made[f"{name}_bias"] = bias.to(getattr(torch, config["torch_dtype"]))
    return made


def write_tiny_tokenizer(folder: Path) -> None:
    """Writes a byte-level `tokenizer.json` with 260 ids and a ChatML `chat_template.jinja`.

    Ids 0 to 2 are `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`; 3 is a spare special token; the
    256 byte symbols follow. Token ids of text are its UTF-8 bytes, so splits are easy to provoke.
    """
    special = ["<|endoftext|>", BOS, EOS, "<|spare|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": BOS, "eos_token": EOS, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_tiny_model(
    folder: Path, *, family: str = "llama", seed: int = 0, std: float = 0.2, **overrides: Any
) -> Path:
    """Writes a loadable model folder and returns it.

    Args:
        folder: made if missing.
        family: "llama", "qwen3", "qwen3_moe", "mixtral" or "gpt_oss".
        seed: of the weights.
        std: standard deviation of the matrices.
        **overrides: fields of `config.json`, by their Hugging Face names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = tiny_weights(config, seed=seed, std=std)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tiny_tokenizer(folder)
    return folder
