"""A model and the inputs of its pieces without values: shapes, dtypes and devices only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiled_engine.compile.torch_compat import fake_mode
from compiled_engine.custom_ops import LayerCache, PagedContext
from compiled_engine.models import ARCHITECTURES, CausalLM, HfModelConfig, ModelConfig
from compiled_engine.models.hf_load import shape_hf_model
from compiled_engine.models.weights import build_model


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of the step that is looked at.

    Attributes:
        num_tokens: of the step.
        context: tokens of KV of each sequence, those of the step included.
        max_rows: rows of the batch.
        page_size: tokens of a page.
        is_decode: every token is a sequence of its own, else one prompt.
        cache_dtype: of keys and values.
    """

    num_tokens: int
    context: int
    max_rows: int
    page_size: int
    is_decode: bool
    cache_dtype: torch.dtype

    @property
    def num_sequences(self) -> int:
        """Sequences with tokens in the step."""
        return self.num_tokens if self.is_decode else 1


class FakeStep:
    """A model whose tensors have no values, and what its pieces are called with.

    Args:
        config: of the model.
        dtype: of weights and activations.
        device: where the tensors say they are.
        shape: of the step.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, shape: StepShape
    ) -> None:
        self.mode = fake_mode()
        self.shape = shape
        self._config = config
        self._dtype = dtype
        self._device = device
        self.model: CausalLM = _model(config, dtype, device, self.mode)

    def layer_inputs(self, layer: nn.Module, *, is_last: bool) -> tuple[Any, ...]:
        """Arguments of `pieces.layer_function`."""
        shape, config = self.shape, self._config
        tokens, rows = shape.num_tokens, min(shape.num_tokens, shape.max_rows)
        width = -(-max(shape.context, 1) // shape.page_size)
        pages = (1 + shape.num_sequences * width, shape.page_size)
        cache_shape = (*pages, config.num_kv_heads, config.head_dim)
        caches = LayerCache(*(self._empty(*cache_shape, dtype=shape.cache_dtype) for _ in range(2)))
        ints, longs = {"dtype": torch.int32}, {"dtype": torch.int64}
        with self.mode, torch.no_grad():
            _, rotary = self.model.embed(*self.tokens())
        ctx = PagedContext(
            slot_mapping=self._empty(tokens, **longs),
            block_table=self._empty(shape.max_rows + 1, width, **ints),
            seq_rows=self._empty(rows, **ints),
            seq_lens=self._empty(rows, **ints),
            query_start_loc=self._empty(rows + 1, **ints),
            token_rows=self._empty(tokens, **longs),
            positions=self._empty(tokens, **longs),
            work=self._empty(0, **ints),
        )
        last = (self._empty(rows, **longs),) if is_last else ()
        return (layer, caches, rotary, ctx, *last, self.residual(tokens))

    def residual(self, num_rows: int) -> Tensor:
        """The stream between layers."""
        return self._empty(num_rows, self._config.hidden_size, dtype=self._dtype)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Token ids and positions."""
        ids = self._empty(self.shape.num_tokens, dtype=torch.int32)
        return ids, self._empty(self.shape.num_tokens, dtype=torch.int64)

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=self._device)


def _model(config: ModelConfig, dtype: torch.dtype, device: torch.device, mode: Any) -> CausalLM:
    """The model without values: by our file, or by transformers' code."""
    if isinstance(config, HfModelConfig):
        return shape_hf_model(config, dtype=dtype, device=device, mode=mode)
    with mode:
        model_class = ARCHITECTURES[config.architecture]
        return build_model(model_class, config, dtype=dtype, device=device)
