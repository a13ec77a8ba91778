"""Which linear layers of a model are quantised, and how: plain records, made from a config.

A `QuantPlan` comes from a checkpoint's own description (`quant_config.py`) or from
`--quantization` (`online_plan`). It names layers as checkpoints do (`model.layers.0.mlp.up_proj`);
`quant_linear.py` builds the layers, `quant_layouts.py` reads their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from compiled_engine.errors import ConfigError

# Name of `--quantization` -> format of the weights, format of the activations.
ONLINE_FORMATS = {
    "fp8": ("fp8_channel", "fp8_token"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "int8": ("int8_channel", "int8_token"),
    "int4": ("int4_group", ""),
    "nvfp4": ("nvfp4", ""),
    "nvfp4_w4a4": ("nvfp4", "nvfp4_token"),
    "mxfp4": ("mxfp4", ""),
}
HEAD = "lm_head"
_FP4_NOTE = (
    "activations stay as they are, where the checkpoint asks for 4 bits: products of such need "
    "compute capability 10.0"
)
# Layers that are never quantised on the way in: they are small, or choose experts.
_NEVER_ONLINE = ("embed_tokens", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True, kw_only=True)
class LinearScheme:
    """How one linear layer is quantised.

    Attributes:
        format: of the weight, one of `custom_ops.reference_quant.WEIGHT_FORMATS`.
        activation_format: of the input, or "" where it stays as it is.
        layout: how the checkpoint spells the weight, a key of `quant_layouts.LAYOUTS`; "plain" is
            an unquantised weight that is quantised while it is loaded.
        group_size: int4_group: columns that share a scale; 0 is all.
        has_zero: int4_group: codes that mean 0 are stored, or values.
        has_offset: the former are values that code 8 means, in the scales' dtype.
        scale_dtype: int4_group: dtype of the scales.
        has_order: int4_group: which columns share a group is stored; ours are sorted by it.
    """

    format: str
    activation_format: str = ""
    layout: str = "plain"
    group_size: int = 0
    has_zero: bool = False
    has_offset: bool = False
    scale_dtype: str = "bfloat16"
    has_order: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantPlan:
    """Schemes of a model's linear layers.

    Attributes:
        method: what it was made from, for messages.
        rules: patterns of layer names, and the scheme of what they match; the first match holds.
            "Linear" matches every linear layer.
        ignored: patterns of layers that are not quantised.
        unused: suffixes of tensors that the checkpoint may hold and that are not needed.
        note: what a user should know about how the model is served, or "".
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], LinearScheme], ...]
    ignored: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    note: str = ""

    def scheme(self, name: str) -> LinearScheme | None:
        """The scheme of the layer called `name`; None leaves it as it is."""
        if any(matches(pattern, name) for pattern in self.ignored):
            return None
        for patterns, scheme in self.rules:
            if any(pattern == "Linear" or matches(pattern, name) for pattern in patterns):
                return scheme
        return None

    def scheme_of(self, names: Sequence[str]) -> LinearScheme | None:
        """The scheme that the parts of one fused layer share.

        Raises:
            ConfigError: they do not share one; names two of them.
        """
        schemes = [self.scheme(name) for name in names]
        for name, scheme in zip(names, schemes, strict=True):
            if scheme != schemes[0]:
                described = [s.format if s else "not quantised" for s in (schemes[0], scheme)]
                raise ConfigError(
                    f"quantization_config: {names[0]} is {described[0]} and {name} is "
                    f"{described[1]}; both are rows of one matrix here and must be alike",
                    param="quantization_config",
                )
        return schemes[0]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a published ignore list means the layer `name`.

    `re:` is a regular expression from the name's start; `*` and `?` are a shell pattern for the
    name or for a module that holds it; anything else is a run of whole parts of the dotted name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."


def online_plan(name: str, dtype: str, *, quantizes_head: bool) -> QuantPlan:
    """Every linear layer in the format called `name`, made from unquantised weights.

    Args:
        name: a key of `ONLINE_FORMATS`.
        dtype: the model's own, which int4 scales take.
        quantizes_head: the output projection too.
    """
    ignored = _NEVER_ONLINE if quantizes_head else (*_NEVER_ONLINE, HEAD)
    scheme = online_scheme(name, dtype)
    return QuantPlan(method=name, rules=((("Linear",), scheme),), ignored=ignored)


def without_fp4_activations(plan: QuantPlan) -> QuantPlan:
    """The plan of a checkpoint for a device that does not multiply 4-bit activations.

    Just the weights of such layers are quantised; the plan's note says so.
    """

    def kept(scheme: LinearScheme) -> LinearScheme:
        is_fp4 = scheme.activation_format.startswith("nvfp4")
        return replace(scheme, activation_format="") if is_fp4 else scheme

    rules = tuple((patterns, kept(scheme)) for patterns, scheme in plan.rules)
    if rules == plan.rules:
        return plan
    return replace(plan, rules=rules, note="; ".join(filter(None, (_FP4_NOTE, plan.note))))


def online_scheme(name: str, dtype: str) -> LinearScheme:
    """The scheme of `--quantization name`."""
    weights, activations = ONLINE_FORMATS[name]
    group_size = 128 if weights == "int4_group" else 0
    return LinearScheme(
        format=weights, activation_format=activations, group_size=group_size, scale_dtype=dtype
    )


def with_quantized_head(plan: QuantPlan, dtype: str) -> QuantPlan:
    """The plan of a checkpoint, and the output projection quantised on the way in.

    It gets the format of the first rule, as `--quantization` would make it. A head that the
    checkpoint holds quantised stays what it is.
    """
    if plan.scheme(HEAD) is not None:
        return plan
    wanted = plan.rules[0][1]
    names = [name for name, (weights, _) in ONLINE_FORMATS.items() if weights == wanted.format]
    has_activations = bool(wanted.activation_format)
    alike = [name for name in names if bool(ONLINE_FORMATS[name][1]) == has_activations]
    name = next(iter((*alike, *names)), "fp8")
    rules = (((f"re:{HEAD}$",), online_scheme(name, dtype)), *plan.rules)
    # Patterns that mean the head and nothing else are dropped; others keep it out of this one.
    ignored = tuple(pattern for pattern in plan.ignored if not matches(pattern, HEAD))
    return replace(plan, rules=rules, ignored=ignored)
