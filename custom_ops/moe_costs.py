"""What calls of `route`, `experts` and `sparse_mlp` cost, their traits, inputs for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops import moe, moe_choice, reference_moe
from compiled_engine.custom_ops.family_inputs import BenchCase, Shapes
from compiled_engine.custom_ops.moe_block import BlockOperands, block_traits_of
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.registry import Target

# The experts of Qwen3-30B-A3B: their number, those of a token, hidden and inner size.
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
# Endings of the arguments that belong to one of the two products.
_OF_PRODUCT = ("", "_bias", "_scale", "_global_scale")


def distinct_experts(num_experts: int, num_pairs: int, top_k: int) -> float:
    """How many experts a step touches if every token's are drawn uniformly."""
    num_tokens = num_pairs / max(1, top_k)
    return float(num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))


def experts_bytes_flops(
    arguments: Mapping[str, Any], results: tuple[Any, ...], context: int
) -> tuple[float, float]:
    """The distinct experts' weights once, tokens in and out; two operations a weight and pair."""
    x, gate_up, ids = (arguments[n] for n in ("x", "gate_up", "ids"))
    num_experts, top_k = gate_up.shape[0], ids.shape[1]
    names = [f"{product}{of}" for product in ("gate_up", "down") for of in _OF_PRODUCT]
    stacks = [arguments[name] for name in names if arguments[name] is not None]
    stacked = sum(stack.numel() * stack.element_size() for stack in stacks)
    touched = distinct_experts(num_experts, ids.numel(), top_k)
    moved = touched / num_experts * stacked + 2.0 * x.numel() * x.element_size()
    moved += ids.numel() * (4 + 4 + 4)
    hidden = x.shape[1]
    inner = gate_up.shape[1] // 2
    return moved, 2.0 * ids.numel() * 3 * hidden * inner


def block_bytes_flops(
    arguments: Mapping[str, Any], results: tuple[Any, ...], context: int
) -> tuple[float, float]:
    """As the experts, and the router's weight and the residual once."""
    x, router, residual = (arguments[n] for n in ("x", "router", "residual"))
    ids = torch.empty((x.shape[0], arguments["top_k"]), device="meta")
    moved, flops = experts_bytes_flops({**arguments, "ids": ids}, results, context)
    moved += sum(t.numel() * t.element_size() for t in (router, residual) if t is not None)
    return moved, flops + 2.0 * x.shape[0] * router.numel()


def block_traits(arguments: Mapping[str, Any], target: Target) -> dict[str, int]:
    """Those of `moe_choice`."""
    block = BlockOperands(*(arguments[n] for n in BlockOperands._fields))
    return moe_choice.with_target(block_traits_of(block), target)


def route_traits(arguments: Mapping[str, Any], target: Target) -> dict[str, int]:
    """Those of `moe_choice`, and the number of tokens."""
    logits = arguments["logits"]
    found = moe_choice.route_traits(logits, arguments["num_groups"])
    return {"num_tokens": logits.shape[0], "top_k": arguments["top_k"], **found}


def experts_traits(arguments: Mapping[str, Any], target: Target) -> dict[str, int]:
    """Those of `moe_choice`."""
    names = ("x", "gate_up", "down", "ids")
    x, gate_up, down, ids = (arguments[name] for name in names)
    biases = (arguments["gate_up_bias"], arguments["down_bias"])
    kinds = (arguments["activation"], arguments["format"])
    found = moe_choice.experts_traits(x, gate_up, down, ids, biases, *kinds)
    return moe_choice.with_target(found, target)


def route_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The router of Qwen3-30B-A3B, whatever the model's shapes."""

    def make() -> tuple[Any, ...]:
        logits = torch.randn(num_tokens, NUM_EXPERTS, device=device).to(shapes.dtype)
        return (logits, None, TOP_K, "softmax", True, 1, 1, 1.0)

    yield BenchCase(f"{num_tokens}x{NUM_EXPERTS} top {TOP_K}", make)


def experts_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The experts of Qwen3-30B-A3B, of a small model few of its width; in every format."""
    small = shapes.hidden < HIDDEN
    sizes = (8, 2, shapes.hidden, shapes.inner) if small else (NUM_EXPERTS, TOP_K, HIDDEN, INNER)
    label = f"{num_tokens} tokens, {sizes[1]} of {sizes[0]} of {sizes[2]}x{sizes[3]}"
    for format in moe.FORMATS:
        make = partial(_experts_arguments, sizes, num_tokens, shapes.dtype, device, format)
        yield BenchCase(f"{label} {format}".rstrip(), make)


def _experts_arguments(
    sizes: tuple[int, int, int, int],
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    format: str,
) -> tuple[Any, ...]:
    num_experts, top_k, hidden, inner = sizes
    generator = torch.Generator(device).manual_seed(num_tokens)
    weights = moe.random_expert_weights(
        num_experts, hidden, inner, dtype=dtype, generator=generator, format=format
    )
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    routes = moe.Routes(*_routes(num_tokens, num_experts, top_k, device))
    return (*moe.expert_arguments(x, routes, weights, moe.Activation()), "")


def _routes(
    num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Routes of random logits: near enough to uniform ones."""
    logits = torch.randn(num_tokens, num_experts, device=device)
    return reference_moe.route(logits, None, top_k, "softmax", True, 1, 1, 1.0)


def experts_step(
    arguments: Mapping[str, Any], device: torch.device, context: int
) -> dict[str, Any]:
    """Routes with the shapes of a call of `experts`, and scales of about 1."""
    num_tokens, top_k = arguments["ids"].shape
    names = ("weights", "ids", "order", "offsets")
    routes = _routes(num_tokens, arguments["gate_up"].shape[0], top_k, device)
    made: dict[str, Any] = dict(zip(names, routes, strict=True))
    return made | block_step(arguments, device, context)


def block_step(arguments: Mapping[str, Any], device: torch.device, context: int) -> dict[str, Any]:
    """Scales of about 1 of packed experts."""
    made = {}
    of_one = {torch.uint8: 120, torch.float8_e4m3fn: 1.0}
    for name in ("gate_up_scale", "down_scale"):
        scale = arguments[name]
        if scale is not None and scale.dtype in of_one:
            made[name] = torch.full((), of_one[scale.dtype], device=device).to(scale.dtype)
            made[name] = made[name].expand(scale.shape).contiguous()
    return made


def block_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The cases of `experts`, with norm, router and residual.

    Logits are exact, so that all who compute them choose the same experts.
    """
    for case in experts_cases(shapes, num_tokens, device):
        yield BenchCase(case.label, partial(_block_arguments, case.make))


def _block_arguments(make_experts: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    operands = ExpertOperands(*make_experts()[:-1])
    x = torch.where(operands.x < 0, -1.0, 1.0).to(operands.x.dtype)
    router = torch.randint(-4, 5, (operands.num_experts, x.shape[1]), device=x.device) / 128
    head = (x, torch.ones_like(x[0]), 1e-6, router.to(x.dtype), None, None)
    routing = (operands.top_k, "softmax", True, 1, 1, 1.0)
    return (*head, *routing, *operands[1:5], *operands[9:17], operands.x, "")
