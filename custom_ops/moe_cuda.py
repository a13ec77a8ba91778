"""Launchers of `route` and `experts` on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference_moe
from compiled_engine.custom_ops.moe_choice import (
    experts_traits,
    route_kernel,
    route_traits,
    select_experts,
    with_target,
)
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.moe_sizes import (
    pick_packed,
    pick_packed_token,
    pick_rows,
    pick_stream,
    pick_tiles,
)
from compiled_engine.custom_ops.registry import Target


def route_cuda(logits: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """As `reference_moe.route`, which also serves what the kernels do not take."""
    from compiled_engine.custom_ops.moe_route import Routing, launch_route

    routing = Routing(*options)
    traits = route_traits(logits, routing.num_groups)
    if route_kernel(Target.of(logits.device), logits.dtype, traits) == "torch":
        return reference_moe.route(logits, bias, *options)
    return launch_route(logits, bias, routing)


def traits_of(operands: ExpertOperands) -> dict[str, int]:
    """The traits by which a kernel for these arguments is chosen."""
    return experts_traits(
        operands.x,
        operands.gate_up,
        operands.down,
        operands.ids,
        (operands.gate_up_bias, operands.down_bias),
        operands.activation,
        operands.format,
    )


def experts_cuda(*arguments: Any, impl: str = "") -> Tensor:
    """Runs `impl`, or the best one if that is empty; as `reference_moe.experts`.

    Raises:
        ValueError: as `moe_choice.select_experts`.
    """
    count = len(ExpertOperands._fields) - 1  # without a residual
    operands = ExpertOperands(*arguments[:count])
    impl = arguments[count] if len(arguments) > count else impl
    return run_experts(impl, operands)


def run_experts(impl: str, operands: ExpertOperands) -> Tensor:
    """Runs `impl`, or the best kernel if that is empty, and adds the residual.

    Raises:
        ValueError: as `moe_choice.select_experts`.
    """
    target = Target.of(operands.x.device)
    traits = with_target(traits_of(operands), target)
    kernel = select_experts(impl, target, operands.x.dtype, traits)
    return run_kernel(kernel, operands, traits)


def run_kernel(kernel: str, operands: ExpertOperands, traits: dict[str, int]) -> Tensor:
    """Runs a kernel that can serve."""
    if operands.ids.numel() == 0:
        return torch.zeros_like(operands.x)
    if kernel in ("library", "torch") and operands.residual is not None:
        y = run_kernel(kernel, operands._replace(residual=None), traits)
        return operands.residual + y
    if kernel == "packed_token":
        from compiled_engine.custom_ops.moe_packed_token import launch_packed_token

        return launch_packed_token(operands, *pick_packed_token())
    if kernel == "packed":
        from compiled_engine.custom_ops.moe_packed import launch_packed_experts

        return launch_packed_experts(operands, *pick_packed(traits))
    if kernel == "rows":
        from compiled_engine.custom_ops.moe_rows import launch_rows

        return launch_rows(operands, *pick_rows(traits))
    if kernel == "stream":
        from compiled_engine.custom_ops.moe_stream import launch_stream

        return launch_stream(operands, *pick_stream(traits))
    if kernel == "tiles":
        from compiled_engine.custom_ops.moe_tiles import launch_tiles

        return launch_tiles(operands, *pick_tiles(traits))
    if kernel == "library":
        from compiled_engine.custom_ops.moe_library import run_library

        return run_library(operands)
    assert kernel == "torch", kernel
    return reference_moe.experts(*operands[:-1])
