"""Qwen3, dense: Llama's shape with an RMS norm on every query and key head.

Source: Qwen3 technical report (arXiv 2505.09388).
"""

from __future__ import annotations

from torch import Tensor

from compiled_engine.custom_ops import qk_norm_rope
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import Attention, CausalLM, RMSNorm, Rotary


class Qwen3Attention(Attention):
    """Attention whose queries and keys are normed head by head before rotation."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def position(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            rotary.cos,
            rotary.sin,
            self.q_norm.eps,
        )


class Qwen3ForCausalLM(CausalLM):
    """Llama's layers with `Qwen3Attention`."""

    attention_class = Qwen3Attention
