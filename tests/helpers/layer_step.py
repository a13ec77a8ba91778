"""A tiny model's first layer and a mixed step for it, for tests of whole layers in the pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.models import ARCHITECTURES
from compiled_engine.models.config import load_model_config
from compiled_engine.models.layers import CausalLM
from compiled_engine.models.quant_plan import online_plan
from compiled_engine.models.weights import build_model, load_weights
from tests.helpers.tiny_model import write_tiny_model

# Sizes that occur nowhere else in the layer, so that they can be found in generated code.
NUM_PAGES, PAGE_SIZE, NUM_TOKENS = 97, 8, 5


class LayerStep:
    """A tiny model's first layer, and a mixed step for it: a decode row and an extending row."""

    def __init__(self, folder: Path, family: str, quantization: str = "") -> None:
        write_tiny_model(folder, family=family)
        config = load_model_config(folder)
        if quantization:
            plan = online_plan(quantization, config.dtype, quantizes_head=False)
            config = replace(config, quantization=plan)
        model_class = ARCHITECTURES[config.architecture]
        device = torch.device("cpu")
        model: CausalLM = build_model(model_class, config, dtype=torch.float32, device=device)
        load_weights(model, folder, dtype=torch.float32, device=device)
        self.layer = model.layers[0]
        shape = (NUM_PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.cache = LayerCache(torch.randn(shape), torch.randn(shape))
        table = torch.tensor([[3, 4, 0], [0, 0, 0], [90, 7, 11]], dtype=torch.int32)
        positions = torch.tensor([9, 15, 16, 17, 0])
        self.ctx = PagedContext(
            torch.tensor(
                [4 * PAGE_SIZE + 1, 7 * PAGE_SIZE + 7, 11 * PAGE_SIZE, 11 * PAGE_SIZE + 1, -1]
            ),
            table,
            torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([10, 18], dtype=torch.int32),
            torch.tensor([0, 1, 4], dtype=torch.int32),
            torch.tensor([0, 2, 2, 2, 1]),
            positions,
            torch.empty(0, dtype=torch.int32),
        )
        self.rotary = model.model.rotary(positions)
        self.residual = torch.randn(NUM_TOKENS, config.hidden_size)

    def arguments(self) -> tuple[object, ...]:
        """Arguments of one call, with caches of its own."""
        cache = LayerCache(*(tensor.clone() for tensor in self.cache))
        return (self.layer, self.residual, self.rotary, cache, self.ctx)


def call_layer(layer, residual, rotary, cache, ctx) -> Tensor:
    return layer(residual, rotary, cache, ctx)


def run_eagerly(step: LayerStep) -> tuple[Tensor, LayerCache]:
    arguments = step.arguments()
    with torch.no_grad():
        outputs = call_layer(*arguments)
    return outputs, arguments[3]  # type: ignore[return-value]
