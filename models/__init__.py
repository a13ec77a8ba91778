"""Plain PyTorch models, and the dict from architecture name to class."""

from collections.abc import Callable
from typing import Any

from compiled_engine.models.config import ModelConfig
from compiled_engine.models.gpt_oss import GptOssForCausalLM
from compiled_engine.models.hf_config import HfModelConfig
from compiled_engine.models.hf_model import HfCausalLM
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


def model_class(config: ModelConfig) -> Callable[[Any], CausalLM]:
    """The class that runs a model; takes its config."""
    if isinstance(config, HfModelConfig):
        return HfCausalLM
    return ARCHITECTURES[config.architecture]


__all__ = ["ARCHITECTURES", "CausalLM", "HfModelConfig", "ModelConfig", "model_class"]
