"""Llama 2 and 3, SmolLM2 and whatever else says `LlamaForCausalLM`.

Source: Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783) model descriptions.
"""

from __future__ import annotations

from compiled_engine.models.layers import CausalLM


class LlamaForCausalLM(CausalLM):
    """RMSNorm before attention and before a SiLU-gated MLP; rotary positions; grouped keys."""
