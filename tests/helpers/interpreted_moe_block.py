"""The kernels of `sparse_mlp` in Triton's CPU interpreter against their references.

Run as a program of its own, like `interpreted_moe`. In fp16 and fp32: the interpreter takes bf16
for integers in products.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from compiled_engine.custom_ops import (
    moe,
    moe_block,
    moe_rows,
    moe_stream,
    reference,
    reference_moe,
)
from compiled_engine.custom_ops.moe_config import RowsConfig, StreamConfig
from compiled_engine.custom_ops.moe_route import Routing
from compiled_engine.custom_ops.moe_router import RouterOperands, launch_choose, launch_router
from tests.helpers.interpreted import readable_loop_bounds
from tests.helpers.interpreted_moe import CLAMPED, FP16, FP32, Case
from tests.helpers.tolerances import assert_close

CASES = (
    Case(1, 128, 8, 64, 24),
    Case(1, 7, 7, 100, 20, is_clamped=True, has_bias=True),
    Case(1, 5, 1, 264, 36, dtype=FP32),
    Case(5, 20, 16, 96, 40, has_bias=True),
    Case(17, 3, 3, 72, 33, is_clamped=True, has_bias=True),
    Case(40, 33, 4, 40, 16, dtype=FP32, skew=9.0),
)
ROUTINGS = (
    Routing(0, "softmax", True, 1, 1, 1.0),
    Routing(0, "sigmoid", True, 1, 1, 2.5),
    Routing(0, "softmax", False, 1, 1, 1.0),
)


def block_of(case: Case, number: int) -> moe_block.BlockOperands:
    """Seeded arguments; rows of x and of the residual lie apart."""
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = moe.random_expert_weights(
        case.num_experts,
        case.size,
        case.inner,
        dtype=case.dtype,
        generator=generator,
        has_bias=case.has_bias,
    )
    routing = ROUTINGS[number % 3]._replace(top_k=case.top_k)
    has_score_bias = number % 2 == 1
    bias = normal(case.num_experts) + case.skew * torch.linspace(0, 1, case.num_experts)
    wide = case.size + 8
    return moe_block.BlockOperands(
        normal(case.num_tokens, wide).to(case.dtype)[:, : case.size],
        normal(case.size).to(case.dtype) if number != 2 else None,
        1e-6,
        normal(case.num_experts, case.size).to(case.dtype) * case.size**-0.5,
        bias.to(case.dtype) if case.has_bias or case.skew else None,
        normal(case.num_experts) * 0.1 if has_score_bias else None,
        *routing,
        *weights[:4],
        *(CLAMPED if case.is_clamped else moe.Activation()),
        *(None, None, None, None, ""),
        normal(case.num_tokens, wide).to(case.dtype)[:, : case.size] if number != 3 else None,
    )


def routed(block: moe_block.BlockOperands) -> tuple[Tensor, Tensor]:
    """The router's kernel against norm and product; returns what it gave."""
    x, norm_weight, eps, router, bias = block[:5]
    normed, logits = launch_router(RouterOperands(x, norm_weight, eps, router, bias))
    wanted = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
    assert_close("normed", normed, wanted, factor=2.0)
    assert_close("logits", logits, reference.linear(normed, router, bias), factor=4.0)
    return normed, logits


def wanted_of(block: moe_block.BlockOperands, normed: Tensor, logits: Tensor) -> Tensor:
    """The rest of the reference on the kernel's own logits, so that no rounding changes ids."""
    routes = reference_moe.route(logits, block.score_bias, *block.routing)
    operands = block.experts(normed, *routes)
    y = reference_moe.experts(*operands[:-1])
    return y if block.residual is None else y + block.residual


def check_rows() -> None:
    """Pairs on their own, and the residual in their sum."""
    config = RowsConfig(8, 32, 2, 1), RowsConfig(16, 32, 3, 1)
    for number, case in enumerate(CASES):
        block = block_of(case, number)
        x, norm_weight, eps, router, bias = block[:5]
        normed = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
        logits = reference.linear(normed, router, bias)
        routes = reference_moe.route(logits, block.score_bias, *block.routing)
        got = moe_rows.launch_rows(block.experts(normed, *routes), *config)
        assert_close(str(case), got, wanted_of(block, normed, logits), factor=8.0)


def check_stream() -> None:
    """Several tokens: a table of choices, exact, and experts that read it."""
    first, second = StreamConfig(32, 8, 32, 2, 1), StreamConfig(16, 16, 64, 2, 1)
    for number, case in enumerate(CASES):
        block = block_of(case, number)
        normed, logits = routed(block)
        weights, table = launch_choose(logits, block.score_bias, Routing(*block.routing))
        expected, ids, _, _ = reference_moe.route(logits, block.score_bias, *block.routing)
        assert_close("weights", weights, expected, factor=8.0)
        check_table(table, ids)
        operands = block.experts(normed, weights, table, table, table)
        got = moe_stream.launch_stream(operands, first, second)
        assert_close(str(case), got, wanted_of(block, normed, logits), factor=8.0)


def check_table(table: Tensor, ids: Tensor) -> None:
    """Expert `ids[t, j]` has j for token t; all others have -1."""
    num_tokens, top_k = ids.shape
    wanted = torch.full((num_tokens, table.shape[0]), -1, dtype=torch.int8)
    choices = torch.arange(top_k, dtype=torch.int8).expand(num_tokens, top_k)
    wanted.scatter_(1, ids.long(), choices)
    assert torch.equal(table, wanted.T)


def check_broken() -> None:
    """Equal logits, and such as are not numbers, give experts that exist."""
    for logits in (torch.zeros(1, 20), torch.full((3, 20), float("nan")), torch.eye(3, 20) / 0.0):
        logits = logits.to(FP16)
        routing = Routing(4, "softmax", True, 1, 1, 1.0)
        _, table = launch_choose(logits, None, routing)
        assert ((table >= 0).sum(0) == 4).all()
        if not logits.isnan().any():
            check_table(table, reference_moe.route(logits, None, *routing)[1])


CHECKS: dict[str, Callable[[], None]] = {
    "rows": check_rows,
    "stream": check_stream,
    "broken": check_broken,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    with readable_loop_bounds():
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name]()
