"""Writes a tiny GGUF file the way llama.cpp's converter does, from Hugging Face-named weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from tests.helpers.tiny_model import CHAT_TEMPLATE, tiny_config, tiny_weights

# A vocabulary of special tokens and byte symbols, as in `tiny_model.write_tiny_tokenizer`.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def adjacent_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's layout: element i and i + head_dim / 2 of a head become neighbours."""
    half = tensor.shape[0] // num_heads // 2
    rows = [
        head * 2 * half + part * half + pair
        for head in range(num_heads)
        for pair in range(half)
        for part in range(2)
    ]
    return tensor[rows]


def gguf_tensors(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under GGUF names; q and k of llama in llama.cpp's layout."""
    tensors = {}
    for name, tensor in weights.items():
        if name in OUTER:
            tensors[OUTER[name]] = tensor
            continue
        _, _, layer, *middle, kind = name.split(".")
        part = NAMES[".".join(middle)]
        if config["model_type"] == "llama" and part in ("attn_q", "attn_k"):
            field = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            tensor = adjacent_pairs(tensor, config[field])
        tensors[f"blk.{layer}.{part}.{kind}"] = tensor
    return tensors


def write_tiny_gguf(
    path: Path,
    *,
    family: str = "llama",
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
    architecture: str | None = None,
    **overrides: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Writes the file; returns the config and the Hugging Face-named weights it was made from.

    Args:
        path: of the file.
        family: "llama" or "qwen3".
        quantization: format of the matrices; vectors stay float32.
        extra_tensors: further tensors by GGUF name.
        metadata: further metadata of type str, int, float or bool by full key.
        architecture: what the file calls itself, if not the family.
        **overrides: fields of the config, by Hugging Face names.
    """
    config = tiny_config(family, **overrides)
    weights = tiny_weights(config)
    writer = GGUFWriter(path, architecture or family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        adders.get(type(value), writer.add_string)(key, value)
    for name, tensor in {**gguf_tensors(config, weights), **(extra_tensors or {})}.items():
        is_matrix = tensor.dim() > 1
        kind = quantization if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, weights


def _add_tokenizer(writer: GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*SPECIAL, *alphabet, "he"])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([*[control] * len(SPECIAL), *[normal] * (len(alphabet) + 1)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def dequantized(tensor: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """What is left of a float32 tensor after quantisation."""
    packed = quantize(tensor.numpy(), kind)
    return torch.tensor(gguf.quants.dequantize(packed, kind)).reshape(tensor.shape)
