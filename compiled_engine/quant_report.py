"""What a start says of a quantised model: the kernel of each kind of layer, and why that one."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_engine.custom_ops.moe_choice import block_traits, experts_traits, with_target
from compiled_engine.custom_ops.quant import SCALED_PAIRS
from compiled_engine.custom_ops.quant_choice import quantized_linear_traits, scaled_linear_traits
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.reference_quant import quantize
from compiled_engine.custom_ops.registry import KernelRegistry, Target, Traits
from compiled_engine.errors import ConfigError
from compiled_engine.models.moe import SparseMLP
from compiled_engine.models.quant_linear import QuantLinear


class _Kind(NamedTuple):
    """Layers that one kernel serves alike."""

    name: str
    format: str
    activation_format: str
    rows: int
    columns: int

    def __str__(self) -> str:
        activations = self.activation_format or "as they are"
        return (
            f"{self.name} [{self.rows} x {self.columns}], weights {self.format}, activations "
            f"{activations}"
        )


def quantization_report(
    model: nn.Module,
    registry: KernelRegistry | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    max_few: int,
) -> list[str]:
    """A line for each kind of quantised layer, and of experts; empty if the model has none.

    Args:
        model: with its weights.
        registry: chooses kernels; None where products run without one.
        dtype: of activations.
        device: where the model runs.
        max_tokens: of a step.
        max_few: tokens up to which products are `quantized_linear` in decode steps.
    """
    sizes = sorted({1, min(32, max_tokens), max_tokens})
    counts: Counter[_Kind | str] = Counter()
    examples: dict[_Kind | str, nn.Module] = {}
    for name, module in model.named_modules():
        kind = _kind_of(name, module)
        if kind is not None:
            counts[kind] += 1
            examples.setdefault(kind, module)
    lines = []
    for kind, count in counts.items():
        if registry is None:
            how = "dequantised for every product: nothing here reads the format as it is stored"
        else:
            layer, place = examples[kind], (registry, dtype, device)
            chosen = [_chosen(layer, *place, n, is_few=n <= max_few) for n in sizes]
            how = "; ".join(
                f"{size} token{'s' * (size > 1)}: {text}"
                for size, text in zip(sizes, chosen, strict=True)
            )
        lines.append(f"{count} x {kind}: {how}")
    return lines


def _chosen(
    layer: nn.Module,
    registry: KernelRegistry,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
    *,
    is_few: bool,
) -> str:
    """The kernel for so many tokens, and what is against those that rank above it."""
    place = registry, dtype, device, num_tokens
    if isinstance(layer, SparseMLP):
        return _chosen_experts(layer, *place, is_few=is_few)
    assert isinstance(layer, QuantLinear), layer
    return _chosen_linear(layer, *place, is_few=is_few)


def _kind_of(name: str, module: nn.Module) -> _Kind | str | None:
    """Layers of equal kinds have the same kernels; None for what is not quantised."""
    if isinstance(module, SparseMLP) and module.experts.format:
        experts = module.experts
        inner, hidden = experts.sizes["down_proj"][::-1]
        return (
            f"{experts.num_experts} experts [{2 * inner} x {hidden}, {hidden} x {inner}], weights "
            f"{experts.format}, activations as they are"
        )
    if not isinstance(module, QuantLinear):
        return None
    formats = module.format, module.activation_format
    return _Kind(name.rpartition(".")[2], *formats, module.out_features, module.in_features)


def _chosen_experts(
    layer: SparseMLP,
    registry: KernelRegistry,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
    *,
    is_few: bool,
) -> str:
    """Few tokens may be served together with their router."""
    weights, router, target = layer.experts.weights(), layer.gate, Target.of(device)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(num_tokens, router.in_features, dtype=dtype, device=device)
        ids = torch.empty(num_tokens, layer.top_k, dtype=torch.int32, device=device)
        biases = (weights.gate_up_bias, weights.down_bias)
        stacks = (x, weights.gate_up, weights.down, ids, biases)
        traits = experts_traits(*stacks, layer.activation.name, weights.format)
        score_bias = getattr(router, "e_score_correction_bias", None)
        whole = block_traits(
            traits, dtype, (None, router.weight, router.bias), (layer.num_groups, score_bias)
        )
    is_alone = registry.override("experts", "grouped") is not None
    if is_few and target.device_type == "cuda" and not is_alone:
        traits_of_whole = with_target(whole, target)
        found = _named(registry, "sparse_mlp", "few", target, dtype, traits_of_whole)
        if not found.startswith("sparse_mlp by apart"):
            return found
    return _named(registry, "experts", "grouped", target, dtype, with_target(traits, target))


def _chosen_linear(
    layer: QuantLinear,
    registry: KernelRegistry,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
    *,
    is_few: bool,
) -> str:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(num_tokens, layer.in_features, dtype=dtype, device=device)
        stored = (layer.weight, layer.scale, layer.zero, layer.global_scale, layer.input_scale)
        formats = layer.format, layer.activation_format
        if not is_few and formats in SCALED_PAIRS:
            family, mode = "scaled_linear", "product"
            q, _ = quantize(x, layer.activation_format, layer.input_scale)
            traits = scaled_linear_traits(q, layer.weight, layer.scale, *formats)
        else:
            family, mode = "quantized_linear", "few"
            operands = QuantOperands(x, *stored, layer.bias, *formats, None, 0.0, None, False)
            traits = quantized_linear_traits(operands)
    return _named(registry, family, mode, Target.of(device), dtype, traits)


def _named(
    registry: KernelRegistry,
    family: str,
    mode: str,
    target: Target,
    dtype: torch.dtype,
    traits: Traits,
) -> str:
    try:
        choice = registry.choose(family, mode, target, dtype, traits)
    except ConfigError as error:
        return str(error)
    others = "; ".join(f"{name} {why}" for name, why in choice.rejected)
    return f"{family} by {choice.candidate.name} ({others or 'the only one'})"
