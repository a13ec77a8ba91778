"""Triton kernel of the gated activations: rows that hold gate, then up, to `act(gate) * up`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.activation import gelu_name
from compiled_engine.custom_ops.library import note_plain_body
from compiled_engine.custom_ops.triton_common import (
    DTYPES,
    has_pdl,
    let_next_start,
    rows_of,
    wait_for_previous,
)

# Below this many programs of the large block the device is not full.
NUM_FULL = 1056


class Config(NamedTuple):
    """How a launch is cut: outputs a program, and its warps."""

    block: int
    num_warps: int


class Activation(NamedTuple):
    """What the kernel computes; see `reference.gated_activation`."""

    name: str
    alpha: float = 0.0
    limit: float = 0.0


SILU = Activation("silu")


@triton.jit
def _activated(gate: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """The activation of a gate in fp32."""
    if NAME == "silu":
        return gate / (1.0 + tl.exp(-gate))
    if NAME == "gelu":
        return 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    # tanh(z) as 2 sigmoid(2 z) - 1, which is half of GELU's bracket.
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner))


@triton.jit
def gated(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, NAME: tl.constexpr
) -> tl.tensor:
    """`round(act(gate)) * up` in fp32, rounded as in the reference.

    "swiglu_clamped" is `(up + 1) * gate * sigmoid(alpha gate)`, gate clamped to `limit` and up to
    both sides of it; each of the three factors is rounded as in the reference.
    """
    exact = gate.to(tl.float32)
    other = up.to(tl.float32)
    if NAME == "swiglu_clamped":
        exact = tl.minimum(exact, limit)
        other = tl.minimum(tl.maximum(other, -limit), limit)
        scaled = (alpha * exact).to(gate.dtype).to(tl.float32)
        factor = (1.0 / (1.0 + tl.exp(-scaled))).to(gate.dtype).to(tl.float32)
        activated = (exact * factor).to(gate.dtype)
        other = (other + 1.0).to(gate.dtype).to(tl.float32)
    else:
        activated = _activated(exact, NAME).to(gate.dtype)
    return activated.to(tl.float32) * other


@triton.jit
def _gated_kernel(
    x: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    stride: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NAME: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`out[r, j]` of gate `x[r, j]` and up `x[r, SIZE + j]`, as `gated` says.

    Grid: rows x blocks of `BLOCK` outputs, the blocks of a row next to each other. `out` is packed.
    """
    let_next_start(PDL)
    num_blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    place = row // inner * outer_stride + row % inner * stride
    wait_for_previous(PDL)
    gate = tl.load(x + place + column, mask=mask, other=0.0)
    up = tl.load(x + place + SIZE + column, mask=mask, other=0.0)
    result = gated(gate, up, alpha, limit, NAME)
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=mask)


def unsupported_reason(x: Tensor) -> str | None:
    """Why the kernel cannot serve `x`; None if it can. Reads shape and dtype only."""
    if x.dtype not in DTYPES:
        return f"{x.dtype}, it takes {', '.join(map(str, DTYPES))}"
    if x.shape[-1] % 2:
        return f"rows of {x.shape[-1]} values have no two halves"
    if rows_of(x) is None:
        return "the last dim is strided, or more than two strides lead to the rows"
    return None


def default_config(num_rows: int, size: int) -> Config:
    """Outputs a program and warps that suit the size."""
    return Config(1024, 4) if num_rows * size >= NUM_FULL * 1024 else Config(256, 2)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `reference.silu_and_mul`, which also serves what `unsupported_reason` names."""
    return gated_activation(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """As `reference.gelu_and_mul`, which also serves what `unsupported_reason` names."""
    return gated_activation(x, gelu_name(approximate))


def swiglu_clamped(x: Tensor, alpha: float, limit: float) -> Tensor:
    """As `reference.swiglu_clamped`, which also serves what `unsupported_reason` names."""
    return gated_activation(x, "swiglu_clamped", alpha, limit)


def gated_activation(x: Tensor, name: str, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """As `reference.gated_activation`, which also serves what `unsupported_reason` names."""
    if (reason := unsupported_reason(x)) is not None:
        note_plain_body(f"the gate {name}", reason)
        return reference.gated_activation(x, name, alpha, limit)
    return launch(x, Activation(name, alpha, limit))


def launch(
    x: Tensor,
    activation: Activation = SILU,
    *,
    config: Config | None = None,
    is_pdl: bool = True,
) -> Tensor:
    """Runs the kernel on an argument it supports."""
    out = torch.empty_like(x.chunk(2, dim=-1)[0])
    if not out.numel():
        return out
    packed = out if out.is_contiguous() else out.new_empty(out.shape)
    rows = rows_of(x)
    assert rows is not None, "unsupported_reason lets through what rows_of cannot describe"
    size = out.shape[-1]
    config = default_config(rows.num_rows, size) if config is None else config
    is_pdl = is_pdl and has_pdl(x.device)
    _gated_kernel[(rows.num_rows * triton.cdiv(size, config.block),)](
        x,
        packed,
        *rows[1:],
        activation.alpha,
        activation.limit,
        SIZE=size,
        BLOCK=config.block,
        NAME=activation.name,
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )
    return out if packed is out else out.copy_(packed)
