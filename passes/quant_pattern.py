"""What the passes of quantised layers look for: products with such weights, and quantisers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from compiled_engine.custom_ops.reference_quant import (
    ACTIVATION_FORMATS,
    FP4_ACTIVATIONS,
    activation_layout,
)
from compiled_engine.passes.pattern import Graph, Node, calls, is_item_of


class QuantProduct(NamedTuple):
    """`node = x @ dequantize(weight).T + bias`, x maybe quantised and dequantised first.

    Attributes:
        node: the product.
        x: what is multiplied, before it is quantised.
        q, q_scale: the quantised x, or None.
        activation_format: how, or "".
        input_scale: its static scale, or None.
        weight: stored values, scale, zero, global_scale.
        format: of the weight.
        bias: or None.
    """

    node: Node
    x: Node
    q: Node | None
    q_scale: Node | None
    activation_format: str
    input_scale: Node | None
    weight: tuple[Any, ...]
    format: str
    bias: Node | None


def products(graph: Graph) -> Iterator[QuantProduct]:
    """Every product with a dequantised weight; each is looked at when its turn comes."""
    aten = torch.ops.aten
    for overload in (aten.mm.default, aten.addmm.default):
        for node in calls(graph, overload):
            product = _product(node)
            if product is not None:
                yield product


def _product(node: Node) -> QuantProduct | None:
    *first, x, transposed = node.args
    bias = first[0] if first else None
    if node.kwargs or not isinstance(x, Node) or not isinstance(transposed, Node):
        return None
    if transposed.target is not torch.ops.aten.permute.default or transposed.args[1] != [1, 0]:
        return None
    dequantized = transposed.args[0]
    if not _is_dequantized(dequantized):
        return None
    assert isinstance(dequantized, Node)
    *weight, format, size, dtype = dequantized.args
    value = x.meta["val"]
    if dtype != value.dtype or size != value.shape[1]:
        return None
    if first and (
        not isinstance(bias, Node)
        or bias.meta["val"].shape != node.meta["val"].shape[1:]
        or bias.meta["val"].dtype != value.dtype
    ):
        return None
    plain = QuantProduct(node, x, None, None, "", None, tuple(weight), str(format), bias)  # type: ignore[arg-type]
    return _with_activation(plain)


def _with_activation(product: QuantProduct) -> QuantProduct:
    """The product with what quantises its x, if `x` is a dequantised quantisation."""
    x = product.x
    if not _is_dequantized(x):
        return product
    q, q_scale, zero, token_scale, layout, size, dtype = x.args
    for name in (*ACTIVATION_FORMATS, *FP4_ACTIVATIONS):
        quantizer = _quantizer((q, q_scale, token_scale), name)
        if quantizer is None or layout != activation_layout(name) or zero is not None:
            continue
        source, static = quantizer
        value = source.meta["val"]
        if value.dtype == dtype and value.shape[1] == size:
            assert isinstance(q, Node)
            assert isinstance(q_scale, Node)
            return product._replace(
                x=source, q=q, q_scale=q_scale, activation_format=name, input_scale=static
            )
    return product


def _is_dequantized(node: Any) -> bool:
    return isinstance(node, Node) and node.target is torch.ops.ce.dequantize.default


def _quantizer(outputs: tuple[Any, ...], activation_format: str) -> tuple[Node, Node | None] | None:
    """Input and static scale of the quantiser that made them all, if it makes this format.

    `outputs` are q, its scale, and the scale of tokens, None where there is none.
    """
    ce = torch.ops.ce
    is_int8, is_fp4 = activation_format == "int8_token", activation_format in FP4_ACTIVATIONS
    overload = ce.quantize_int8.default if is_int8 else ce.quantize_fp8.default
    if is_fp4:
        overload = ce.quantize_nvfp4.default
    elif outputs[2] is not None:
        return None
    made = outputs if is_fp4 else outputs[:2]
    if not all(is_item_of(output, overload, index) for index, output in enumerate(made)):
        return None
    quantizer = made[0].args[0]
    if any(output.args[0] is not quantizer for output in made):
        return None
    if made_format(quantizer) != activation_format:
        return None
    return quantizer.args[0], None if is_int8 else quantizer.args[-1]


def made_format(node: Node) -> str:
    """The activation format that a quantiser's node makes."""
    if node.target is torch.ops.ce.quantize_int8.default:
        return "int8_token"
    if node.target is torch.ops.ce.quantize_nvfp4.default:
        return "nvfp4_token" if node.args[1] is None else "nvfp4_tensor"
    return f"fp8_{node.args[1]}"


def quantizers(graph: Graph) -> Iterator[tuple[Node, str, Node | None]]:
    """Every quantiser of activations to bytes: the node, what it makes, and its static scale."""
    for node in calls(graph, torch.ops.ce.quantize_int8.default):
        yield node, "int8_token", None
    for node in calls(graph, torch.ops.ce.quantize_fp8.default):
        yield node, made_format(node), node.args[2]  # type: ignore[misc]
