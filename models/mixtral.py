"""Mixtral: Llama's attention, which may look at a window only, and experts in every layer.

Source: Mixtral of Experts (arXiv 2401.04088).
"""

from __future__ import annotations

from compiled_engine.models.moe import SparseCausalLM


class MixtralForCausalLM(SparseCausalLM):
    """Softmax over the chosen experts."""

    renamed = {".mlp.": ".block_sparse_moe."}  # noqa: RUF012 - a constant of the class
    expert_names = ("w1", "w3", "w2")
