"""Plain PyTorch bodies of the ops of mixtures of experts: `route`, `experts`, `sparse_mlp`.

T tokens, E experts, k experts a token (`top_k`), h hidden size, i inner size of an expert. A pair
is a token and one of its experts; pair `t * k + j` is token t's j-th choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops.reference import gated_activation, linear, rms_norm
from compiled_engine.custom_ops.reference_quant import PACKED_FORMATS, dequantize

# Keeps the sum of chosen scores, which may all have underflowed, from being divided by as 0.
_TINY = 1e-20


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chooses every token's experts, and sorts the pairs by expert.

    Args:
        logits: [T, E], any float dtype; scores are computed in fp32.
        bias: [E] fp32, added to the scores for choosing only; None for none.
        top_k: experts a token, 1 to E.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        renormalize: divides the weights by their sum.
        num_groups: equal runs of experts of which only the best are looked at; 1 for no groups.
        top_groups: how many; a group counts as the sum of its two best (biased) scores.
        scale: multiplies the weights.

    Returns:
        weights [T, k] fp32, of the score without bias.
        ids [T, k] int32, best first; of equal ones the lower first. In range for any logits.
        order [T * k] int32, the pairs sorted by expert, within an expert by pair.
        offsets [E + 1] int32, where each expert's pairs begin in `order`; the last is T * k.

    Source: Qwen3, Mixtral and gpt-oss (softmax); DeepSeek-V3, arXiv 2412.19437 (sigmoid, bias,
        groups).
    """
    logits = logits.float()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        choice = _in_best_groups(choice, num_groups, top_groups)
    ids = _best(choice, top_k)  # [T, k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    experts, order = ids.flatten().sort(stable=True)
    edges = torch.arange(logits.shape[1] + 1, device=logits.device)
    offsets = torch.searchsorted(experts, edges, out_int32=True)
    ids = ids.to(torch.int32, memory_format=torch.contiguous_format)
    return weights * scale, ids, order.int(), offsets


def _best(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of the last dim; of equal ones the lower first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """`choice` [T, E] with -inf outside the best groups."""
    grouped = choice.unflatten(-1, (num_groups, -1))
    best_two = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)  # [T, num_groups]
    kept = torch.zeros_like(best_two, dtype=torch.bool)
    kept = kept.scatter(-1, _best(best_two, top_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def dequantize_expert(
    weight: Tensor,
    scale: Tensor | None,
    fmt: str,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The matrix [n, m] of one expert in `dtype`.

    Args:
        weight: "" a plain matrix; "mxfp4" and "nvfp4" uint8 [n, m / 2], the low nibble first;
            "fp8_block" e4m3 [n, m].
        scale: "mxfp4" uint8 [n, m / 32], exponents biased by 127; "nvfp4" e4m3 [n, m / 16];
            "fp8_block" fp32 [ceil(n / 128), ceil(m / 128)].
        fmt: as above.
        dtype: of the result.
        global_scale: "nvfp4" fp32 [p], each for n / p rows, one below the other.
    """
    if fmt == "":
        return weight
    assert scale is not None, f"{fmt} needs scales"
    size = weight.shape[1] * (2 if fmt in PACKED_FORMATS else 1)
    if global_scale is not None:
        parts = global_scale.shape[0]
        global_scale = global_scale.repeat_interleave(weight.shape[0] // parts).unsqueeze(1)
    return dequantize(weight, scale, None, global_scale, fmt, size, dtype)


def dequantize_stacked(
    weight: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    expert: int,
    fmt: str,
    dtype: torch.dtype,
) -> Tensor:
    """The matrix [n, m] of `expert` out of stacked ones; see `dequantize_expert`."""
    one, overall = (None if s is None else s[expert] for s in (scale, global_scale))
    return dequantize_expert(weight[expert], one, fmt, dtype, overall)


def experts(  # noqa: D417 - some are described together
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
    """The weighted sum of each token's experts: a plain loop over all of them.

    Expert e is `linear(gated_activation(linear(x, gate_up[e])), down[e])`. Every token goes through
    every expert, those it did not choose weigh 0: nothing depends on the order of pairs.

    Args:
        x: [T, h].
        gate_up: [E, 2 i, h], the rows of the gate, then those of what it multiplies; packed as
            `format` says, see `dequantize_expert`.
        down: [E, h, i], likewise.
        gate_up_bias: [E, 2 i] in the dtype of `x`, or None.
        down_bias: [E, h] likewise; it is weighted like the rest of its expert.
        weights: [T, k] fp32, from `route`.
        ids: [T, k] int32, from `route`; a token's experts are distinct.
        order, offsets: [T * k] and [E + 1] int32, from `route`; read by kernels only.
        activation: "silu" or "swiglu_clamped", see `reference.gated_activation`.
        alpha, limit: of "swiglu_clamped".
        gate_up_scale: scales of `gate_up` by expert, None for plain weights.
        down_scale: likewise.
        gate_up_global_scale: "nvfp4" fp32 [E, 2], of each expert's gate and of what it multiplies;
            else None.
        down_global_scale: likewise [E, 1].
        format: "" for weights of the dtype of `x`, "mxfp4", "nvfp4" or "fp8_block".
        impl: chooses who computes; "" is the best one.

    Returns:
        [T, h] in the dtype of `x`; summed in fp32.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(gate_up.shape[0]):
        kind = e, format, x.dtype
        w_in = dequantize_stacked(gate_up, gate_up_scale, gate_up_global_scale, *kind)
        w_out = dequantize_stacked(down, down_scale, down_global_scale, *kind)
        y = linear(x, w_in, None if gate_up_bias is None else gate_up_bias[e])
        y = gated_activation(y, activation, alpha, limit)
        y = linear(y, w_out, None if down_bias is None else down_bias[e])
        chosen = ids == e  # [T, k]
        weight = torch.where(chosen, weights, 0.0).sum(-1, keepdim=True)
        total = torch.where(chosen.any(-1, keepdim=True), total + weight * y, total)
    return total.to(x.dtype)


def sparse_mlp(  # noqa: D417 - some are described together
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    router: Tensor,
    router_bias: Tensor | None,
    score_bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    gate_up_global_scale: Tensor | None,
    down_global_scale: Tensor | None,
    format: str,
    residual: Tensor | None,
    impl: str = "",
) -> Tensor:
    """`residual + experts(y, route(linear(y, router)))` with `y = rms_norm(x, norm_weight)`.

    Args:
        x: [T, h].
        norm_weight: [h]; None leaves the norm out.
        eps: of the norm.
        router: [E, h].
        router_bias: [E] in the dtype of `x`, or None.
        score_bias: the `bias` of `route`.
        top_k: of `route`, like those up to `scale`.
        scoring: see `route`.
        renormalize: see `route`.
        num_groups: see `route`.
        top_groups: see `route`.
        scale: see `route`.
        gate_up: of `experts`, like those up to `format`.
        down, gate_up_bias, down_bias: see `experts`.
        activation, alpha, limit: see `experts`.
        gate_up_scale, down_scale: see `experts`.
        gate_up_global_scale, down_global_scale: see `experts`.
        format: see `experts`.
        residual: [T, h] in the dtype of `x`, or None.
        impl: chooses who computes; "" is the best one.
    """
    x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    choice = (top_k, scoring, renormalize, num_groups, top_groups, scale)
    routes = route(linear(x, router, router_bias), score_bias, *choice)
    scales = (gate_up_scale, down_scale, gate_up_global_scale, down_global_scale)
    kind: tuple[Any, ...] = (activation, alpha, limit, *scales, format)
    y = experts(x, gate_up, down, gate_up_bias, down_bias, *routes, *kind)
    return y if residual is None else y + residual
