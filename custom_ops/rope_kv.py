"""Contracts of rotary embedding and KV write, apart and fused.

Models call `rope` or `qk_norm_rope`, then `kv_write`; a pass fuses the pair into one op. The cache
operands keep their names in every schema, so a pass can carry functionalised arguments over.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import LIBRARY, OpSpec, define_op

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 16, 4, 6


def _example_tensors(
    dtype: torch.dtype, device: torch.device, seed: int, num_tokens: int, rotary_dim: int = HEAD_DIM
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    angles = normal(num_tokens, rotary_dim // 2)
    slots = torch.randperm((NUM_PAGES - 1) * PAGE_SIZE, generator=generator, device=device)
    slots = slots[:num_tokens] + PAGE_SIZE
    if num_tokens > 1:
        slots[-1] = -1
    cache_shape = (NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return {
        "q": normal(num_tokens, NUM_HEADS, HEAD_DIM).to(dtype),
        "k": normal(num_tokens, NUM_KV_HEADS, HEAD_DIM).to(dtype),
        "v": normal(num_tokens, NUM_KV_HEADS, HEAD_DIM).to(dtype),
        "q_weight": normal(HEAD_DIM).to(dtype),
        "k_weight": normal(HEAD_DIM).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "eps": 1e-6,
        "interleaved": False,
        "k_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "v_cache": torch.zeros(cache_shape, dtype=dtype, device=device),
        "slot_mapping": slots,
    }


def _examples(*names: str) -> Any:
    def make(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
        made = [_example_tensors(dtype, device, seed, num_tokens) for num_tokens in (1, 7, 0)]
        made += [_example_tensors(dtype, device, seed, 5, rotary_dim=6) for _ in range(2)]
        made[-1]["interleaved"] = True
        made.append({**made[1], "interleaved": True})
        return [tuple(tensors[name] for name in names) for tensors in made]

    return make


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_rope(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _contiguous_like(q), _contiguous_like(k)


def _fake_nothing(*_: Any) -> None:
    return None


def _fake_query(q: Tensor, *_: Any) -> Tensor:
    return _contiguous_like(q)


def _define_write(schema: str, **kwargs: Any) -> tuple[OpSpec, OpSpec]:
    """An op that writes the cache, and the same as plain PyTorch, which stays a call in a graph.

    Where the number of pages is open, Inductor's code for such a write would index the cache with
    32 bits and guard on its size.
    """
    name, arguments = schema.split("(", 1)
    plain = define_op(f"{name}_plain({arguments}", **kwargs, is_expandable=False)
    return define_op(schema, **kwargs), plain


ROPE = define_op(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)",
    reference=reference.rope,
    fake=_fake_rope,
    example_inputs=_examples("q", "k", "cos", "sin", "interleaved"),
)
QK_NORM_ROPE = define_op(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, "
    "float eps, bool interleaved=False) -> (Tensor, Tensor)",
    reference=reference.qk_norm_rope,
    fake=_fake_rope,
    example_inputs=_examples("q", "k", "q_weight", "k_weight", "cos", "sin", "eps", "interleaved"),
)
KV_WRITE, KV_WRITE_PLAIN = _define_write(
    "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping) -> ()",
    reference=reference.kv_write,
    functional_reference=reference.kv_write_functional,
    fake=_fake_nothing,
    example_inputs=_examples("k", "v", "k_cache", "v_cache", "slot_mapping"),
)
ROPE_KV_WRITE, ROPE_KV_WRITE_PLAIN = _define_write(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slot_mapping, bool interleaved=False) -> Tensor",
    reference=reference.rope_kv_write,
    functional_reference=reference.rope_kv_write_functional,
    fake=_fake_query,
    example_inputs=_examples(
        "q", "k", "v", "cos", "sin", "k_cache", "v_cache", "slot_mapping", "interleaved"
    ),
)
QK_NORM_ROPE_KV_WRITE, QK_NORM_ROPE_KV_WRITE_PLAIN = _define_write(
    "qk_norm_rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, "
    "Tensor cos, Tensor sin, float eps, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, bool interleaved=False) -> Tensor",
    reference=reference.qk_norm_rope_kv_write,
    functional_reference=reference.qk_norm_rope_kv_write_functional,
    fake=_fake_query,
    example_inputs=_examples(
        "q", "k", "v", "q_weight", "k_weight", "cos", "sin", "eps", "k_cache", "v_cache",
        "slot_mapping", "interleaved",
    ),
)  # fmt: skip

PLAIN_WRITES: Mapping[str, OpSpec] = MappingProxyType(
    {
        op.name: plain
        for op, plain in (
            (KV_WRITE, KV_WRITE_PLAIN),
            (ROPE_KV_WRITE, ROPE_KV_WRITE_PLAIN),
            (QK_NORM_ROPE_KV_WRITE, QK_NORM_ROPE_KV_WRITE_PLAIN),
        )
    }
)


def _on_cuda(name: str) -> None:
    """Registers the launcher of that name in `rope_kv_triton`, imported when first called."""

    def launcher(*args: Any) -> Any:
        from compiled_engine.custom_ops import rope_kv_triton

        return getattr(rope_kv_triton, name)(*args)

    LIBRARY.impl(name, launcher, "CUDA")


for _spec in (ROPE, QK_NORM_ROPE, KV_WRITE, ROPE_KV_WRITE, QK_NORM_ROPE_KV_WRITE):
    _on_cuda(_spec.name)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q and k; see `reference.rope`."""
    return torch.ops.ce.rope.default(q, k, cos, sin)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Per-head RMS norm, then rotary embedding; see `reference.qk_norm_rope`."""
    return torch.ops.ce.qk_norm_rope.default(q, k, q_weight, k_weight, cos, sin, eps)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v into the paged cache in place; see `reference.kv_write`."""
    torch.ops.ce.kv_write.default(k, v, k_cache, v_cache, slot_mapping)
