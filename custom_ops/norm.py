"""Contracts of the norm family: `rms_norm`, `scaled_rms_norm`, and `add_rms_norm` of a pass.

`scaled_rms_norm` has no kernel: a compiler fuses its body with the residual add behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import LIBRARY, define_op


def _norm_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    shapes = [(1, 64), (7, 96), (3, 2, 33), (0, 64)]
    return [(normal(*shape), normal(shape[-1]), 1e-5) for shape in shapes]


def _scaled_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    plain = _norm_examples(dtype, device, seed)
    return [(*example, offset) for example in plain for offset in (0.0, 1.0)]


def _add_norm_examples(
    dtype: torch.dtype, device: torch.device, seed: int
) -> list[tuple[Any, ...]]:
    plain = _norm_examples(dtype, device, seed)
    return [(x, x.flip(0) * 0.5, weight, eps) for x, weight, eps in plain]


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))


def _fake_scaled(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return torch.empty_like(x)


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    return _fake_rms_norm(total, weight, eps), total


RMS_NORM = define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=reference.rms_norm,
    fake=_fake_rms_norm,
    example_inputs=_norm_examples,
)
SCALED_RMS_NORM = define_op(
    "scaled_rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor",
    reference=reference.scaled_rms_norm,
    fake=_fake_scaled,
    example_inputs=_scaled_examples,
)
ADD_RMS_NORM = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=reference.add_rms_norm,
    fake=_fake_add_rms_norm,
    example_inputs=_add_norm_examples,
)


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from compiled_engine.custom_ops import norm_triton

    return norm_triton.rms_norm(x, weight, eps)


def _add_rms_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from compiled_engine.custom_ops import norm_triton

    return norm_triton.add_rms_norm(x, residual, weight, eps)


LIBRARY.impl("rms_norm", _rms_norm_cuda, "CUDA")
LIBRARY.impl("add_rms_norm", _add_rms_norm_cuda, "CUDA")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim; see `reference.rms_norm`."""
    return torch.ops.ce.rms_norm.default(x, weight, eps)
