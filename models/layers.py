"""Layers every model file shares: norm, rotary tables, gated MLP, the decoder layer, the model.

Rows are flattened tokens `[T, hidden]`. A layer takes and returns the residual stream; each add
stands directly behind the product it belongs to, where a kernel can do it in passing. Without a
cache and a context a model runs eagerly on one full sequence; that run is the reference for
everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import (
    LayerCache,
    PagedContext,
    attention,
    kv_write,
    rms_norm,
    rope,
    silu_and_mul,
)
from compiled_engine.models.config import ModelConfig
from compiled_engine.models.rope_config import RopeScaling


class Rotary(NamedTuple):
    """Cosine and sine of every token's angles: both [T, head_dim // 2] fp32."""

    cos: Tensor
    sin: Tensor


class RMSNorm(nn.Module):
    """`rms_norm` with a weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [head_dim // 2] fp32, with the config's scaling.

    Source: RoFormer; llama3 stretching as published with Llama 3.1; YaRN, arXiv 2309.00071.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / (config.rope_theta ** (exponent / config.head_dim))
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "yarn":
        kept = _yarn_kept(config, scaling)
        return frequencies * kept + frequencies / scaling.factor * (1 - kept)
    trained = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((trained / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn_kept(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """How much of each frequency is kept, [head_dim // 2]: 1 of the fast ones, 0 of the slow."""

    def place(num_turns: float) -> float:
        """The frequency, as a real number of its place, with so many turns in a trained length."""
        wavelength = scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = last - first if last != first else 0.001
    at = torch.arange(config.head_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((at - first) / width).clamp(0.0, 1.0)


class RotaryEmbedding(nn.Module):
    """Positions to cosines and sines. Holds the frequencies as a buffer that is not a weight."""

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
        self.register_buffer("inverse_frequencies", inverse_frequencies(config), persistent=False)

    def reset(self, device: torch.device) -> None:
        """Computes the frequencies anew on `device`, after the module was made without storage."""
        self.inverse_frequencies = inverse_frequencies(self.config).to(device)

    def forward(self, positions: Tensor) -> Rotary:
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies
        if self.factor == 1.0:
            return Rotary(angles.cos(), angles.sin())
        return Rotary(angles.cos() * self.factor, angles.sin() * self.factor)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` with gate and up in one matrix.

    Args:
        config: of the model.
        inner_size: width between the products; the config's if not given.
    """

    def __init__(self, config: ModelConfig, inner_size: int | None = None) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, inner_size or config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values and rotary positions.

    Args:
        config: of the model.
        layer: index of the layer, whose window it has.

    Attributes:
        sinks: [num_heads], a logit of each head that takes weight and has no value; None for none.
    """

    sinks: Tensor | None

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.window(layer)
        self.register_parameter("sinks", None)
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = nn.Linear(
            config.hidden_size, heads * config.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
        )

    def position(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Puts positions into q [T, H, D] and k [T, H_kv, D]."""
        return rope(q, k, rotary.cos, rotary.sin)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        cache: LayerCache | None,
        ctx: PagedContext | None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Attends every row of x [T, hidden]; gives those of `keep` [S], or all."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 H_kv, D]
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = self.position(q, k, rotary)
        if cache is not None and ctx is not None:
            kv_write(k, v, cache.k_cache, cache.v_cache, ctx.slot_mapping)
        out = attention(
            q, k, v, cache, ctx, self.scale, window=self.window, sinks=self.sinks
        ).flatten(1)
        return self.o_proj(out if keep is None else out[keep])


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, of which the caller says what they are, on the residual stream.

    Args:
        config: of the model.
        attention: the layer's.
        mlp: maps [T, hidden] to [T, hidden].
    """

    def __init__(self, config: ModelConfig, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        residual: Tensor,
        rotary: Rotary,
        cache: LayerCache | None = None,
        ctx: PagedContext | None = None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """The stream behind the layer: of all rows, or of those that `keep` [S] int64 names.

        Keys and values are those of all rows either way.
        """
        attended = self.self_attn(self.input_layernorm(residual), rotary, cache, ctx, keep)
        if keep is not None:
            residual = residual[keep]
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DecoderStack(nn.Module):
    """Embedding, rotary tables, layers and final norm; named as in Hugging Face checkpoints."""

    def __init__(self, config: ModelConfig, layers: Iterable[DecoderLayer]) -> None:
        super().__init__()
        # Not initialised: without storage, torch would import Dynamo for it.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A decoder-only language model, whole or in the pieces the engine compiles.

    `embed`, each of `layers`, and `head` are the pieces; `forward` is their plain composition.
    """

    attention_class: type[Attention] = Attention
    # the last layer can leave out what it would do behind attention for rows that nobody samples
    has_short_last_layer = True
    # its code does not call our ops: passes bring it to them first
    is_foreign = False
    # fused parameter -> the checkpoint's parameters whose rows it holds, in order
    packed_modules: dict[str, tuple[str, ...]] = {  # noqa: RUF012 - a constant of the class
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # part of a parameter's name -> what checkpoints say instead
    renamed: dict[str, str] = {}  # noqa: RUF012 - a constant of the class

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config, map(self.make_layer, range(config.num_layers)))
        self.lm_head: nn.Module | None = None
        if config.has_own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def published_name(self, name: str) -> str:
        """What checkpoints call the parameter or module that is `name` here."""
        for ours, theirs in self.renamed.items():
            name = name.replace(ours, theirs)
        return name

    def make_layer(self, layer: int) -> DecoderLayer:
        """The decoder layer of that index, without weights."""
        attention = self.attention_class(self.config, layer)
        return DecoderLayer(self.config, attention, self.make_mlp(layer))

    def make_mlp(self, layer: int) -> nn.Module:
        """What the layer has behind its attention: maps [T, hidden] to [T, hidden]."""
        return GatedMLP(self.config)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers in order."""
        return list(self.model.layers)  # type: ignore[arg-type]

    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotary]:
        """Token ids and positions [T] to the first layer's residual [T, hidden] and rotary."""
        return self.model.embed_tokens(token_ids), self.model.rotary(positions)

    def head(self, residual: Tensor) -> Tensor:
        """Residual stream behind the last layer [T, hidden] to logits [T, vocab_size]."""
        normed = self.model.norm(residual)
        if self.lm_head is None:
            return nn.functional.linear(normed, self.model.embed_tokens.weight)
        return self.lm_head(normed)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [T, vocab_size] of one full sequence of T tokens, without a cache."""
        residual, rotary = self.embed(token_ids, positions)
        for layer in self.layers:
            residual = layer(residual, rotary)
        return self.head(residual)
