"""What a `config.json` says of a mixture of experts, and of layers that look at a window only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from compiled_engine.models.config_fields import Fields

_MXFP4_GROUP = 32
# Model types whose feed-forward layers are mixtures of experts.
MOE_FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixtures of experts of one model; all of them are alike.

    Attributes:
        num_experts: in a layer.
        top_k: experts a token goes through.
        intermediate_size: inner size of one expert.
        dense_layers: layers that have an ordinary MLP instead.
        scoring: what scores are: a softmax over the experts, or a sigmoid of each.
        renormalize: the weights of the chosen are divided by their sum.
        num_groups, top_groups, scale, has_score_bias: as in `custom_ops.reference_moe.route`.
        shared_intermediate_size: inner size of an MLP that every token goes through; 0 for none.
        has_router_bias: of the router's product.
        has_bias: of the experts' products.
        activation: "silu", or "swiglu_clamped" with `alpha` and `limit`.
        format: of the experts' weights in the checkpoint: "" for plain ones, "mxfp4" for those that
            gpt-oss has stacked.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    has_score_bias: bool = False
    shared_intermediate_size: int = 0
    has_router_bias: bool = False
    has_bias: bool = False
    activation: Literal["silu", "swiglu_clamped"] = "silu"
    alpha: float = 0.0
    limit: float = math.inf
    format: Literal["", "mxfp4"] = ""


def read_moe(fields: Fields, family: str, num_layers: int) -> MoEConfig | None:
    """The mixtures of experts of a family that has them, None for others.

    Raises:
        ConfigError: sizes that do not fit each other.
    """
    if family not in MOE_FAMILIES:
        return None
    read = {"qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "gpt_oss": _gpt_oss}[family]
    moe = read(fields, num_layers)
    for name, value in (
        ("num_experts", moe.num_experts),
        ("num_experts_per_tok", moe.top_k),
        ("moe_intermediate_size", moe.intermediate_size),
    ):
        if value < 1:
            fields.refuse(name, f"is {value}; it must be at least 1")
    if moe.top_k > moe.num_experts:
        fields.refuse(
            "num_experts_per_tok", f"is {moe.top_k}; the model has {moe.num_experts} experts"
        )
    return moe


def _num_experts(fields: Fields, default: int) -> int:
    """By the name of either version of transformers."""
    return fields.integer("num_experts", fields.integer("num_local_experts", default))


def _qwen3_moe(fields: Fields, num_layers: int) -> MoEConfig:
    step = fields.integer("decoder_sparse_step", 1)
    if step < 1:
        fields.refuse("decoder_sparse_step", f"is {step}; it must be at least 1")
    dense = set(fields.integers("mlp_only_layers"))
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return MoEConfig(
        num_experts=_num_experts(fields, 128),
        top_k=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        dense_layers=tuple(sorted(dense)),
        renormalize=fields.flag("norm_topk_prob"),
    )


def _mixtral(fields: Fields, num_layers: int) -> MoEConfig:
    del num_layers
    return MoEConfig(
        num_experts=_num_experts(fields, 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
    )


def _gpt_oss(fields: Fields, num_layers: int) -> MoEConfig:
    del num_layers
    inner, hidden = fields.integer("intermediate_size"), fields.integer("hidden_size")
    is_packed = quantization_method(fields) == "mxfp4"
    for name, size in (("hidden_size", hidden), ("intermediate_size", inner)):
        if is_packed and size % _MXFP4_GROUP:
            fields.refuse(name, f"is {size}; mxfp4 needs a multiple of {_MXFP4_GROUP}")
    return MoEConfig(
        num_experts=_num_experts(fields, 128),
        top_k=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        intermediate_size=inner,
        has_router_bias=True,
        has_bias=True,
        activation="swiglu_clamped",
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
        format="mxfp4" if is_packed else "",
    )


def quantization_method(fields: Fields) -> str | None:
    """`quant_method` of the file's `quantization_config`, None without one."""
    config: Any = fields.values.get("quantization_config")
    return str(config.get("quant_method")) if isinstance(config, dict) else None


def read_windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Tokens each layer's attention looks back on, itself included; 0 for all. Empty: all full.

    Raises:
        ConfigError: windows in a family that is computed without, or of which it is unclear which
            layers have them.
    """
    window = fields.values.get("sliding_window")
    kinds = fields.values.get("layer_types")
    if family == "mixtral":
        return () if window is None else (fields.integer("sliding_window"),) * num_layers
    if family == "gpt_oss":
        pair = ("sliding_attention", "full_attention")
        kinds = kinds or [pair[layer % 2] for layer in range(num_layers)]
        if set(kinds) - set(pair) or len(kinds) != num_layers:
            fields.refuse(
                "layer_types", f"is {kinds}; it must hold {num_layers} of {' and '.join(pair)}"
            )
        size = fields.integer("sliding_window", 128)
        if size < 1:
            fields.refuse("sliding_window", f"is {size}; it must be at least 1")
        return tuple(size if kind == pair[0] else 0 for kind in kinds)
    # Qwen configs carry a window size that only `use_sliding_window: true` switches on.
    is_qwen = family.startswith("qwen3")
    if window is not None and fields.values.get("use_sliding_window", not is_qwen):
        fields.refuse("sliding_window", f"is {window}; only full attention is supported")
    other = set(kinds or ()) - {"full_attention"}
    if other:
        fields.refuse("layer_types", f"holds {sorted(other)}; only full_attention is there")
    return ()
