"""The mixture of experts that stands where other models have an MLP.

Every token goes through the few experts its router chose, and through a shared one where the model
has it. Source: DeepSeekMoE (arXiv 2401.06066) for the shared expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import Activation, ExpertWeights, Routes, experts, route
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.layers import CausalLM, GatedMLP
from compiled_engine.models.moe_config import MoEConfig

_MXFP4_GROUP = 32


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
    """The matrices of all experts of a layer, stacked; see `custom_ops.reference_moe.experts`."""

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None
    gate_up_proj_scale: Tensor | None
    down_proj_scale: Tensor | None

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.format = moe.format
        inner = moe.intermediate_size
        self._add("gate_up_proj", moe, 2 * inner, hidden_size)
        self._add("down_proj", moe, hidden_size, inner)

    def _add(self, name: str, moe: MoEConfig, num_rows: int, num_columns: int) -> None:
        rows = (moe.num_experts, num_rows)
        scale = None
        if moe.format == "mxfp4":
            weight = _bytes(*rows, num_columns // 2)
            scale = _bytes(*rows, num_columns // _MXFP4_GROUP)
        else:
            weight = nn.Parameter(torch.empty(*rows, num_columns))
        bias = nn.Parameter(torch.empty(rows)) if moe.has_bias else None
        self.register_parameter(name, weight)
        self.register_parameter(f"{name}_bias", bias)
        self.register_parameter(f"{name}_scale", scale)

    def weights(self) -> ExpertWeights:
        """What the op takes."""
        return ExpertWeights(
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            self.gate_up_proj_scale,
            self.down_proj_scale,
            self.format,
        )


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


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
            self.gate.e_score_correction_bias,
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
