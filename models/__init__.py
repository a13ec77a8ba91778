"""Plain PyTorch models, and the dict from architecture name to class."""

from compiled_engine.models.config import ModelConfig
from compiled_engine.models.gpt_oss import GptOssForCausalLM
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.llama import LlamaForCausalLM
from compiled_engine.models.mixtral import MixtralForCausalLM
from compiled_engine.models.qwen3 import Qwen3ForCausalLM
from compiled_engine.models.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "GptOssForCausalLM": GptOssForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}

__all__ = ["ARCHITECTURES", "CausalLM", "ModelConfig"]
