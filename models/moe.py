"""The mixture of experts that stands where other models have an MLP.

Every token goes through the few experts its router chose, and through a shared one where the model
has it. Source: DeepSeekMoE (arXiv 2401.06066) for the shared expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import Activation, ExpertWeights, Routes, experts, route
from compiled_engine.custom_ops.quant_pack import MXFP4_GROUP
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP
from compiled_engine.custom_ops.reference_quant import BLOCK
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import CausalLM, GatedMLP
from compiled_engine.models.moe_config import MoEConfig

# Matrices that lie one below the other in each stacked parameter.
_PARTS = {"gate_up_proj": 2, "down_proj": 1}
_ENDINGS = ("", "_scale", "_global_scale")


class Router(nn.Linear):
    """Hidden states [T, hidden] to logits [T, num_experts].

    Attributes:
        e_score_correction_bias: [num_experts] fp32, for choosing only; None where there is none.
    """

    e_score_correction_bias: Tensor | None
    fixed_dtypes = ("e_score_correction_bias",)

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe.num_experts, bias=moe.has_router_bias)
        bias = nn.Parameter(torch.zeros(moe.num_experts)) if moe.has_score_bias else None
        self.register_parameter("e_score_correction_bias", bias)


class Experts(nn.Module):
    """The matrices of all experts of a layer, stacked; see `custom_ops.reference_moe.experts`.

    Attributes:
        format: of the matrices: "", "mxfp4", "nvfp4" or "fp8_block".
        layout: how the checkpoint spells each matrix that has that format here, a key of
            `quant_layouts.LAYOUTS`; "" where its tensors are read as they are.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None
    gate_up_proj_scale: Tensor | None
    down_proj_scale: Tensor | None
    gate_up_proj_global_scale: Tensor | None
    down_proj_global_scale: Tensor | None

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.num_experts = moe.num_experts
        self.sizes = {
            "gate_up_proj": (2 * moe.intermediate_size, hidden_size),
            "down_proj": (hidden_size, moe.intermediate_size),
        }
        for name, (num_rows, _) in self.sizes.items():
            bias = torch.empty(moe.num_experts, num_rows) if moe.has_bias else None
            self.register_parameter(f"{name}_bias", None if bias is None else nn.Parameter(bias))
        self.quantize(moe.format)

    def quantize(self, format: str, layout: str = "") -> None:
        """Takes room for matrices in a format, in place of what there was."""
        self.format, self.layout = format, layout
        for name, (num_rows, num_columns) in self.sizes.items():
            rows, scale, global_scale = (self.num_experts, num_rows), None, None
            if format == "nvfp4":
                weight = _frozen(*rows, num_columns // 2, dtype=torch.uint8)
                scale = _frozen(*rows, num_columns // NVFP4_GROUP, dtype=torch.float8_e4m3fn)
                global_scale = _frozen(self.num_experts, _PARTS[name], dtype=torch.float32)
            elif format == "mxfp4":
                weight = _frozen(*rows, num_columns // 2, dtype=torch.uint8)
                scale = _frozen(*rows, num_columns // MXFP4_GROUP, dtype=torch.uint8)
            elif format == "fp8_block":
                blocks = (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
                weight = _frozen(*rows, num_columns, dtype=torch.float8_e4m3fn)
                scale = _frozen(self.num_experts, *blocks, dtype=torch.float32)
            else:
                weight = nn.Parameter(torch.empty(*rows, num_columns))
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_scale", scale)
            self.register_parameter(f"{name}_global_scale", global_scale)

    @property
    def fixed_dtypes(self) -> tuple[str, ...]:
        """Names of the parameters whose dtype does not follow the model's."""
        return tuple(f"{n}{end}" for n in self.sizes for end in _ENDINGS) if self.format else ()

    def weights(self) -> ExpertWeights:
        """What the op takes."""
        return ExpertWeights(
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            self.gate_up_proj_scale,
            self.down_proj_scale,
            self.gate_up_proj_global_scale,
            self.down_proj_global_scale,
            self.format,
        )


def _frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class SparseMLP(nn.Module):
    """Router, experts and, where the model has one, the expert that all tokens share."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "the model has no experts"
        self.top_k = moe.top_k
        self.scoring = moe.scoring
        self.renormalize = moe.renormalize
        self.num_groups, self.top_groups = moe.num_groups, moe.top_groups
        self.scale = moe.scale
        self.activation = Activation(moe.activation, moe.alpha, moe.limit)
        self.gate = Router(config.hidden_size, moe)
        self.experts = Experts(config.hidden_size, moe)
        shared = moe.shared_intermediate_size
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def choose(self, x: Tensor) -> Routes:
        """The experts of every row of x [T, hidden], and their weights."""
        return route(
            self.gate(x),
            getattr(self.gate, "e_score_correction_bias", None),  # a quantised router has none
            self.top_k,
            scoring=self.scoring,
            renormalize=self.renormalize,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            scale=self.scale,
        )

    def forward(self, x: Tensor) -> Tensor:
        out = experts(x, self.choose(x), self.experts.weights(), self.activation)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class SparseCausalLM(CausalLM):
    """A `CausalLM` whose layers are mixtures of experts, but those the config calls dense.

    Attributes:
        expert_names: of an expert's gate, up and down matrix in checkpoints of one tensor each.
        is_interleaved: checkpoints stack all experts, and rows of gate and up alternate.
    """

    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_interleaved = False

    def make_mlp(self, layer: int) -> nn.Module:
        """Experts, or an ordinary MLP in a dense layer."""
        moe = self.config.moe
        assert moe is not None, "the model has no experts"
        return GatedMLP(self.config) if layer in moe.dense_layers else SparseMLP(self.config)
