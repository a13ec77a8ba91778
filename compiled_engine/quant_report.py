"""What a start says of a quantised model: the kernel of each kind of layer, and why that one."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_engine.custom_ops.quant import SCALED_PAIRS
from compiled_engine.custom_ops.quant_choice import quantized_linear_traits, scaled_linear_traits
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.reference_quant import quantize
from compiled_engine.custom_ops.registry import KernelRegistry, Target
from compiled_engine.errors import ConfigError
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
    """A line for each kind of quantised layer of the model; empty if it has none.

    Args:
        model: with its weights.
        registry: chooses kernels; None where products run without one.
        dtype: of activations.
        device: where the model runs.
        max_tokens: of a step.
        max_few: tokens up to which products are `quantized_linear` in decode steps.
    """
    sizes = sorted({1, min(32, max_tokens), max_tokens})
    counts: Counter[_Kind] = Counter()
    examples: dict[_Kind, QuantLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            kind = _Kind(
                name.rpartition(".")[2],
                module.format,
                module.activation_format,
                module.out_features,
                module.in_features,
            )
            counts[kind] += 1
            examples.setdefault(kind, module)
    lines = []
    for kind, count in counts.items():
        if registry is None:
            how = "dequantised for every product: nothing here reads the format as it is stored"
        else:
            layer, place = examples[kind], (dtype, device)
            chosen = [_chosen(layer, registry, *place, n, is_few=n <= max_few) for n in sizes]
            how = "; ".join(
                f"{size} token{'s' * (size > 1)}: {text}"
                for size, text in zip(sizes, chosen, strict=True)
            )
        lines.append(f"{count} x {kind}: {how}")
    return lines


def _chosen(
    layer: QuantLinear,
    registry: KernelRegistry,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int,
    *,
    is_few: bool,
) -> str:
    """The kernel for so many tokens, and what is against those that rank above it."""
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
    try:
        choice = registry.choose(family, mode, Target.of(device), dtype, traits)
    except ConfigError as error:
        return str(error)
    others = "; ".join(f"{name} {why}" for name, why in choice.rejected)
    return f"{family} by {choice.candidate.name} ({others or 'the only one'})"
