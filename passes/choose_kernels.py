"""Ops that several kernels implement get the chosen one's name as an argument.

    before:  o = ce.paged_attention(q, ..., impl="")
    after:   o = ce.paged_attention(q, ..., impl="triton")

The registry decides from device, dtype and shapes, once, while the graph is traced. Where a choice
depends on a size that varies within the graph (`fused_linear` for few tokens, `experts`, products
with quantised weights), the op itself takes the best for each size, unless an option names one.
`route` has no such argument: its choice is looked at here, and `--kernel route=torch` takes the op
out of the graph.
Conditions: none. Numerics: as the chosen kernel's.
"""

from __future__ import annotations

from typing import Any

import torch

from compiled_engine.custom_ops.attention_choice import attention_traits
from compiled_engine.custom_ops.gemm import fused_linear_traits
from compiled_engine.custom_ops.moe_choice import route_traits
from compiled_engine.custom_ops.moe_cuda import traits_of
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.quant_choice import quantized_linear_traits, scaled_linear_traits
from compiled_engine.custom_ops.quant_packed import QuantOperands
from compiled_engine.custom_ops.registry import KernelRegistry, Target, Traits
from compiled_engine.passes.pattern import Graph, Node, calls

NAME = "choose_kernels"
_NUM_OPERANDS = len(ExpertOperands._fields)
_NUM_GROUPS = 5  # place among the arguments of `route`


def apply(graph: Graph, registry: KernelRegistry) -> int:
    """Rewrites the graph in place; returns how many calls got a name.

    Raises:
        ConfigError: an option asks for a kernel that cannot serve.
    """
    matches = 0
    for node in calls(graph, torch.ops.ce.paged_attention.default):
        q, k_cache, _, _, seq_rows = (_value(arg) for arg in node.args[:5])
        traits = attention_traits(q, k_cache, seq_rows.shape[0])
        if not all(isinstance(value, int) for value in traits.values()):
            continue  # the op looks when it runs
        choice = registry.choose("attention", "paged", Target.of(q.device), q.dtype, traits)
        node.update_kwarg("impl", choice.candidate.name)
        matches += 1
    for node in calls(graph, torch.ops.ce.fused_linear.default):
        matches += _choose_linear(node, registry)
    for node in calls(graph, torch.ops.ce.experts.default):
        matches += _choose_experts(node, registry)
    for node in calls(graph, torch.ops.ce.quantized_linear.default):
        matches += _choose_quantized(node, registry)
    for node in calls(graph, torch.ops.ce.scaled_linear.default):
        matches += _choose_scaled(node, registry)
    for node in calls(graph, torch.ops.ce.route.default):
        logits = _value(node.args[0])
        traits = route_traits(logits, int(node.args[_NUM_GROUPS]))  # type: ignore[arg-type]
        if all(isinstance(value, int) for value in traits.values()):
            registry.choose("route", "top_k", Target.of(logits.device), logits.dtype, traits)
    return matches


def _choose_linear(node: Node, registry: KernelRegistry) -> bool:
    x, weight, bias, norm_weight, _, residual = (_value(arg) for arg in node.args[:6])
    is_gated = bool(node.args[6])
    if not isinstance(x.shape[0], int):
        return _take_option(node, registry, "fused_linear", "few")
    traits = fused_linear_traits(x, weight, bias, norm_weight, residual, is_gated)
    return _take_best(node, registry, ("fused_linear", "few"), x, traits)


def _choose_quantized(node: Node, registry: KernelRegistry) -> bool:
    operands = QuantOperands(*(_value(arg) for arg in node.args[:13]))  # type: ignore[arg-type]
    if not isinstance(operands.x.shape[0], int):
        return _take_option(node, registry, "quantized_linear", "few")
    traits = quantized_linear_traits(operands)
    return _take_best(node, registry, ("quantized_linear", "few"), operands.x, traits)


def _choose_scaled(node: Node, registry: KernelRegistry) -> bool:
    q, _, weight, weight_scale = (_value(arg) for arg in node.args[:4])
    if not isinstance(q.shape[0], int):
        return _take_option(node, registry, "scaled_linear", "product")
    formats = str(node.args[5]), str(node.args[6])
    traits = scaled_linear_traits(q, weight, weight_scale, *formats)
    return _take_best(node, registry, ("scaled_linear", "product"), node.meta["val"], traits)


def _take_option(node: Node, registry: KernelRegistry, family: str, mode: str) -> bool:
    """The kernel that an option names, for a size that is not known yet."""
    wanted = registry.override(family, mode)
    if wanted is None:
        return False
    node.update_kwarg("impl", wanted)
    return True


def _take_best(
    node: Node, registry: KernelRegistry, place: tuple[str, str], x: torch.Tensor, traits: Traits
) -> bool:
    """The registry's choice for a target and dtype, those of `x`."""
    choice = registry.choose(*place, Target.of(x.device), x.dtype, traits)
    node.update_kwarg("impl", choice.candidate.name)
    return True


def _choose_experts(node: Node, registry: KernelRegistry) -> bool:
    arguments: list[Any] = [_value(argument) for argument in node.args[:_NUM_OPERANDS]]
    operands = ExpertOperands(*arguments)
    x = operands.x
    if not isinstance(x.shape[0], int):
        wanted = registry.override("experts", "grouped")
        if wanted is None:
            return False
        node.update_kwarg("impl", wanted)
        return True
    traits = traits_of(operands)
    choice = registry.choose("experts", "grouped", Target.of(x.device), x.dtype, traits)
    node.update_kwarg("impl", choice.candidate.name)
    return True


def _value(argument: object) -> torch.Tensor:
    return argument.meta["val"] if isinstance(argument, Node) else argument  # type: ignore[return-value]
