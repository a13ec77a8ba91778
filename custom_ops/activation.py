"""Contracts of the gated activations: `silu_and_mul`, `gelu_and_mul`, `swiglu_clamped`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import LIBRARY, define_op


def _examples(*options: tuple[Any, ...]) -> Callable[..., list[tuple[Any, ...]]]:
    """Examples that end with each of the options in turn."""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(1, 64), (7, 2 * 33), (2, 3, 32), (0, 64)]
        made = [torch.randn(*s, generator=generator, device=device).to(dtype) for s in shapes]
        return [(x, *option) for option in options for x in made]

    return make


def _fake_gated(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x.chunk(2, dim=-1)[0])


SILU_AND_MUL = define_op(
    "silu_and_mul(Tensor x) -> Tensor",
    reference=reference.silu_and_mul,
    fake=_fake_gated,
    example_inputs=_examples(()),
)
GELU_AND_MUL = define_op(
    "gelu_and_mul(Tensor x, str approximate) -> Tensor",
    reference=reference.gelu_and_mul,
    fake=_fake_gated,
    example_inputs=_examples(("none",), ("tanh",)),
)
SWIGLU_CLAMPED = define_op(
    "swiglu_clamped(Tensor x, float alpha, float limit) -> Tensor",
    reference=reference.swiglu_clamped,
    fake=_fake_gated,
    example_inputs=_examples((1.702, 7.0), (1.0, 0.5)),
)


def gelu_name(approximate: str) -> str:
    """The name that `reference.gated_activation` gives to a `gelu_and_mul`."""
    return next(n for n, given in reference.GELU_APPROXIMATIONS.items() if given == approximate)


def _silu_and_mul_cuda(x: Tensor) -> Tensor:
    from compiled_engine.custom_ops import activation_triton

    return activation_triton.silu_and_mul(x)


def _gelu_and_mul_cuda(x: Tensor, approximate: str) -> Tensor:
    from compiled_engine.custom_ops import activation_triton

    return activation_triton.gelu_and_mul(x, approximate)


def _swiglu_clamped_cuda(x: Tensor, alpha: float, limit: float) -> Tensor:
    from compiled_engine.custom_ops import activation_triton

    return activation_triton.swiglu_clamped(x, alpha, limit)


LIBRARY.impl("silu_and_mul", _silu_and_mul_cuda, "CUDA")
LIBRARY.impl("gelu_and_mul", _gelu_and_mul_cuda, "CUDA")
LIBRARY.impl("swiglu_clamped", _swiglu_clamped_cuda, "CUDA")


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(x[..., :n]) * x[..., n:]`; see `reference.silu_and_mul`."""
    return torch.ops.ce.silu_and_mul.default(x)


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """`gelu(x[..., :n]) * x[..., n:]`; see `reference.gelu_and_mul`."""
    return torch.ops.ce.gelu_and_mul.default(x, approximate)
