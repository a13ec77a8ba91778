"""gpt-oss: attention with sinks, every other layer over a window, and experts in 4-bit floats.

Source: gpt-oss model card (arXiv 2508.10925); attention sinks as learned logits.
"""

from __future__ import annotations

import torch
from torch import nn

from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import Attention
from compiled_engine.models.moe import SparseCausalLM


class GptOssAttention(Attention):
    """Attention whose heads may look at nothing: a sink takes the weight."""

    fixed_dtypes = ("sinks",)

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads))


class GptOssForCausalLM(SparseCausalLM):
    """Router and experts have biases; experts are gated by a clamped SwiGLU."""

    attention_class = GptOssAttention
    renamed = {".mlp.gate.": ".mlp.router."}  # noqa: RUF012 - a constant of the class
    is_interleaved = True
