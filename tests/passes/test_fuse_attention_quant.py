"""Quantisers behind attention: static scales are taken in, all else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import quantize
from compiled_engine.custom_ops.attention import PAGED_ATTENTION
from compiled_engine.custom_ops.quant import QUANT_OPS
from compiled_engine.passes import fuse_attention_quant
from tests.helpers.pass_harness import Captured, Harness, calls_of, ce, op_counts

NAME = fuse_attention_quant.NAME
KEPT = frozenset(op.name for op in QUANT_OPS)
CASES = PAGED_ATTENTION.example_inputs(torch.float32, torch.device("cpu"), 0)
# Plain, and with a window, a cap and sinks.
PLAIN, OPTIONS = CASES[0], CASES[6]
HEADS, DIM = PLAIN[0].shape[1:]
SCALE = torch.tensor([0.02])


def attend(tensors: tuple[Tensor, ...], rest: tuple[Any, ...]) -> Tensor:
    """[T, H, D]."""
    return ce.paged_attention.default(*tensors, *rest)


def run(function: Callable[..., Any], case: tuple[Any, ...], **options: Any) -> Captured:
    """Runs the pipeline, and compares with the plain function to the last bit."""
    inputs, rest = case[:10], case[10:14]
    found = Harness(kept_ops=KEPT, **options).run(function, inputs, rest, SCALE)
    with torch.no_grad():
        expected = function(inputs, rest, SCALE)
    for got, wanted in zip(found.outputs, expected, strict=True):
        assert torch.equal(got.float(), wanted.float())
    return found


def static(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    q, q_scale = quantize(attend(tensors, rest).flatten(1), "fp8_tensor", scale)
    return q, q_scale * 2


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("case", [PLAIN, OPTIONS], ids=["plain", "options"])
def test_a_static_scale_is_taken_in(case: tuple[Any, ...], is_decode: bool):
    found = run(static, case, disabled=() if is_decode else ("decode_attention",))
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"paged_attention_quant": 1}
    (node,) = calls_of(found.after, ce.paged_attention_quant.default)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    assert given["static_scale"].op == "placeholder"
    assert given["static_scale"].meta["val"].shape == (1,)
    assert given["q"].meta["val"].shape == case[0].shape
    assert given["k_cache"] is not given["v_cache"]
    assert given["scale"] == case[10]
    defaults = {"window": 0, "soft_cap": 0.0, "is_decode": False}
    got = tuple((defaults | given)[name] for name in defaults)
    assert got == (case[11], case[12], is_decode)
    assert (given.get("sinks") is not None) == (case[13] is not None)
    value = node.meta["val"]
    assert (value.shape, value.dtype) == ((len(case[0]), HEADS * DIM), torch.float8_e4m3fn)


def of_tokens(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return quantize(attend(tensors, rest).flatten(1), "fp8_token", None)


def of_blocks(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return quantize(attend(tensors, rest).flatten(1), "fp8_block", None)


def dynamic(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return quantize(attend(tensors, rest).flatten(1), "fp8_tensor", None)


def of_integers(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return quantize(attend(tensors, rest).flatten(1), "int8_token", None)


def read_again(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    out = attend(tensors, rest)
    return quantize(out.flatten(1), "fp8_tensor", scale)[0], out * 2


def flat_read_again(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    out = attend(tensors, rest).flatten(1)
    return quantize(out, "fp8_tensor", scale)[0], out.sigmoid()


def some_heads(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return (quantize(attend(tensors, rest)[:, 1:].flatten(1), "fp8_tensor", scale)[0],)


def by_head(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return (quantize(attend(tensors, rest).flatten(0, 1), "fp8_tensor", scale)[0],)


def gated(tensors: tuple[Tensor, ...], rest: tuple[Any, ...], scale: Tensor) -> Any:
    return (quantize(attend(tensors, rest).flatten(1).sigmoid(), "fp8_tensor", scale)[0],)


@pytest.mark.parametrize(
    "function",
    [
        of_tokens, of_blocks, dynamic, of_integers, read_again, flat_read_again, some_heads,
        by_head, gated,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_near_misses_stay(function: Callable[..., Any]):
    found = run(function, PLAIN)
    assert found.matches(NAME) == 0
    counts = op_counts(found.after)
    assert counts["paged_attention"] == 1
    assert counts["quantize_fp8"] + counts["quantize_int8"] == 1


def test_the_pass_off_is_the_same():
    assert run(static, PLAIN, disabled=(NAME,)).matches(NAME) == 0
