"""Contract of the gated activation family: `silu_and_mul`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import LIBRARY, define_op


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = [(1, 64), (7, 2 * 33), (2, 3, 32), (0, 64)]
    return [(torch.randn(*s, generator=generator, device=device).to(dtype),) for s in shapes]


def _fake_silu_and_mul(x: Tensor) -> Tensor:
    return torch.empty_like(x.chunk(2, dim=-1)[0])


SILU_AND_MUL = define_op(
    "silu_and_mul(Tensor x) -> Tensor",
    reference=reference.silu_and_mul,
    fake=_fake_silu_and_mul,
    example_inputs=_examples,
)


def _silu_and_mul_cuda(x: Tensor) -> Tensor:
    from compiled_engine.custom_ops import activation_triton

    return activation_triton.silu_and_mul(x)


LIBRARY.impl("silu_and_mul", _silu_and_mul_cuda, "CUDA")


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(x[..., :n]) * x[..., n:]`; see `reference.silu_and_mul`."""
    return torch.ops.ce.silu_and_mul.default(x)
