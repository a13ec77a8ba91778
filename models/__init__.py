"""Plain PyTorch models, and the dict from architecture name to class."""

from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.llama import LlamaForCausalLM
from compiled_engine.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}

__all__ = ["ARCHITECTURES", "CausalLM", "ModelConfig"]
