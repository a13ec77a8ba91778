"""Hugging Face's own models as the reference of logits, in fp32 and in bf16, with their routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor


class Logits(NamedTuple):
    """What a model gave for one sequence of T tokens.

    Attributes:
        logits: [T, vocab] fp32.
        routers: logits [T, num_experts] fp32 of each layer that has experts.
    """

    logits: Tensor
    routers: list[Tensor]


class Reference:
    """A model in fp32 and the same model in bf16, whose loss is the yardstick of others.

    Both have the weights that bf16 can hold, so that they differ by their arithmetic alone.

    Args:
        folder: of a tiny model.
        device: where they run.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.rounded = _load(folder, torch.bfloat16).to(device).eval()
        self.truth = _load(folder, torch.float32).to(device).eval()
        self.device = device
        for name, parameter in self.truth.named_parameters():
            parameter.data = parameter.data.bfloat16().float()
            assert torch.equal(parameter.data, self.rounded.get_parameter(name).data.float()), name

    def run(self, tokens: list[int]) -> tuple[Logits, Logits]:
        """In fp32, and in bf16."""
        ids = torch.tensor([tokens], device=self.device)
        return _run(self.truth, ids), _run(self.rounded, ids)

    @property
    def top_k(self) -> int:
        """Experts a token goes to; 0 in a model without experts."""
        return int(getattr(self.truth.config, "num_experts_per_tok", 0))


@torch.inference_mode()
def _run(model: Any, ids: Tensor) -> Logits:
    routers: list[Tensor] = []

    def keep(module: Any, arguments: Any, outputs: Any) -> None:
        routers.append(outputs[0].float().flatten(0, -2))

    modules = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    hooks = [module.register_forward_hook(keep) for module in modules]
    logits = model(ids, use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    assert len(routers) == len(modules)
    return Logits(logits, routers)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    plain: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": "eager"}
    if config.model_type != "gpt_oss":
        return AutoModelForCausalLM.from_pretrained(folder, **plain)
    # transformers needs kernels from elsewhere for packed experts: the model takes their values.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    del config.quantization_config
    model = AutoModelForCausalLM.from_config(**plain)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        packed = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        values = convert_moe_packed_tensors(*packed, dtype=torch.float32)
        tensors[name.removesuffix("_blocks")] = values
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    return model
