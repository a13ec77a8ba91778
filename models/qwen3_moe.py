"""Qwen3 with mixtures of experts: Qwen3's attention, and experts in place of most MLPs.

Source: Qwen3 technical report (arXiv 2505.09388).
"""

from __future__ import annotations

from compiled_engine.models.moe import SparseCausalLM
from compiled_engine.models.qwen3 import Qwen3Attention


class Qwen3MoeForCausalLM(SparseCausalLM):
    """Softmax over all experts, the best few, their weights renormalised if the config says so."""

    attention_class = Qwen3Attention
