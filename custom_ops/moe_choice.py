"""Which kernels serve `route`, `experts` and `sparse_mlp`, and why others cannot.

What is fastest was measured on an H200, with the weights of Qwen3-30B-A3B and gpt-oss-20b.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compiled_engine.custom_ops.quant_packed import MOST_SHARED_ARCH
from compiled_engine.custom_ops.registry import (
    Candidate,
    Priority,
    Target,
    Traits,
    best_of,
    by_tokens,
)

# Of a router, that its kernels take.
MAX_EXPERTS = 1024
MAX_GROUPS = 64
# Tokens up to which pairs are computed on their own.
MAX_ROWS_TOKENS = 1
# The same where somebody asks for it by name.
MAX_ROWS_PAIRS = 4096
# Pairs of an expert to expect, up to which its weights are read once for all of them.
MAX_STREAM_PAIRS = 16
# The same of packed weights that become 16-bit floats in registers.
MAX_PACKED_PAIRS = 8
# What the kernels of a whole mixture of experts take: columns, experts, and tokens of "stream".
MAX_BLOCK_SIZE, MAX_BLOCK_EXPERTS, MAX_BLOCK_TOKENS = 4096, 256, 128
# Tokens from and up to which "stream" beats the ops one by one. Those against it, us a layer on an
# H200: 155.9 and 154.1 at 8, 306.4 and 298.9 at 32, 358.2 and 353.5 at 64, 406.3 and 409.1 at 128;
# 51.9 at 1, where kernels that found experts in the logits themselves took 65.9.
MIN_FUSED_TOKENS, MAX_FUSED_TOKENS = 2, 64
# Experts and tokens of a program of the router, whose rows lie in shared memory whole, and parts
# that it divides them into.
ROUTER_EXPERTS, ROUTER_TOKENS, ROUTER_PARTS = 16, 8, 8
# Shared memory of a block of threads by compute capability, and where that is not listed.
_SHARED_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}
_SHARED_BYTES_ELSEWHERE = 101376
# The first that turns e4m3 into other floats.
_E4M3_ARCH = 89
# Experts of a token, and columns of all of them, that the kernel for one token of those takes.
MAX_TOKEN_EXPERTS, MAX_TOKEN_COLUMNS = 16, 32768
FP8_BLOCK = 128
# Formats of 4-bit floats, and what their columns are a multiple of.
FP4_FORMATS, FP4_COLUMNS = ("mxfp4", "nvfp4"), 32


def route_traits(logits: Tensor, num_groups: int) -> dict[str, int]:
    """The traits of these arguments of `route` that `CANDIDATES` look at."""
    return {"num_experts": logits.shape[1], "num_groups": num_groups}


def _rejects_route(traits: Traits) -> str | None:
    if traits["num_experts"] > MAX_EXPERTS:
        return f"takes {MAX_EXPERTS} experts, not {traits['num_experts']}"
    if traits["num_groups"] > MAX_GROUPS:
        return f"takes {MAX_GROUPS} groups, not {traits['num_groups']}"
    return None


def experts_traits(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
    format: str,
) -> dict[str, int]:
    """The traits of these arguments of `experts` that `CANDIDATES` look at."""
    others = [t for t in biases if t is not None]
    if format == "":
        others += [gate_up, down]
    return {
        "num_tokens": x.shape[0],
        "num_experts": gate_up.shape[0],
        "top_k": ids.shape[1],
        "size": x.shape[1],
        "inner_size": gate_up.shape[1] // 2,
        "has_bias": biases[0] is not None,
        "has_both_biases": (biases[0] is None) == (biases[1] is None),
        "is_silu": activation == "silu",
        "is_plain": format == "",
        "is_fp4": format in FP4_FORMATS,
        "has_e4m3": format in ("fp8_block", "nvfp4"),
        "has_one_dtype": all(t.dtype == x.dtype for t in others),
        "is_contiguous": gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == 1,
        "is_aligned": x.stride(0) % 8 == 0,
        "is_bf16": x.dtype == torch.bfloat16,
    }


def block_traits(
    experts: dict[str, int],
    dtype: torch.dtype,
    router: tuple[Tensor | None, Tensor, Tensor | None],
    routing: tuple[int, Tensor | None],
) -> dict[str, int]:
    """The traits of `sparse_mlp`.

    Args:
        experts: those of its experts.
        dtype: of its input.
        router: norm's weight, router's weight and its bias.
        routing: number of groups, and the bias of the scores.
    """
    given = [t for t in router if t is not None]
    return {
        **experts,
        "num_groups": routing[0],
        "has_score_bias": routing[1] is not None,
        "has_norm": router[0] is not None,
        "has_one_router_dtype": all(t.dtype == dtype for t in given),
        "is_router_contiguous": all(t.is_contiguous() for t in given),
    }


def with_target(traits: Traits, target: Target) -> dict[str, int]:
    """The traits, and what `CANDIDATES` look at of the device."""
    return {**traits, "arch": target.arch}


def shared_bytes(arch: int) -> int:
    """Shared memory that a block of threads may have, by compute capability."""
    return _SHARED_BYTES.get(arch, _SHARED_BYTES_ELSEWHERE)


def router_part(size: int) -> int:
    """Columns of each of the `ROUTER_PARTS` that the router's kernel divides rows into."""
    part = -(-size // ROUTER_PARTS)
    return int(max(16, 1 << (part - 1).bit_length()))


def _router_bytes(size: int) -> int:
    """Shared memory of a block of the router's kernel: rows of 16-bit weights and of x."""
    return (ROUTER_EXPERTS + ROUTER_TOKENS) * ROUTER_PARTS * router_part(size) * 2


def _rejects_block(traits: Traits) -> str | None:
    """What the kernels without sorting do not take."""
    size, num_experts = traits["size"], traits["num_experts"]
    room = shared_bytes(traits["arch"])
    rules = (
        (traits["has_one_router_dtype"], "needs the same dtype for x, norm and router"),
        (traits["is_router_contiguous"], "needs contiguous weights of norm and router"),
        (size <= MAX_BLOCK_SIZE, f"takes rows of {MAX_BLOCK_SIZE} values, not {size}"),
        (
            _router_bytes(size) <= room,
            f"needs {_router_bytes(size)} bytes of shared memory, there are {room}",
        ),
        (
            num_experts <= MAX_BLOCK_EXPERTS,
            f"takes {MAX_BLOCK_EXPERTS} experts, not {num_experts}",
        ),
        (traits["num_groups"] == 1, "takes no groups of experts"),
    )
    reason = next((reason for is_met, reason in rules if not is_met), None)
    return reason or _rejects(traits)


def _rejects_block_stream(traits: Traits) -> str | None:
    if traits["num_tokens"] > MAX_BLOCK_TOKENS:
        return f"takes {MAX_BLOCK_TOKENS} tokens, not {traits['num_tokens']}"
    return _rejects_block(traits)


def _why_block_stream_is_slower(traits: Traits) -> str | None:
    num_tokens = traits["num_tokens"]
    rules = (
        (
            num_tokens >= MIN_FUSED_TOKENS,
            "one token's pairs on their own take 51.9 us a layer; kernels of one op took 65.9",
        ),
        (
            num_tokens <= MAX_FUSED_TOKENS,
            "sorted pairs took 406.3 us a layer at 128 tokens, these 409.1;"
            f" between {MAX_FUSED_TOKENS} and 128 nothing was measured",
        ),
        (not traits["is_fp4"], "packed weights have a kernel of their own"),
    )
    reason = next((reason for is_met, reason in rules if not is_met), None)
    return reason or _why_stream_is_slower(traits)


def _rejects(traits: Traits) -> str | None:
    """What no kernel of ours takes."""
    rules = (
        (traits["has_one_dtype"], "needs the same dtype for x, biases and plain weights"),
        (traits["has_both_biases"], "needs a bias of both products or of none"),
        (traits["is_contiguous"], "needs contiguous weights, and packed rows of x"),
        (
            not traits["is_fp4"]
            or (traits["size"] % FP4_COLUMNS == 0 and traits["inner_size"] % FP4_COLUMNS == 0),
            f"needs multiples of {FP4_COLUMNS} values",
        ),
        (
            not traits["has_e4m3"] or traits["arch"] >= _E4M3_ARCH,
            f"needs sm_{_E4M3_ARCH} for weights or scales in e4m3, this is sm_{traits['arch']}",
        ),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _rejects_rows(traits: Traits) -> str | None:
    pairs = traits["num_tokens"] * traits["top_k"]
    if pairs > MAX_ROWS_PAIRS:
        return f"takes {MAX_ROWS_PAIRS} pairs of token and expert, not {pairs}"
    return _rejects(traits)


def pairs_of_expert(traits: Traits) -> float:
    """Pairs of token and expert that an expert has if all have as many."""
    return traits["num_tokens"] * traits["top_k"] / traits["num_experts"]


def _why_rows_are_slower(traits: Traits) -> str | None:
    if traits["num_tokens"] > MAX_ROWS_TOKENS:
        return "reads weights again for every pair"
    return None


def _why_stream_is_slower(traits: Traits) -> str | None:
    if pairs_of_expert(traits) > MAX_STREAM_PAIRS:
        return "reads weights again for every few pairs"
    return None


def _rejects_packed(traits: Traits) -> str | None:
    if not traits["is_fp4"]:
        return f"takes weights in {' and '.join(FP4_FORMATS)}"
    if not traits["is_aligned"]:
        return "needs rows of x at multiples of 16 bytes"
    return _rejects(traits)


def _rejects_packed_token(traits: Traits) -> str | None:
    columns = max(traits["size"], traits["top_k"] * (traits["inner_size"] + 256))
    rules = (
        (traits["num_tokens"] == 1, f"takes 1 token, not {traits['num_tokens']}"),
        (
            traits["top_k"] <= MAX_TOKEN_EXPERTS,
            f"takes {MAX_TOKEN_EXPERTS} experts of a token, not {traits['top_k']}",
        ),
        (
            columns <= MAX_TOKEN_COLUMNS,
            f"takes up to {MAX_TOKEN_COLUMNS} columns of all experts of a token, not {columns}",
        ),
    )
    reason = next((reason for is_met, reason in rules if not is_met), None)
    return reason or _rejects_packed(traits)


def _why_packed_is_slower(traits: Traits) -> str | None:
    if pairs_of_expert(traits) > MAX_PACKED_PAIRS:
        return "reads weights again for every few pairs"
    return None


def _rejects_library(traits: Traits) -> str | None:
    rules = (
        (traits["is_plain"] and traits["is_bf16"], "takes plain weights in bf16"),
        (traits["is_silu"] and not traits["has_bias"], "takes silu, and no bias"),
        (traits["has_one_dtype"], "needs the same dtype for x and weights"),
        (traits["size"] % 8 == 0 and traits["inner_size"] % 8 == 0, "needs sizes in eights"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _on_gpu(
    name: str, priority: Priority, family: str = "experts", mode: str = "grouped", **rules: Any
) -> Candidate:
    rules = {"rejects": _rejects, "min_arch": 80, **rules}
    return Candidate(
        family=family,
        mode=mode,
        name=name,
        priority=priority,
        device_type="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        **rules,
    )


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        family="route",
        mode="top_k",
        name="triton",
        priority=Priority.TUNED,
        device_type="cuda",
        min_arch=80,
        rejects=_rejects_route,
        tags=("deterministic", "scores, choice and sort in one kernel, in two for many tokens"),
    ),
    Candidate(
        family="route",
        mode="top_k",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
    _on_gpu(
        "packed_token",
        Priority.SPECIALIZED,
        min_arch=90,
        max_arch=MOST_SHARED_ARCH,
        rejects=_rejects_packed_token,
        tags=("deterministic", "latency", "packed weights of one token's experts, in two launches"),
    ),
    _on_gpu(
        "packed",
        Priority.SPECIALIZED,
        rejects=_rejects_packed,
        slower=_why_packed_is_slower,
        tags=("packed weights of experts in use once, to tensor cores through registers",),
    ),
    _on_gpu(
        "rows",
        Priority.SPECIALIZED,
        rejects=_rejects_rows,
        slower=_why_rows_are_slower,
        tags=("deterministic", "latency", "each pair on its own"),
    ),
    _on_gpu(
        "stream",
        Priority.SPECIALIZED,
        slower=_why_stream_is_slower,
        tags=("deterministic", "weights of experts in use once"),
    ),
    _on_gpu(
        "tiles",
        Priority.TUNED,
        tags=("deterministic", "throughput", "tiles of sorted pairs"),
    ),
    _on_gpu(
        "library",
        Priority.PORTABLE,
        rejects=_rejects_library,
        tags=("the library's grouped product", "not for captured graphs of few tokens"),
    ),
    Candidate(
        family="experts",
        mode="grouped",
        name="grouped",
        priority=Priority.PORTABLE,
        device_type="cpu",
        tags=("deterministic", "each chosen expert once"),
    ),
    Candidate(
        family="experts",
        mode="grouped",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic", "every token through every expert"),
        num_kernels=lambda _: 0,
    ),
    _on_gpu(
        "stream",
        Priority.TUNED,
        *("sparse_mlp", "few"),
        rejects=_rejects_block_stream,
        slower=_why_block_stream_is_slower,
        num_kernels=lambda _: 5,
        tags=("deterministic", "a table of choices, nothing sorted"),
    ),
    _on_gpu(
        "apart",
        Priority.PORTABLE,
        *("sparse_mlp", "few"),
        rejects=lambda _: None,
        num_kernels=lambda traits: 6 + traits["has_norm"],
        tags=("norm, router, choice and experts one by one",),
    ),
    Candidate(
        family="sparse_mlp",
        mode="few",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
)


def route_kernel(target: Target, dtype: torch.dtype, traits: Traits) -> str:
    """The best candidate's name for `route`."""
    found = [c for c in CANDIDATES if c.family == "route"]
    return best_of([c for c in found if c.rejection(target, dtype, traits) is None], traits).name


def select_experts(kernel: str, target: Target, dtype: torch.dtype, traits: Traits) -> str:
    """`kernel` if it can serve, or the best candidate's name if that is empty.

    Raises:
        ValueError: `kernel` is unknown or cannot serve; says why.
    """
    return _select("experts", kernel, target, dtype, traits)


def select_block(kernel: str, target: Target, dtype: torch.dtype, traits: Traits) -> str:
    """As `select_experts`, for `sparse_mlp`."""
    return _select("sparse_mlp", kernel, target, dtype, traits)


def _select(family: str, kernel: str, target: Target, dtype: torch.dtype, traits: Traits) -> str:
    traits = with_target(traits, target)
    kernel = by_tokens(kernel, traits["num_tokens"])
    found = [c for c in CANDIDATES if c.family == family]
    reasons = {c.name: c.rejection(target, dtype, traits) for c in found}
    if kernel not in ("", *reasons):
        raise ValueError(f"{family} has no kernel {kernel}; there are {', '.join(reasons)}")
    if kernel and reasons[kernel] is not None:
        raise ValueError(f"{family}: kernel {kernel} {reasons[kernel]}")
    return kernel or best_of([c for c in found if reasons[c.name] is None], traits).name
