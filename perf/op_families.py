"""The cases of the op bench: ops at the shapes of a step, with the candidates for each.

One function a family, listed in `FAMILIES`; it yields cases one at a time, so that the inputs of
one are freed before the next are made. Every call of a case has inputs of its own, in all more than
the device's cache holds; the few bytes of the smallest ops stay there, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_engine.compile.torch_compat import has_own_kernel
from compiled_engine.custom_ops import ALL_OPS, OpSpec
from compiled_engine.custom_ops.family_inputs import EPS, PAGE_SIZE, Sequences
from compiled_engine.custom_ops.gemm import CANDIDATES, fused_linear_traits
from compiled_engine.custom_ops.registry import Target
from perf.attention_peers import flex, sdpa, varlen
from perf.qwen3_8b import (
    HEAD_DIM,
    HIDDEN,
    INNER,
    LAYER_PRODUCTS,
    NUM_HEADS,
    NUM_KV_HEADS,
    VOCAB_SIZE,
    attention_flops,
)

OUT_OF_CACHE_BYTES = 1e9
MAX_COPIES = 36
Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One op at one shape.

    Attributes:
        name: op and shape.
        num_bytes: that one call must read and write; 0 if operations bound it.
        num_flops: of one call; 0 if bytes bound it.
        candidates: name -> calls.
    """

    name: str
    num_bytes: float = 0.0
    num_flops: float = 0.0
    candidates: dict[str, Sequence[Call]]


def num_copies(num_bytes: float) -> int:
    """Calls of a case whose inputs take that many bytes each."""
    return max(2, min(MAX_COPIES, int(-(-OUT_OF_CACHE_BYTES // num_bytes))))


def _normal(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _spec(name: str) -> OpSpec:
    return next(spec for spec in ALL_OPS if spec.name == name)


# --- attention ----------------------------------------------------------------------------


def paged_calls(
    sequences: Sequences, copies: int, *, is_decode: bool, device: str = "cuda"
) -> list[Call]:
    """Calls of `paged_attention` over caches and queries of their own."""
    where = sequences.indices(device)
    table, rows, lens, starts, token_rows, positions = where.values()
    ops = torch.ops.ce
    work = ops.attention_work.default(
        table, token_rows, positions, rows, lens, starts, PAGE_SIZE, NUM_HEADS, NUM_KV_HEADS,
        is_decode,
    )  # fmt: skip
    cache = (sequences.num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    last = (work, HEAD_DIM**-0.5, 0, 0.0, None, is_decode)
    return [
        partial(
            ops.paged_attention.default,
            _normal(len(token_rows), NUM_HEADS, HEAD_DIM, device=device),
            _normal(*cache, device=device),
            _normal(*cache, device=device),
            *where.values(),
            *last,
        )
        for _ in range(copies)
    ]


def attention_decode() -> Iterator[OpCase]:
    """One query token a row, split and merged; bound by reading the KV."""
    shapes = {
        "1x1024": Sequences([1024], [1]),
        "1x131072": Sequences([131072], [1]),
        "8x1024": Sequences([1024] * 8, [1] * 8),
        "32x1024": Sequences([1024] * 32, [1] * 32),
        "128x1024": Sequences([1024] * 128, [1] * 128),
        "64x(2992 shared + 256)": Sequences([2992 + 256] * 64, [1] * 64, num_shared=2992),
    }
    for name, sequences in shapes.items():
        num_bytes = sequences.kv_tokens * 2 * NUM_KV_HEADS * HEAD_DIM * 2.0
        yield OpCase(
            name=f"paged_attention decode {name}",
            num_bytes=num_bytes,
            candidates={"ours": paged_calls(sequences, num_copies(num_bytes), is_decode=True)},
        )


def attention_tiles() -> Iterator[OpCase]:
    """Causal attention of whole prompts; bound by operations."""
    for count, length in ((1, 2048), (1, 8192), (8, 1024)):
        sequences = Sequences([length] * count, [length] * count)
        candidates: dict[str, Sequence[Call]] = {
            "ours": paged_calls(sequences, 4, is_decode=False),
            "torch sdpa, not paged": [sdpa(count, length) for _ in range(4)],
            "torch varlen, not paged": [varlen(count, length) for _ in range(4)],
            "FlexAttention, pages of 128": [flex(count, length) for _ in range(4)],
        }
        yield OpCase(
            name=f"paged_attention prompt {count}x{length}",
            num_flops=count * attention_flops(length),
            candidates=candidates,
        )


# --- products -----------------------------------------------------------------------------


def fused_linear() -> Iterator[OpCase]:
    """The products of a decode step as the few-token layer calls them."""
    qkv, out, gate_up, down = LAYER_PRODUCTS
    # shape, norm in front, residual behind, gated
    uses = {
        "qkv": (qkv, True, False, False),
        "o": (out, False, True, False),
        "gate_up": (gate_up, True, False, True),
        "down": (down, False, True, False),
        "head": ((VOCAB_SIZE, HIDDEN), True, False, False),
    }
    for num_tokens in (1, 8, 32):
        for name, (shape, has_norm, has_residual, is_gated) in uses.items():
            yield _linear_case(
                f"fused_linear {name} {num_tokens}x{shape[0]}x{shape[1]}",
                (num_tokens, *shape),
                has_norm=has_norm,
                has_residual=has_residual,
                is_gated=is_gated,
            )


def _linear_case(
    name: str,
    shape: tuple[int, int, int],
    *,
    has_norm: bool,
    has_residual: bool,
    is_gated: bool,
) -> OpCase:
    num_tokens, num_out, size = shape
    num_bytes = 2.0 * num_out * size
    width = num_out // 2 if is_gated else num_out
    arguments = [
        (
            _normal(num_tokens, size),
            _normal(num_out, size) * size**-0.5,
            None,
            _normal(size) if has_norm else None,
            EPS,
            _normal(num_tokens, width) if has_residual else None,
            is_gated,
        )
        for _ in range(num_copies(num_bytes))
    ]
    x, weight, bias, norm, _, residual, _ = arguments[0]
    traits = fused_linear_traits(x, weight, bias, norm, residual, is_gated)
    op, target = torch.ops.ce.fused_linear.default, Target.of(x.device)
    candidates: dict[str, Sequence[Callable[[], Any]]] = {
        candidate.name: [partial(op, *given, candidate.name) for given in arguments]
        for candidate in CANDIDATES
        if candidate.rejection(target, x.dtype, traits) is None
    }
    return OpCase(name=name, num_bytes=num_bytes, candidates=candidates)


# --- small ops ----------------------------------------------------------------------------


def with_candidates(
    op: str, shape: str, num_bytes: float, make: Callable[[], tuple[Any, ...]]
) -> OpCase:
    """A case of an op by name: its own kernel where it has one, and Inductor's of its body."""
    spec = _spec(op)
    arguments = [make() for _ in range(num_copies(num_bytes))]
    compiled = torch.compile(spec.reference, dynamic=False)
    functions = {"inductor": compiled}
    if has_own_kernel(spec.overload, "cuda"):
        functions["ours"] = spec.overload
    candidates: dict[str, Sequence[Callable[[], Any]]] = {
        name: [partial(function, *given) for given in arguments]
        for name, function in functions.items()
    }
    return OpCase(name=f"{op} {shape}", num_bytes=num_bytes, candidates=candidates)


def glue() -> Iterator[OpCase]:
    """Norms, activation, rotary embedding with KV write; bound by bytes."""
    for tokens in (1, 32, 8192):
        row_bytes = 2.0 * tokens
        weight = _normal(HIDDEN)
        yield with_candidates(
            "rms_norm",
            f"{tokens}x{HIDDEN}",
            2 * row_bytes * HIDDEN,
            lambda tokens=tokens, weight=weight: (_normal(tokens, HIDDEN), weight, EPS),  # type: ignore[misc]
        )
        yield with_candidates(
            "silu_and_mul",
            f"{tokens}x{2 * INNER}",
            3 * row_bytes * INNER,
            lambda tokens=tokens: (_normal(tokens, 2 * INNER),),  # type: ignore[misc]
        )
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        yield with_candidates(
            "qk_norm_rope_kv_write",
            f"{tokens} tokens",
            2 * row_bytes * heads * HEAD_DIM,
            partial(_rope_arguments, tokens),
        )


def _rope_arguments(tokens: int) -> tuple[Any, ...]:
    heads = _normal(tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    angles = torch.rand(tokens, HEAD_DIM // 2, device="cuda")
    num_pages = tokens // PAGE_SIZE + 2
    caches = [_normal(num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    slots = torch.arange(PAGE_SIZE, PAGE_SIZE + tokens, device="cuda")
    weights = (_normal(HEAD_DIM), _normal(HEAD_DIM))
    return (q, k, v, *weights, angles.cos(), angles.sin(), EPS, *caches, slots)


def sampling() -> Iterator[OpCase]:
    """From logits to tokens and to log probabilities; bound by reading the logits once."""
    for rows in (1, 32, 128):
        logits_bytes = 2.0 * rows * VOCAB_SIZE
        for label, is_greedy in (("greedy", True), ("top-k, top-p, min-p", False)):
            yield with_candidates(
                "sample_tokens",
                f"{rows}x{VOCAB_SIZE} {label}",
                logits_bytes,
                partial(_sampling_arguments, rows, is_greedy=is_greedy),
            )
        yield with_candidates(
            "top_logprobs",
            f"{rows}x{VOCAB_SIZE} top 5",
            logits_bytes,
            partial(_logprob_arguments, rows),
        )


def _sampling_arguments(rows: int, *, is_greedy: bool) -> tuple[Any, ...]:
    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    seeds = torch.randint(0, 2**62, (rows,), device="cuda")
    position = filled(1024, torch.int32)
    settings = (filled(0.8), filled(50, torch.int32), filled(0.9), filled(0.02), seeds, position)
    return (4 * _normal(rows, VOCAB_SIZE), *settings, VOCAB_SIZE, is_greedy)


def _logprob_arguments(rows: int) -> tuple[Any, ...]:
    chosen = torch.arange(rows, dtype=torch.int32, device="cuda")
    return (4 * _normal(rows, VOCAB_SIZE), chosen, 5)


FAMILIES: dict[str, Callable[[], Iterator[OpCase]]] = {
    "attention_decode": attention_decode,
    "attention_tiles": attention_tiles,
    "fused_linear": fused_linear,
    "glue": glue,
    "sampling": sampling,
}
