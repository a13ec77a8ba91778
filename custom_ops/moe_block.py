"""Contract of `sparse_mlp`: a whole mixture of experts, with the norm and the add around it.

A pass puts it in the place of norm, router, choice, experts and add, for few tokens on a GPU. What
runs then is decided here: kernels that leave the sorting out (`moe_router`), or the ops one by one
with the residual added where the experts' results are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import moe, reference_moe
from compiled_engine.custom_ops.library import LIBRARY, define_op
from compiled_engine.custom_ops.moe_choice import (
    block_traits,
    select_block,
    with_target,
)
from compiled_engine.custom_ops.moe_cuda import route_cuda, run_experts, traits_of
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.moe_sizes import pick_stream
from compiled_engine.custom_ops.registry import Target


class BlockOperands(NamedTuple):
    """Arguments of `sparse_mlp`, without the kernel's name; see `reference_moe.sparse_mlp`."""

    x: Tensor
    norm_weight: Tensor | None
    eps: float
    router: Tensor
    router_bias: Tensor | None
    score_bias: Tensor | None
    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    top_groups: int
    scale: float
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    alpha: float
    limit: float
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    gate_up_global_scale: Tensor | None
    down_global_scale: Tensor | None
    format: str
    residual: Tensor | None

    @property
    def routing(self) -> tuple[int, str, bool, int, int, float]:
        """The last arguments of `route`."""
        found = (self.top_k, self.scoring, self.renormalize)
        return (*found, self.num_groups, self.top_groups, self.scale)

    def experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, order: Tensor, offsets: Tensor
    ) -> ExpertOperands:
        """Arguments of the experts, for a normed `x` and what was chosen."""
        kind: tuple[Any, ...] = self[16:]
        return ExpertOperands(x, *self[12:16], weights, ids, order, offsets, *kind)


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    """Those of `experts`, with a router in front of them.

    x, the gain and the router are such that logits are exact, so that all who compute them choose
    the same experts.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def quarters(*shape: int) -> Tensor:
        found = torch.randint(-4, 5, shape, generator=generator, device=generator.device)
        return (found * 0.25).to(dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    found = []
    for number, arguments in enumerate(moe.EXPERTS.example_inputs(dtype, device, seed)):
        operands = ExpertOperands(*arguments[:-1])
        num_tokens, size = operands.x.shape
        num_experts, is_odd = operands.num_experts, number % 2 == 1
        x = torch.where(operands.x < 0, -1.0, 1.0).to(dtype)
        block = (
            x,
            quarters(size) if number % 3 != 2 else None,
            1e-6,
            quarters(num_experts, size),
            quarters(num_experts) if operands.gate_up_bias is not None else None,
            normal(num_experts) * 0.1 if is_odd else None,
            operands.top_k,
            *("sigmoid" if is_odd else "softmax", number % 3 != 1, 1, 1, 1.5 if is_odd else 1.0),
            *arguments[1:5],
            *arguments[9:17],
            None if is_odd else normal(num_tokens, size).to(dtype),
        )
        found.append((*block, ""))
    return found


def _fake(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape)


SPARSE_MLP = define_op(
    "sparse_mlp(Tensor x, Tensor? norm_weight, float eps, Tensor router, Tensor? router_bias,"
    " Tensor? score_bias, int top_k, str scoring, bool renormalize, int num_groups,"
    " int top_groups, float scale, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, str activation, float alpha, float limit, Tensor? gate_up_scale,"
    " Tensor? down_scale, Tensor? gate_up_global_scale, Tensor? down_global_scale, str format,"
    " Tensor? residual, str impl='') -> Tensor",
    reference=reference_moe.sparse_mlp,
    fake=_fake,
    example_inputs=_examples,
)


def sparse_mlp_cuda(*arguments: Any, impl: str = "") -> Tensor:
    """Runs `impl`, or the best one if that is empty; as `reference_moe.sparse_mlp`.

    Raises:
        ValueError: as `moe_choice.select_block`.
    """
    count = len(BlockOperands._fields)
    block = BlockOperands(*arguments[:count])
    impl = arguments[count] if len(arguments) > count else impl
    target = Target.of(block.x.device)
    traits = with_target(block_traits_of(block), target)
    kernel = select_block(impl, target, block.x.dtype, traits)
    if kernel == "torch":
        return reference_moe.sparse_mlp(*block)
    if kernel == "apart":
        return run_apart(block)
    assert kernel == "stream", kernel
    return run_fused(block, traits)


def block_traits_of(block: BlockOperands) -> dict[str, int]:
    """The traits by which a kernel for these arguments is chosen."""
    hollow = torch.empty((block.x.shape[0], block.top_k), device="meta")
    return block_traits(
        traits_of(block.experts(block.x, hollow, hollow, hollow, hollow)),
        block.x.dtype,
        (block.norm_weight, block.router, block.router_bias),
        (block.num_groups, block.score_bias),
    )


def run_fused(block: BlockOperands, traits: dict[str, int]) -> Tensor:
    """Norm and router in one kernel, and no sorting."""
    from compiled_engine.custom_ops.moe_route import Routing
    from compiled_engine.custom_ops.moe_router import RouterOperands, launch_choose, launch_router
    from compiled_engine.custom_ops.moe_stream import launch_stream

    if block.x.shape[0] == 0:
        return torch.zeros_like(block.x)
    routing = Routing(*block.routing)
    normed, logits = launch_router(
        RouterOperands(block.x, block.norm_weight, block.eps, block.router, block.router_bias)
    )
    weights, table = launch_choose(logits, block.score_bias, routing)
    return launch_stream(block.experts(normed, weights, table, table, table), *pick_stream(traits))


def run_apart(block: BlockOperands) -> Tensor:
    """Norm, router, choice and experts one after the other, each as its op would run it."""
    x = block.x
    if block.norm_weight is not None:
        x = torch.ops.ce.rms_norm.default(x, block.norm_weight, block.eps)
    router = (x, block.router, block.router_bias, None, 0.0, None, False)
    logits = torch.ops.ce.fused_linear.default(*router)
    routes = route_cuda(logits, block.score_bias, *block.routing)
    return run_experts("", block.experts(x, *routes))


LIBRARY.impl("sparse_mlp", sparse_mlp_cuda, "CUDA")
