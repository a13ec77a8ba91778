"""Lowering of quantised layers, and quantisers taken into norm and gate; near misses stay.

Whole graphs go through the pipeline with every op kept, so that a test sees the roles of the
arguments and compares numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_engine.custom_ops import dequantize, gelu_and_mul, quantize, rms_norm, silu_and_mul
from compiled_engine.custom_ops.quant import QUANT_OPS
from compiled_engine.models.quant_linear import QuantLinear
from compiled_engine.passes import (
    fuse_activation_quant,
    fuse_attention_quant,
    fuse_norm_quant,
    lower_quantized_linear,
    lower_scaled_linear,
)
from compiled_engine.passes.pattern import Node
from tests.helpers.layer_step import LayerStep, call_layer, run_eagerly
from tests.helpers.pass_harness import Captured, Harness, calls_of, ce, item, op_counts
from tests.helpers.quant_case import ONLINE, quantized_layer

GLUE = {"add_rms_norm", "rms_norm", "silu_and_mul", "gelu_and_mul", "swiglu_clamped"}
KEPT = frozenset({op.name for op in QUANT_OPS} | GLUE)
EPS = 1e-5
T, K, N = 5, 160, 48
FEW = lower_quantized_linear.NAME
MANY = lower_scaled_linear.NAME
# Format -> of its weights, of its activations.
FORMATS = {
    "fp8": ("fp8_channel", "fp8_token"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "int8": ("int8_channel", "int8_token"),
    "int4": ("int4_group", ""),
    "nvfp4": ("nvfp4", ""),
    "nvfp4_w4a4": ("nvfp4_tiles", "nvfp4_token"),
    "mxfp4": ("mxfp4", ""),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(function: Callable[..., Any], *inputs: Any, without: tuple[str, ...] = ()) -> Captured:
    """Runs the pipeline, and compares with the eager function: bodies are the matched spelling.

    To the last bit, but for products that are left: those go to a kernel of their own.
    """
    found = Harness(disabled=without, kept_ops=KEPT).run(function, *inputs)
    with torch.no_grad():
        expected = function(*inputs)
    allowed = 1e-5 if op_counts(found.after)["linear"] else 0.0
    torch.testing.assert_close(found.outputs, expected, rtol=allowed, atol=allowed)
    return found


def bound(node: Node) -> dict[str, Any]:
    """Arguments by their names in the op's schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


# --- few rows: one op -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONLINE)
def test_few_rows_take_norm_gate_and_bias(name: str):
    layer = quantized_layer(name, K, 2 * N, has_bias=True)

    def function(layer: QuantLinear, x: Tensor, norm: Tensor) -> Tensor:
        return silu_and_mul(layer(rms_norm(x, norm, EPS)))

    found = run(function, layer, normal(T, K), normal(K, seed=1))
    assert found.matches(FEW) == 1
    assert op_counts(found.after) == {"quantized_linear": 1}
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert (given["format"], given["activation_format"]) == FORMATS[name]
    assert given["weight"].meta["val"].shape == layer.weight.shape
    assert given["scale"].meta["val"].shape == layer.scale.shape
    assert (given["global_scale"] is not None) == name.startswith("nvfp4")
    assert given["zero"] is None
    assert given["input_scale"] is None
    assert given["bias"].meta["val"].shape == (2 * N,)
    assert given["x"].meta["val"].shape == (T, K)
    assert given["norm_weight"].meta["val"].shape == (K,)
    assert (given["eps"], given["residual"], given["is_gated"]) == (EPS, None, True)


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_few_rows_take_the_residual(name: str):
    layer = quantized_layer(name, K, N)

    def function(layer: QuantLinear, x: Tensor, residual: Tensor) -> Tensor:
        return residual + layer(x)

    found = run(function, layer, normal(T, K), normal(T, N))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert given["residual"].meta["val"].shape == (T, N)
    assert (given["norm_weight"], given["is_gated"], given["bias"]) == (None, False, None)


def test_few_rows_with_a_static_scale():
    layer = quantized_layer("fp8", K, N)
    layer.activation_format = "fp8_tensor"
    layer.input_scale = nn.Parameter(torch.tensor([0.02]), requires_grad=False)

    def function(layer: QuantLinear, x: Tensor) -> Tensor:
        return layer(x)

    found = run(function, layer, normal(T, K))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert given["activation_format"] == "fp8_tensor"
    assert given["input_scale"].meta["val"].shape == (1,)


def test_columns_in_another_order_are_the_input_of_the_op():
    layer = quantized_layer("int4", K, N)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    layer.input_order = nn.Parameter(order, requires_grad=False)

    def function(layer: QuantLinear, x: Tensor, norm: Tensor) -> Tensor:
        return layer(rms_norm(x, norm, EPS))

    found = run(function, layer, normal(T, K), normal(K, seed=1))
    assert found.matches(FEW) == 1
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert given["norm_weight"] is None, "it stands before the columns are moved"
    assert given["x"].target is not ce.rms_norm.default


def test_4_bit_activations_with_a_static_scale():
    layer = quantized_layer("nvfp4_w4a4", K, N)
    layer.activation_format = "nvfp4_tensor"
    layer.input_scale = nn.Parameter(torch.tensor([0.004]), requires_grad=False)

    def function(layer: QuantLinear, x: Tensor) -> Tensor:
        return layer(x)

    for without in ((), (FEW,)):
        found = run(function, layer, normal(T, K), without=without)
        (node,) = calls_of(found.after, ce.quantized_linear.default)
        given = bound(node)
        assert (given["format"], given["activation_format"]) == ("nvfp4_tiles", "nvfp4_tensor")
        assert given["input_scale"].meta["val"].shape == (1,)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["values", "scale", "token scale"])
def test_4_bit_activations_of_two_quantisers_are_no_match(place: int):
    layer = quantized_layer("nvfp4_w4a4", K, N)

    def function(layer: QuantLinear, x: Tensor, other: Tensor) -> Tensor:
        made = list(quantize(x, "nvfp4_token", None))
        made[place] = quantize(other, "nvfp4_token", None)[place]
        q, scale, token_scale = made
        values = dequantize(q, scale, None, token_scale, "nvfp4_tiles", K, torch.float32)
        return nn.functional.linear(values, layer.dequantized(torch.float32))

    found = run(function, layer, normal(T, K), normal(T, K, seed=1))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert given["activation_format"] == ""
    assert given["x"].target is ce.dequantize.default


def test_a_product_that_others_read_keeps_its_value():
    layer = quantized_layer("fp8", K, N)

    def function(layer: QuantLinear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x)
        return residual + y, y

    found = run(function, layer, normal(T, K), normal(T, N))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    assert bound(node)["residual"] is None


def test_a_norm_of_another_dtype_stays():
    layer = quantized_layer("nvfp4", K, N)

    def function(layer: QuantLinear, x: Tensor, norm: Tensor) -> Tensor:
        return layer(rms_norm(x, norm, EPS))  # promoted to fp32 by its weight

    found = run(function, layer, normal(T, K).bfloat16(), normal(K))
    assert op_counts(found.after) == {"rms_norm": 1, "quantized_linear": 1}


def test_a_broadcast_residual_stays():
    layer = quantized_layer("fp8", K, N)

    def function(layer: QuantLinear, x: Tensor, row: Tensor) -> Tensor:
        return layer(x) + row

    found = run(function, layer, normal(T, K), normal(1, N))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    assert bound(node)["residual"] is None


def other_columns(layer: QuantLinear, x: Tensor) -> Tensor:
    """The product with a slice of what the weight means."""
    return x @ layer.dequantized(torch.float32)[:, :32].T


def other_dtype(layer: QuantLinear, x: Tensor) -> Tensor:
    return x @ layer.dequantized(torch.bfloat16).float().T


def not_transposed(layer: QuantLinear, x: Tensor) -> Tensor:
    return x @ layer.dequantized(torch.float32)


@pytest.mark.parametrize(
    ("function", "columns"), [(other_columns, 32), (other_dtype, K), (not_transposed, N)]
)
@pytest.mark.parametrize("without", [(), (FEW,)], ids=["few", "many"])
def test_near_misses_stay(function: Any, columns: int, without: tuple[str, ...]):
    found = run(function, quantized_layer("nvfp4", K, N), normal(T, columns), without=without)
    assert found.matches(FEW) == found.matches(MANY) == 0
    assert op_counts(found.after)["dequantize"] == 1


def test_another_quantiser_of_the_scale_is_no_match():
    """Values of one quantisation with scales of another: the product is not one of the input."""
    layer = quantized_layer("fp8", K, N)

    def function(layer: QuantLinear, x: Tensor, other: Tensor) -> Tensor:
        q, _ = quantize(x, "fp8_token", None)
        _, scale = quantize(other, "fp8_token", None)
        values = dequantize(q, scale, None, None, "fp8_channel", K, torch.float32)
        return nn.functional.linear(values, layer.dequantized(torch.float32))

    found = run(function, layer, normal(T, K), normal(T, K, seed=1))
    (node,) = calls_of(found.after, ce.quantized_linear.default)
    given = bound(node)
    assert given["activation_format"] == ""
    assert given["x"].target is ce.dequantize.default


# --- many rows: a product of quantised operands ---------------------------------------------------


@pytest.mark.parametrize("name", ONLINE)
def test_many_rows(name: str):
    layer = quantized_layer(name, K, N, has_bias=True)

    def function(layer: QuantLinear, x: Tensor) -> Tensor:
        return layer(x)

    found = run(function, layer, normal(T, K), without=(FEW,))
    assert found.matches(MANY) == 1
    weights, activations = FORMATS[name]
    if not activations or name == "nvfp4_w4a4":  # what no product of bytes takes
        assert op_counts(found.after) == {"quantized_linear": 1}
        (node,) = calls_of(found.after, ce.quantized_linear.default)
        given = bound(node)
        assert (given["format"], given["activation_format"]) == (weights, activations)
        assert given["x"].meta["val"].shape == (T, K)
        assert (given["global_scale"] is not None) == name.startswith("nvfp4")
        assert (given["norm_weight"], given["residual"], given["is_gated"]) == (None, None, False)
        assert given["bias"].meta["val"].shape == (N,)
        return
    (node,) = calls_of(found.after, ce.scaled_linear.default)
    given = bound(node)
    assert (given["format"], given["activation_format"]) == (weights, activations)
    quantizer, place = item(given["q"])
    assert place == 0
    assert item(given["q_scale"]) == (quantizer, 1)
    assert quantizer.args[0].meta["val"].shape == (T, K)
    assert given["weight"].meta["val"].shape == layer.weight.shape
    assert given["weight_scale"].meta["val"].shape == layer.scale.shape
    assert given["bias"].meta["val"].shape == (N,)
    assert given["dtype"] == torch.float32


# --- quantisers in their producers ----------------------------------------------------------------

ACTIVATIONS = ["fp8_token", "fp8_tensor", "fp8_block", "int8_token"]


def static_scale(activations: str) -> Tensor | None:
    return torch.tensor([0.03]) if activations == "fp8_tensor" else None


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_norm_takes_its_quantiser(activations: str):
    def function(x: Tensor, weight: Tensor, scale: Tensor | None) -> Any:
        return quantize(rms_norm(x, weight, EPS), activations, scale)

    scale = static_scale(activations)
    found = run(function, normal(T, K), normal(K), scale)
    assert found.matches(fuse_norm_quant.NAME) == 1
    assert op_counts(found.after) == {"rms_norm_quant": 1}
    (node,) = calls_of(found.after, ce.rms_norm_quant.default)
    given = bound(node)
    assert given["x"].meta["val"].shape == (T, K)
    assert given["weight"].meta["val"].shape == (K,)
    assert (given["eps"], given["activation_format"]) == (EPS, activations)
    assert (given["static_scale"] is None) == (scale is None)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_an_added_norm_takes_its_quantiser_and_keeps_the_sum(activations: str):
    def function(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor | None) -> Any:
        total = residual + x
        return *quantize(rms_norm(total, weight, EPS), activations, scale), total * 2, total

    inputs = normal(T, K), normal(T, K, seed=1), normal(K), static_scale(activations)
    found = run(function, *inputs)
    assert found.matches(fuse_norm_quant.NAME) == 1
    assert op_counts(found.after) == {"add_rms_norm_quant": 1}
    (node,) = calls_of(found.after, ce.add_rms_norm_quant.default)
    given = bound(node)
    assert given["x"] is not given["residual"]
    assert given["x"].meta["val"].shape == given["residual"].meta["val"].shape == (T, K)
    assert given["weight"].meta["val"].shape == (K,)
    assert (given["eps"], given["activation_format"]) == (EPS, activations)


def clamped(x: Tensor) -> Tensor:
    return ce.swiglu_clamped.default(x, 1.702, 7.0)


GATES = {
    "silu": (silu_and_mul, ("silu", 0.0, 0.0)),
    "gelu": (lambda x: gelu_and_mul(x, "none"), ("gelu", 0.0, 0.0)),
    "gelu_tanh": (lambda x: gelu_and_mul(x, "tanh"), ("gelu_tanh", 0.0, 0.0)),
    "swiglu_clamped": (clamped, ("swiglu_clamped", 1.702, 7.0)),
}


@pytest.mark.parametrize(
    ("gate", "activations"),
    [*(("silu", name) for name in ACTIVATIONS), *((name, "fp8_token") for name in GATES)],
)
def test_a_gate_takes_its_quantiser(gate: str, activations: str):
    act, numbers = GATES[gate]

    def function(x: Tensor, scale: Tensor | None) -> Any:
        return quantize(act(x), activations, scale)

    found = run(function, normal(T, 2 * K), static_scale(activations))
    assert found.matches(fuse_activation_quant.NAME) == 1
    assert op_counts(found.after) == {"gated_activation_quant": 1}
    (node,) = calls_of(found.after, ce.gated_activation_quant.default)
    given = bound(node)
    assert given["x"].meta["val"].shape == (T, 2 * K)
    assert tuple(given[name] for name in ("activation", "alpha", "limit")) == numbers
    assert given["activation_format"] == activations
    assert (given["static_scale"] is None) == (activations != "fp8_tensor")


def read_again(x: Tensor, weight: Tensor) -> Any:
    normed = rms_norm(x, weight, EPS)
    return *quantize(normed, "fp8_token", None), normed


def gate_read_again(x: Tensor, weight: Tensor) -> Any:
    gated = silu_and_mul(x)
    return *quantize(gated, "fp8_token", None), gated


def clamped_read_again(x: Tensor, weight: Tensor) -> Any:
    gated = clamped(x)
    return *quantize(gated, "fp8_token", None), gated


def halves_of_a_gate(x: Tensor, weight: Tensor) -> Any:
    """What is quantised is a part of what the gate makes."""
    return quantize(gelu_and_mul(x, "tanh")[:, :32], "fp8_token", None)


def one_sided(x: Tensor, weight: Tensor) -> Any:
    """A gate alone is no gated activation."""
    return quantize(torch.nn.functional.silu(x), "fp8_token", None)


def computed_scale(x: Tensor, weight: Tensor) -> Any:
    return quantize(rms_norm(x, weight, EPS), "fp8_tensor", weight[:1].abs() + 0.1)


def promoted(x: Tensor, weight: Tensor) -> Any:
    return quantize(rms_norm(x.bfloat16(), weight, EPS), "fp8_token", None)


@pytest.mark.parametrize(
    "function",
    [
        read_again, gate_read_again, clamped_read_again, halves_of_a_gate, one_sided,
        computed_scale, promoted,
    ],
)  # fmt: skip
def test_quantisers_that_stay(function: Any):
    found = run(function, normal(T, K), normal(K))
    assert found.matches(fuse_norm_quant.NAME) == found.matches(fuse_activation_quant.NAME) == 0
    assert op_counts(found.after)["quantize_fp8"] == 1


# --- a whole layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["fp8", "fp8_block", "int8", "nvfp4", "nvfp4_w4a4"])
def test_counts_of_a_layer(tmp_path: Path, family: str, name: str):
    step = LayerStep(tmp_path, family, quantization=name)
    few = Harness(kept_ops=KEPT).run(call_layer, *step.arguments())
    assert few.matches(FEW) == 4
    assert few.matches(MANY) == few.matches(fuse_norm_quant.NAME) == 0
    counts = op_counts(few.after)
    assert (counts["quantized_linear"], counts["add_rms_norm"], counts["rms_norm"]) == (4, 0, 0)
    many = Harness(disabled=(FEW,), kept_ops=KEPT).run(call_layer, *step.arguments())
    assert many.matches(MANY) == 4
    counts = op_counts(many.after)
    if name in ("fp8", "fp8_block", "int8"):
        assert many.matches(fuse_norm_quant.NAME) == 2
        assert many.matches(fuse_activation_quant.NAME) == 1
        made_of = (
            "scaled_linear", "rms_norm_quant", "add_rms_norm_quant", "gated_activation_quant",
        )  # fmt: skip
        assert [counts[op] for op in made_of] == [4, 1, 1, 1]
        # What attention gives is quantised by itself.
        assert counts["quantize_fp8"] + counts["quantize_int8"] == 1
    else:
        assert counts["quantized_linear"] == 4
    expected, _ = run_eagerly(step)
    for found in (few, many):
        torch.testing.assert_close(found.outputs, expected, rtol=1e-5, atol=1e-5)


def test_counts_of_a_layer_with_static_scales(tmp_path: Path):
    """Attention too takes its quantiser in, where there are many rows: none is left."""
    step = LayerStep(tmp_path, "qwen3", quantization="fp8")
    for module in step.layer.modules():
        if isinstance(module, QuantLinear):
            module.activation_format = "fp8_tensor"
            module.input_scale = nn.Parameter(torch.tensor([0.02]), requires_grad=False)
    few = Harness(kept_ops=KEPT).run(call_layer, *step.arguments())
    assert few.matches(fuse_attention_quant.NAME) == 0
    many = Harness(disabled=(FEW,), kept_ops=KEPT).run(call_layer, *step.arguments())
    assert many.matches(fuse_attention_quant.NAME) == 1
    counts = op_counts(many.after)
    assert counts["paged_attention_quant"] == counts["gated_activation_quant"] == 1
    assert counts["paged_attention"] == counts["quantize_fp8"] == 0
    assert counts["scaled_linear"] == 4
    expected, _ = run_eagerly(step)
    for found in (few, many):
        torch.testing.assert_close(found.outputs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_without_kernels_all_is_expanded_again(tmp_path: Path, name: str):
    step = LayerStep(tmp_path, "qwen3", quantization=name)
    found = Harness().run(call_layer, *step.arguments())
    assert found.matches(FEW) == 4
    assert found.matches("use_linear_op") == 4
    assert set(op_counts(found.after)) == {"linear", "paged_attention"}
    assert found.counters.num_expansions == 5, "four products, and rotation with the write"
    expected, _ = run_eagerly(step)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-4, atol=1e-4)


def test_with_the_passes_off_the_layer_is_the_same(tmp_path: Path):
    step = LayerStep(tmp_path, "llama", quantization="fp8")
    off = (FEW, MANY, fuse_norm_quant.NAME, fuse_activation_quant.NAME)
    found = Harness(disabled=off, kept_ops=KEPT).run(call_layer, *step.arguments())
    assert op_counts(found.after)["dequantize"] == 8
    expected, _ = run_eagerly(step)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-5, atol=1e-5)
