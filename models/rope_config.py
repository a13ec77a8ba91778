"""Rotary parameters of a `config.json`: the base, and how frequencies are stretched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from compiled_engine.models.config_fields import Fields

RopeType = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length the model was trained for.

    Attributes:
        rope_type: "linear" divides all frequencies by `factor`; "llama3" and "yarn" divide the low
            ones only.
        factor: at least 1.
        low_freq_factor: llama3: wavelengths above `original / low_freq_factor` are stretched fully.
        high_freq_factor: llama3: wavelengths below `original / high_freq_factor` are kept.
        original_max_position_embeddings: llama3, yarn: trained length, tokens.
        beta_fast: yarn: frequencies that turn more often than this in the trained length are kept.
        beta_slow: yarn: those that turn less often are stretched fully.
        truncate: yarn: the two limits are rounded to whole frequencies, outwards.
        attention_factor: yarn: multiplies cosines and sines.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(
    fields: Fields, *, default_theta: float, default: dict[str, Any] | None = None
) -> tuple[float, RopeScaling | None]:
    """`rope_theta` and the scaling from `rope_parameters` (new) or `rope_scaling` (old).

    Args:
        fields: of `config.json`.
        default_theta: of the model's family.
        default: the family's rotary parameters where the file has none.

    Raises:
        ConfigError: a kind of scaling that is not computed here, or values that cannot be.
    """
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    raw = fields.values.get(name) or default or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        fields.refuse(name, f"is {raw!r}; one set of rotary parameters for all layers is supported")
    rope = Fields(raw, fields.path)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    if raw.get("partial_rotary_factor", 1) not in (None, 1):
        fields.refuse("partial_rotary_factor", f"is {raw['partial_rotary_factor']}; only 1 works")
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type == "linear":
        return theta, RopeScaling(rope_type="linear", factor=rope.number("factor"))
    if rope_type == "llama3":
        return theta, _llama3(rope, fields, name)
    if rope_type == "yarn":
        return theta, _yarn(rope, fields, name)
    fields.refuse(
        f"{name}.rope_type",
        f'is "{rope_type}"; supported are "default", "linear", "llama3" and "yarn"',
    )


def _llama3(rope: Fields, fields: Fields, name: str) -> RopeScaling:
    scaling = RopeScaling(
        rope_type="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        fields.refuse(
            f"{name}.high_freq_factor",
            f"is {scaling.high_freq_factor}; it must be above low_freq_factor = "
            f"{scaling.low_freq_factor}",
        )
    return scaling


def _yarn(rope: Fields, fields: Fields, name: str) -> RopeScaling:
    """YaRN, arXiv 2309.00071; the attention factor as in DeepSeek's files where they say mscale."""
    factor = rope.number("factor")
    longest = fields.values.get("max_position_embeddings")
    trained = rope.integer("original_max_position_embeddings", longest)
    if trained < 1:
        fields.refuse(
            f"{name}.original_max_position_embeddings", f"is {trained}; it must be at least 1"
        )
    attention_factor = rope.values.get("attention_factor")
    if attention_factor is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        above = _temperature(factor, rope.number("mscale"))
        attention_factor = above / _temperature(factor, rope.number("mscale_all_dim"))
    else:
        attention_factor = _temperature(factor, 1.0)
    scaling = RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=trained,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=attention_factor,
    )
    if scaling.beta_fast <= scaling.beta_slow:
        fields.refuse(
            f"{name}.beta_fast",
            f"is {scaling.beta_fast}; it must be above beta_slow = {scaling.beta_slow}",
        )
    return scaling


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
