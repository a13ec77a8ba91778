"""Shapes of published models, with random weights, and what their steps must cost.

Costs come from the parameters that our own model of the shape has, so that they follow whatever
form its weights have.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compiled_engine.config import EngineConfig, Quantization

CACHE_BYTES = 2  # of a key or value


@dataclass(frozen=True)
class ModelShape:
    """A model by its `config.json`.

    Attributes:
        name, dtype: as in rows.
        config: the file's content.
        quantization: the engine's option of that name.
        quantizes_head: the engine's option `quantize_lm_head`.
    """

    name: str
    dtype: str
    config: dict[str, Any]
    quantization: Quantization = "auto"
    quantizes_head: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What the engine is told besides the folder."""
        return {"quantization": self.quantization, "quantize_lm_head": self.quantizes_head}

    @property
    def flags(self) -> list[str]:
        """The same as flags of a command that starts an engine."""
        flags = ["--load-format", "dummy"]
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                flags += [flag] if value else []
            else:
                flags += [flag, str(value)]
        return flags

    @cached_property
    def costs(self) -> Costs:
        """What its parts weigh and compute."""
        import tempfile

        from compiled_engine.custom_ops.registry import Target
        from compiled_engine.settings import model_config_of

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config))
            config = EngineConfig(model=folder, load_format="dummy", **self.options)
            return _costs(model_config_of(config, Path(folder), Target("cuda")))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Bytes and operations.

    Attributes:
        dense_bytes: of the weights that every decode step reads, the head among them.
        expert_bytes: of one expert, summed over the layers that have experts.
        num_experts, top_k: of such a layer; 0 without any.
        dense_values: of the layers' matrices that every token goes through.
        expert_values: of one expert's matrices, summed over the layers.
        token_cache_bytes: of a token's keys and values in one layer.
        windows: tokens each layer's attention looks back on; 0 for all.
        head_values: query heads times their width.
    """

    dense_bytes: int
    expert_bytes: float
    num_experts: int
    top_k: int
    dense_values: int
    expert_values: float
    token_cache_bytes: int
    windows: tuple[int, ...]
    head_values: int

    def step_bytes(self, context_tokens: float, batch_size: int, num_distinct: float) -> float:
        """Fewest bytes of a decode step: weights once, what attention sees, the KV written.

        Args:
            context_tokens: tokens in the cache before the step, summed over the rows.
            batch_size: rows, one token each.
            num_distinct: experts of a layer that the rows go through, mean of the layers.
        """
        mean = context_tokens / batch_size
        seen = sum(min(mean, window - 1) if window else mean for window in self.windows)
        cache = batch_size * (seen + len(self.windows)) * self.token_cache_bytes
        return self.dense_bytes + num_distinct * self.expert_bytes + cache

    def prefill_flops(self, prompt_lens: Sequence[int]) -> float:
        """Operations of the layers' products and of causal attention; the head is left out."""
        attended = sum(_pairs(n, window) for n in prompt_lens for window in self.windows)
        return self.linear_flops(prompt_lens) + 4.0 * self.head_values * attended

    def linear_flops(self, prompt_lens: Sequence[int]) -> float:
        """The part of the layers' products."""
        values = self.dense_values + self.top_k * self.expert_values
        return 2.0 * values * sum(prompt_lens)

    def uniform_distinct(self, batch_size: int) -> float:
        """Experts of a layer that some row goes through, if rows choose uniformly."""
        missed = (1 - self.top_k / self.num_experts) ** batch_size
        return self.num_experts * (1 - missed)


def _pairs(length: int, window: int) -> float:
    """Pairs of a token and one it sees, itself counted by half."""
    if not window or window >= length:
        return length**2 / 2
    return window * (length - window) + window**2 / 2


def _costs(config: Any) -> Costs:
    import torch

    from compiled_engine.models import ARCHITECTURES
    from compiled_engine.models.weights import outline_model

    model = outline_model(ARCHITECTURES[config.architecture], config, dtype=torch.bfloat16)
    dense_bytes = expert_bytes = dense_values = expert_values = 0
    for name, parameter in model.named_parameters():
        num_values = parameter.numel() * (1 if parameter.is_floating_point() else 2)
        is_matrix = name.endswith(("weight", "_proj")) and parameter.dim() > 1
        if ".experts." in name:
            expert_bytes += parameter.nbytes
            expert_values += num_values if is_matrix else 0
        elif name != "model.embed_tokens.weight":
            dense_bytes += parameter.nbytes
            dense_values += num_values if is_matrix and name != "lm_head.weight" else 0
    if config.tie_word_embeddings:
        dense_bytes += model.model.embed_tokens.weight.nbytes
    moe = config.moe
    num_experts = moe.num_experts if moe else 0
    return Costs(
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes / max(num_experts, 1),
        num_experts=num_experts,
        top_k=moe.top_k if moe else 0,
        dense_values=dense_values,
        expert_values=expert_values / max(num_experts, 1),
        token_cache_bytes=2 * config.num_kv_heads * config.head_dim * CACHE_BYTES,
        windows=tuple(config.window(layer) for layer in range(config.num_layers)),
        head_values=config.num_heads * config.head_dim,
    )


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Writes config and tokenizer, without weights; returns the folder.

    The tokenizer has as many tokens as the config says: short byte strings, so that turning ids
    into text costs what it costs with the real one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spellings = (
        "".join(letters)
        for length in itertools.count(1)
        for letters in itertools.product(alphabet, repeat=length)
    )
    tokens = itertools.islice(spellings, config["vocab_size"])
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


_COMMON = {
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = ModelShape(
    "qwen3-8b",
    "bf16",
    {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
)
QWEN3_30B_A3B = ModelShape(
    "qwen3-30b-a3b",
    "bf16",
    {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
)
GPT_OSS_20B = ModelShape(
    "gpt-oss-20b",
    "mxfp4",
    {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
)
SHAPES = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-8b-fp8": replace(QWEN3_8B, dtype="fp8", quantization="fp8"),
    "qwen3-8b-nvfp4": replace(QWEN3_8B, dtype="nvfp4", quantization="nvfp4"),
    "qwen3-8b-nvfp4-head": replace(
        QWEN3_8B, dtype="nvfp4_head", quantization="nvfp4", quantizes_head=True
    ),
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": replace(QWEN3_30B_A3B, dtype="fp8", quantization="fp8"),
    "gpt-oss-20b": GPT_OSS_20B,
}
