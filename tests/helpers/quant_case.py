"""Small quantised layers for the tests of passes, ops and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops.quant_pack import quantize_weight, row_format
from compiled_engine.models import ARCHITECTURES, CausalLM
from compiled_engine.models.config import load_model_config
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.models.quant_plan import QuantPlan, online_plan, online_scheme
from compiled_engine.models.weights import build_model, load_weights

CPU = torch.device("cpu")
ONLINE = ("fp8", "fp8_block", "int8", "int4", "nvfp4", "nvfp4_w4a4", "mxfp4")


def quantized_layer(
    name: str, size: int, rows: int, *, dtype: torch.dtype = torch.float32, has_bias: bool = False
) -> QuantLinear:
    """A filled layer in the format of `--quantization name`."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(rows, size, generator=generator) * size**-0.5).to(dtype)
    scheme = online_scheme(name, str(dtype).removeprefix("torch."))
    layer = QuantLinear(size, (rows,), scheme, has_bias)
    layer.fill(quantize_weight(weight, row_format(layer.format), layer.group_size), 0, rows)
    if layer.bias is not None:
        bias = torch.randn(rows, generator=generator).to(dtype)
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def quantized_model(
    folder: Path, quantization: str | QuantPlan | None, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """The model in `folder`, quantised as said: a format's name, a plan, or as the folder says."""
    config = load_model_config(folder)
    if isinstance(quantization, str):
        quantization = online_plan(quantization, config.dtype, quantizes_head=False)
    if quantization is not None:
        config = replace(config, quantization=quantization)
    model = build_model(ARCHITECTURES[config.architecture], config, dtype=dtype, device=CPU)
    load_weights(model, folder, dtype=dtype, device=CPU)
    return model


def logits(model: CausalLM, num_tokens: int = 12) -> Tensor:
    """Of one sequence of given tokens."""
    with torch.no_grad():
        return model(torch.arange(num_tokens) * 7 % 300 + 4, torch.arange(num_tokens))


def keep_dequantized(model: CausalLM, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The model, whose weights are dequantised once instead of for every product."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            weight = module.dequantized(dtype)
            module.dequantized = lambda _, weight=weight: weight  # type: ignore[method-assign]
    return model
