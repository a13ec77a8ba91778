"""Contracts of mixtures of experts: `route` and `experts`, and the CPU body of the latter.

`route` turns a router's logits into each token's experts and sorts the pairs of token and expert
by expert; `experts` computes them. Bodies and shapes are in `reference_moe`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference_moe
from compiled_engine.custom_ops.gemm import linear_cpu
from compiled_engine.custom_ops.library import LIBRARY, define_op
from compiled_engine.custom_ops.moe_cuda import experts_cuda, route_cuda
from compiled_engine.custom_ops.quant_pack import MXFP4_GROUP
from compiled_engine.custom_ops.reference import gated_activation
from compiled_engine.custom_ops.reference_fp4 import NVFP4_GROUP
from compiled_engine.custom_ops.reference_quant import BLOCK, PACKED_FORMATS

FORMATS = ("", "mxfp4", "nvfp4", "fp8_block")


class Routes(NamedTuple):
    """Each token's experts; shapes as `reference_moe.route` returns them."""

    # [T, k] fp32
    weights: Tensor
    # [T, k] int32
    ids: Tensor
    # [T * k] int32, pairs sorted by expert
    order: Tensor
    # [E + 1] int32
    offsets: Tensor


class ExpertWeights(NamedTuple):
    """The stacked matrices of all experts of a layer; shapes as `reference_moe.experts` says."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_global_scale: Tensor | None = None
    down_global_scale: Tensor | None = None
    format: str = ""


class Activation(NamedTuple):
    """What stands between the two products of an expert: see `reference.gated_activation`."""

    name: str = "silu"
    alpha: float = 0.0
    limit: float = math.inf


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def _route_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def logits(num_tokens: int, num_experts: int) -> Tensor:
        return _random((num_tokens, num_experts), dtype, generator)

    def bias(num_experts: int) -> Tensor:
        return _random((num_experts,), torch.float32, generator) * 0.1

    return [
        (logits(5, 8), None, 2, "softmax", True, 1, 1, 1.0),
        (logits(1, 128), None, 8, "softmax", True, 1, 1, 1.0),
        (logits(33, 7), None, 1, "softmax", False, 1, 1, 1.0),
        (logits(9, 60), None, 16, "softmax", False, 1, 1, 1.0),
        (torch.zeros_like(logits(3, 5)), None, 3, "softmax", True, 1, 1, 1.0),
        (logits(4, 32), None, 4, "softmax", True, 1, 1, 1.0),
        (logits(6, 16), bias(16), 4, "sigmoid", True, 4, 2, 2.5),
        (logits(17, 9), bias(9), 3, "sigmoid", False, 1, 1, 1.0),
        (logits(0, 8), None, 2, "softmax", True, 1, 1, 1.0),
    ]


def _route_fake(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty((num_tokens, top_k), dtype=torch.float32),
        logits.new_empty((num_tokens, top_k), dtype=torch.int32),
        logits.new_empty(num_tokens * top_k, dtype=torch.int32),
        logits.new_empty(num_experts + 1, dtype=torch.int32),
    )


ROUTE = define_op(
    "route(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalize, int num_groups,"
    " int top_groups, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference_moe.route,
    fake=_route_fake,
    example_inputs=_route_examples,
)


def random_expert_weights(
    num_experts: int,
    hidden: int,
    inner: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
    format: str = "",
    has_bias: bool = False,
) -> ExpertWeights:
    """Seeded weights [E, 2 inner, hidden] and [E, hidden, inner] of about unit gain, for examples.

    "mxfp4" and "nvfp4" need sizes that are multiples of 32.
    """
    shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    gate_up, down = (_stack(shape, dtype, generator, format) for shape in shapes)
    overall = [
        _global_scales((num_experts, parts), columns, generator) if format == "nvfp4" else None
        for parts, columns in ((2, hidden), (1, inner))
    ]
    scales = (gate_up[1], down[1], overall[0], overall[1])
    made = ExpertWeights(gate_up[0], down[0], None, None, *scales, format)
    if not has_bias:
        return made
    biases = [_random(shape[:2], dtype, generator) * 0.5 for shape in shapes]
    return made._replace(gate_up_bias=biases[0], down_bias=biases[1])


def _stack(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator, format: str
) -> tuple[Tensor, Tensor | None]:
    num_experts, num_rows, num_columns = shape
    device, gain = generator.device, num_columns**-0.5
    if format == "":
        return _random(shape, dtype, generator) * gain, None
    if format in PACKED_FORMATS:
        packed = (num_experts, num_rows, num_columns // 2)
        codes = torch.randint(0, 256, packed, generator=generator, device=device)
    if format == "nvfp4":
        groups = (num_experts, num_rows, num_columns // NVFP4_GROUP)
        scale = torch.rand(groups, generator=generator, device=device) * 8 + 0.5
        return codes.to(torch.uint8), scale.to(torch.float8_e4m3fn)
    if format == "mxfp4":
        centre = round(math.log2(gain / 3)) + 127
        groups = (num_experts, num_rows, num_columns // MXFP4_GROUP)
        exponents = torch.randint(
            centre - 2, centre + 2, groups, generator=generator, device=device
        )
        return codes.to(torch.uint8), exponents.to(torch.uint8)
    blocks = (num_experts, *(-(-size // BLOCK) for size in shape[1:]))
    scale = torch.rand(blocks, generator=generator, device=device) * gain / 64 + gain / 128
    values = _random(shape, torch.float32, generator) * 64
    return values.to(torch.float8_e4m3fn), scale


def _global_scales(shape: tuple[int, int], num_columns: int, generator: torch.Generator) -> Tensor:
    """Of "nvfp4", for about unit gain with the scales of `_stack`."""
    values = torch.rand(shape, generator=generator, device=generator.device) + 0.5
    return values * (num_columns**-0.5 / 14)


def _experts_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    """All but "fp8_block": torch's own check of schemas has no arithmetic for it."""
    generator = torch.Generator(device).manual_seed(seed)
    clamped = Activation("swiglu_clamped", 1.702, 1.5)
    cases: tuple[tuple[tuple[int, ...], str, Activation], ...] = (
        ((5, 8, 2, 64, 32), "", Activation()),
        ((1, 7, 3, 48, 24), "", clamped),
        ((40, 5, 1, 32, 80), "", Activation()),
        ((3, 64, 4, 16, 8), "", Activation()),
        ((9, 20, 16, 32, 16), "", Activation()),
        ((6, 3, 2, 64, 96), "mxfp4", clamped),
        ((6, 3, 2, 96, 64), "nvfp4", Activation()),
        ((0, 4, 2, 32, 16), "", Activation()),
    )
    made = []
    for (num_tokens, num_experts, top_k, hidden, inner), format, activation in cases:
        x = _random((num_tokens, hidden), dtype, generator)
        weights = random_expert_weights(
            num_experts,
            hidden,
            inner,
            dtype=dtype,
            generator=generator,
            format=format,
            has_bias=activation is clamped,
        )
        logits = _random((num_tokens, num_experts), dtype, generator)
        routes = Routes(*reference_moe.route(logits, None, top_k, "softmax", True, 1, 1, 1.0))
        made.append((*expert_arguments(x, routes, weights, activation), ""))
    return made


def expert_arguments(
    x: Tensor, routes: Routes, weights: ExpertWeights, activation: Activation
) -> tuple[Any, ...]:
    """The arguments of the op, in order and without `impl`."""
    return (
        x,
        *weights[:4],
        *routes,
        *activation,
        weights.gate_up_scale,
        weights.down_scale,
        weights.gate_up_global_scale,
        weights.down_global_scale,
        weights.format,
    )


def _experts_fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape)


EXPERTS = define_op(
    "experts(Tensor x, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias,"
    " Tensor weights, Tensor ids, Tensor order, Tensor offsets, str activation, float alpha,"
    " float limit, Tensor? gate_up_scale, Tensor? down_scale,"
    " Tensor? gate_up_global_scale, Tensor? down_global_scale, str format,"
    " str impl='') -> Tensor",
    reference=reference_moe.experts,
    fake=_experts_fake,
    example_inputs=_experts_examples,
    is_expandable=False,
)


def experts_cpu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    order: Tensor,
    offsets: Tensor,
    activation: str,
    alpha: float,
    limit: float,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down_global_scale: Tensor | None,
    format: str,
    impl: str = "",
) -> Tensor:
    """Each chosen expert once, over the tokens that chose it; arguments as `reference_moe`'s.

    Raises:
        ValueError: `impl` is none that runs here.
    """
    if impl not in ("", "grouped", "torch"):
        raise ValueError(f"experts: {impl} does not run on a CPU; grouped and torch do")
    if impl == "torch":
        arguments = (x, gate_up, down, gate_up_bias, down_bias, weights, ids, order, offsets)
        scales = (gate_up_scale, down_scale, gate_up_global_scale, down_global_scale)
        options = (activation, alpha, limit, *scales, format)
        return reference_moe.experts(*arguments, *options)
    first = gate_up_bias, (gate_up, gate_up_scale, gate_up_global_scale)
    second = down_bias, (down, down_scale, down_global_scale)
    total = torch.zeros(x.shape, dtype=torch.float32)
    pairs, pair_weights = order.long(), weights.flatten()
    edges = offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(edges)):
        if begin == end:
            continue
        mine = pairs[begin:end]
        tokens = mine // ids.shape[1]
        y = x[tokens]
        for is_last, (bias, stacked) in enumerate((first, second)):
            matrix = reference_moe.dequantize_stacked(*stacked, e, format, x.dtype)
            y = linear_cpu(y, matrix, None if bias is None else bias[e].contiguous())
            if not is_last:
                y = gated_activation(y, activation, alpha, limit)
        total.index_add_(0, tokens, y.float() * pair_weights[mine].unsqueeze(-1))
    return total.to(x.dtype)


LIBRARY.impl("experts", experts_cpu, "CPU")
LIBRARY.impl("route", route_cuda, "CUDA")
LIBRARY.impl("experts", experts_cuda, "CUDA")


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> Routes:
    """Chooses each token's experts from logits [T, E]; see `reference_moe.route`."""
    return Routes(
        *torch.ops.ce.route.default(
            logits, bias, top_k, scoring, renormalize, num_groups, top_groups, scale
        )
    )


def experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: Activation = Activation(),  # noqa: B008 - immutable
) -> Tensor:
    """The weighted sum of each token's experts [T, h]; see `reference_moe.experts`."""
    return torch.ops.ce.experts.default(*expert_arguments(x, routes, weights, activation))
