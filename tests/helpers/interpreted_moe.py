"""The kernels of mixtures of experts in Triton's CPU interpreter against their references.

Run as a program of its own with TRITON_INTERPRET=1 (`run_interpreted` of `interpreted.py`): Triton
reads the variable when a kernel is decorated. A function a kernel, called by name.

Products of tiles are checked in fp16 and fp32: the interpreter takes bf16 for integers there.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import (
    moe,
    moe_route,
    moe_rows,
    moe_stream,
    moe_tiles,
    reference_moe,
)
from compiled_engine.custom_ops.moe_config import PairTilesConfig, RowsConfig, StreamConfig
from compiled_engine.custom_ops.moe_operands import ExpertOperands
from compiled_engine.custom_ops.moe_route import Routing, launch_route
from tests.helpers.interpreted import readable_loop_bounds
from tests.helpers.tolerances import assert_close

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
CLAMPED = moe.Activation("swiglu_clamped", 1.702, 1.5)


class Case(NamedTuple):
    """tokens, experts, experts a token, sizes; `skew` prefers experts of high numbers."""

    num_tokens: int
    num_experts: int
    top_k: int
    size: int
    inner: int
    format: str = ""
    dtype: torch.dtype = FP16
    is_clamped: bool = False
    has_bias: bool = False
    skew: float = 0.0


ROW_CASES = (
    Case(1, 128, 8, 64, 24, dtype=BF16),
    Case(2, 3, 3, 100, 20, is_clamped=True, has_bias=True),
    Case(3, 1, 1, 40, 36, dtype=FP32, has_bias=True),
    Case(1, 20, 16, 32, 32, "mxfp4", BF16, is_clamped=True, has_bias=True),
    Case(1, 3, 2, 160, 130, "fp8_block"),
    Case(1, 20, 7, 96, 32, "nvfp4", BF16, is_clamped=True, has_bias=True),
    Case(2, 5, 1, 64, 160, "nvfp4"),
)
TILE_CASES = (
    Case(1, 128, 8, 64, 40),
    Case(17, 3, 3, 96, 40, is_clamped=True, has_bias=True),
    Case(70, 8, 2, 36, 20, dtype=FP32, has_bias=True, skew=9.0),
    Case(3, 20, 16, 32, 16),
    Case(40, 1, 1, 48, 33),
    Case(9, 7, 4, 96, 160, "mxfp4", is_clamped=True, has_bias=True),
    Case(33, 3, 2, 160, 130, "fp8_block"),
    Case(9, 7, 4, 96, 160, "nvfp4", is_clamped=True, has_bias=True),
    Case(21, 5, 1, 64, 32, "nvfp4", skew=9.0),
)


def operands_of(case: Case) -> ExpertOperands:
    """Seeded arguments."""
    generator = torch.Generator().manual_seed(case.num_tokens)
    weights = moe.random_expert_weights(
        case.num_experts,
        case.size,
        case.inner,
        dtype=case.dtype,
        generator=generator,
        format=case.format,
        has_bias=case.has_bias,
    )
    x = torch.randn(case.num_tokens, case.size + 8, generator=generator).to(case.dtype)
    logits = torch.randn(case.num_tokens, case.num_experts, generator=generator)
    logits += case.skew * torch.linspace(0, 1, case.num_experts)
    routes = moe.Routes(*reference_moe.route(logits, None, case.top_k, "softmax", True, 1, 1, 1.0))
    activation = CLAMPED if case.is_clamped else moe.Activation()
    arguments = moe.expert_arguments(x[:, : case.size], routes, weights, activation)
    return ExpertOperands(*arguments)


def check(case: Case, launch: Callable[[ExpertOperands], Tensor], *, twice: bool = True) -> None:
    """Against the reference, and, if `twice`, against a second run."""
    operands = operands_of(case)
    got = launch(operands)
    # The reference rounds each product and each step of the activation.
    factor = {BF16: 8.0, FP16: 6.0, FP32: 8.0}[case.dtype]
    assert_close(str(case), got, reference_moe.experts(*operands), factor=factor)
    if twice:
        assert torch.equal(got, launch(operands)), case


def check_rows() -> None:
    """Blocks that end within a row, more and fewer blocks ahead than there are."""
    for case in ROW_CASES:
        for first, second in (
            (RowsConfig(8, 32, 2, 1), RowsConfig(16, 32, 3, 1)),
            (RowsConfig(32, 64, 9, 1), RowsConfig(32, 128, 1, 1)),
        ):
            launch = functools.partial(moe_rows.launch_rows, first=first, second=second)
            check(case, launch, twice=case is ROW_CASES[1])


def check_stream() -> None:
    """More pairs of an expert than are multiplied at a time, and experts without any."""
    first, second = StreamConfig(32, 8, 32, 2, 1), StreamConfig(16, 16, 64, 2, 1)
    for case in TILE_CASES:
        check(
            case, lambda o: moe_stream.launch_stream(o, first, second), twice=case is TILE_CASES[2]
        )


def check_tiles() -> None:
    """Tiles that end within an expert's pairs; tiles in swaths; weights by descriptors."""
    plain = PairTilesConfig(16, 32, 32, 2, 1), PairTilesConfig(16, 16, 64, 2, 1, swath=2)
    copied = (
        PairTilesConfig(16, 32, 32, 2, 1, True, 3),
        PairTilesConfig(16, 16, 64, 2, 1, True),
    )
    for case in TILE_CASES:
        check(case, lambda o: moe_tiles.launch_tiles(o, *plain), twice=case is TILE_CASES[2])
        if not case.format and case.size % 8 == 0 and case.inner % 8 == 0:
            check(case, lambda o: moe_tiles.launch_tiles(o, *copied), twice=False)


def check_route() -> None:
    """One tile of tokens and several; groups, biases, ties, values that are not finite."""
    for num_tokens, num_experts, groups, routing in (
        (0, 8, 1, Routing(2, "softmax", True, 1, 1, 1.0)),
        (1, 128, 1, Routing(8, "softmax", True, 1, 1, 1.0)),
        (3, 1, 1, Routing(1, "softmax", True, 1, 1, 2.0)),
        (17, 3, 1, Routing(3, "softmax", False, 1, 1, 1.0)),
        (64, 16, 4, Routing(4, "sigmoid", True, 4, 2, 2.5)),
        (7, 12, 3, Routing(5, "sigmoid", False, 3, 1, 1.0)),
        (300, 128, 1, Routing(8, "softmax", True, 1, 1, 1.0)),
        (70, 300, 1, Routing(16, "sigmoid", True, 1, 1, 1.0)),
    ):
        for kind in ("normal", "equal", "broken"):
            logits = torch.randn(num_tokens, num_experts).to(BF16)
            if kind == "equal":
                logits.zero_()
            if kind == "broken" and num_tokens:
                logits[0] = float("nan")
                logits[-1, 0] = -float("inf")
            bias = torch.randn(num_experts) * 0.1 if groups > 1 else None
            got = launch_route(logits, bias, routing)
            check_sorted(got[1], got[2], got[3], num_experts)
            if kind != "broken":
                expected = reference_moe.route(logits, bias, *routing)
                assert_close("weights", got[0], expected[0], factor=4.0)
                assert torch.equal(got[1], expected[1]), (num_tokens, num_experts, routing)


def check_route_steps() -> None:
    """Tiles of several steps, the last one cut short, and experts that fill no warp."""
    routing = Routing(2, "softmax", True, 1, 1, 1.0)
    for num_tokens, num_experts in ((601, 8), (150, 70)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe_route, "MAX_TILES", 5)
            patch.setattr(moe_route, "MAX_TABLE", 64)
            logits = torch.randn(num_tokens, num_experts)
            got = launch_route(logits, None, routing)
        check_sorted(got[1], got[2], got[3], num_experts)
        assert torch.equal(got[1], reference_moe.route(logits, None, *routing)[1])


def check_sorted(ids: Tensor, order: Tensor, offsets: Tensor, num_experts: int) -> None:
    """Pairs are sorted by expert, stably, and ids are in range."""
    experts, expected = ids.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected)
    assert ((ids >= 0) & (ids < num_experts)).all()
    edges = torch.arange(num_experts + 1, dtype=torch.int32)
    assert torch.equal(offsets, torch.searchsorted(experts, edges, out_int32=True))


CHECKS = {
    "rows": check_rows,
    "stream": check_stream,
    "tiles": check_tiles,
    "route": check_route,
    "route_steps": check_route_steps,
}


if __name__ == "__main__":
    # The interpreter computes with NumPy, which reports that exp of a large number is infinite.
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.manual_seed(0)
    with readable_loop_bounds():
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name]()
