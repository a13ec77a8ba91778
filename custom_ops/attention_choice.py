"""Which implementation serves a call of `paged_attention`, and why the others cannot."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_work import MAX_CANDIDATES
from compiled_engine.custom_ops.registry import (
    MAX_DECISIONS,
    Candidate,
    Priority,
    Target,
    Traits,
    by_tokens,
)
from compiled_engine.custom_ops.toolchain import has_nvrtc

PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 80, 96, 128, 256)
# of the decode kernel in CUDA C++
CUDA_HEAD_DIMS = (64, 80, 96, 128)
MAX_GROUP = 16
FP8_ARCH = 89


def _triton_rejects(traits: Traits) -> str | None:
    head_dim, page_size, arch = traits["head_dim"], traits["page_size"], traits["arch"]
    num_rows = traits["num_rows"]
    rules = (
        (head_dim in HEAD_DIMS, f"has head dims {HEAD_DIMS}, not {head_dim}"),
        (page_size in PAGE_SIZES, f"has page sizes {PAGE_SIZES}, not {page_size}"),
        (
            traits["has_query_cache"] or traits["has_fp8_cache"],
            "needs a KV cache of the dtype of the queries or float8_e4m3fn",
        ),
        (
            arch >= FP8_ARCH or not traits["has_fp8_cache"],
            f"reads float8_e4m3fn from sm_{FP8_ARCH} on, this is sm_{arch}",
        ),
        (num_rows <= MAX_CANDIDATES, f"serves at most {MAX_CANDIDATES} rows, not {num_rows}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _cuda_rejects(traits: Traits) -> str | None:
    head_dim, page_size, group = traits["head_dim"], traits["page_size"], traits["group"]
    num_rows = traits["num_rows"]
    rules = (
        (traits["has_nvrtc"], "needs the cuda-bindings package"),
        (head_dim in CUDA_HEAD_DIMS, f"has head dims {CUDA_HEAD_DIMS}, not {head_dim}"),
        (page_size in PAGE_SIZES, f"has page sizes {PAGE_SIZES}, not {page_size}"),
        (group <= MAX_GROUP, f"has at most {MAX_GROUP} query heads a KV head, not {group}"),
        (traits["has_query_cache"], "needs a KV cache of the dtype of the queries"),
        (num_rows <= MAX_CANDIDATES, f"serves at most {MAX_CANDIDATES} rows, not {num_rows}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def _cpp_rejects(traits: Traits) -> str | None:
    return None if traits["has_query_cache"] else "needs a KV cache of the dtype of the queries"


_PAGED = (
    Candidate(
        family="attention",
        mode="paged",
        name="cuda",
        priority=Priority.SPECIALIZED,
        device_type="cuda",
        min_arch=80,
        dtypes=(torch.bfloat16, torch.float16),
        rejects=_cuda_rejects,
        tags=("deterministic", "split KV", "shared prefixes", "merged in one kernel"),
        num_kernels=lambda traits: 1 if traits["is_decode"] else 2,
    ),
    Candidate(
        family="attention",
        mode="paged",
        name="triton",
        priority=Priority.TUNED,
        device_type="cuda",
        min_arch=80,
        rejects=_triton_rejects,
        tags=("deterministic", "portable", "split KV", "shared prefixes", "tiles"),
        num_kernels=lambda traits: 2 if traits["is_decode"] else 3,
    ),
    Candidate(
        family="attention",
        mode="paged",
        name="cpp",
        priority=Priority.SPECIALIZED,
        device_type="cpu",
        rejects=_cpp_rejects,
        tags=("deterministic",),
    ),
    Candidate(
        family="attention",
        mode="paged",
        name="torch",
        priority=Priority.REFERENCE,
        tags=("deterministic",),
        num_kernels=lambda _: 0,
    ),
)


def _quantized(candidate: Candidate) -> Candidate:
    """The same for results that are quantised with a static scale."""
    least = FP8_ARCH if candidate.device_type == "cuda" else candidate.min_arch
    return replace(candidate, mode="paged_quant", min_arch=least)


CANDIDATES = (*_PAGED, *map(_quantized, _PAGED))


def attention_traits(
    q: Tensor, k_cache: Tensor, num_rows: int, target: Target | None = None
) -> dict[str, int]:
    """The traits of a call that `CANDIDATES` look at.

    Args:
        q: [T, H, D].
        k_cache: [num_pages, page_size, H_kv, D].
        num_rows: tokens of a decode call, else places for sequences.
        target: what code is made for, if that is not the device of `q`.
    """
    target = target or Target.of(q.device)
    return {
        "head_dim": q.shape[2],
        "page_size": k_cache.shape[1],
        "has_query_cache": int(k_cache.dtype == q.dtype),
        "has_fp8_cache": int(k_cache.dtype == torch.float8_e4m3fn),
        "num_rows": num_rows,
        "group": q.shape[1] // k_cache.shape[2],
        "has_nvrtc": int(target.is_described or has_nvrtc()),
        "arch": target.arch,
    }


def select_attention(impl: str, q: Tensor, k_cache: Tensor, num_rows: int) -> str:
    """`impl` if it can serve, or the best candidate's name if that is empty.

    Raises:
        ValueError: `impl` is unknown or cannot serve; says why.
    """
    target, traits = Target.of(q.device), attention_traits(q, k_cache, num_rows)
    return _selected(by_tokens(impl, num_rows), target, q.dtype, tuple(traits.items()))


@functools.lru_cache(maxsize=MAX_DECISIONS)
def _selected(
    impl: str, target: Target, dtype: torch.dtype, items: tuple[tuple[str, int], ...]
) -> str:
    """As `select_attention`; every layer of a step asks the same."""
    traits = dict(items)
    reasons = {c.name: c.rejection(target, dtype, traits) for c in _PAGED}
    if impl not in ("", *reasons):
        raise ValueError(f"attention: no implementation {impl}; there are {', '.join(reasons)}")
    if impl and reasons[impl] is not None:
        raise ValueError(f"attention: {impl} {reasons[impl]}")
    ranked = sorted(_PAGED, key=lambda c: -c.priority)
    return impl or next(c.name for c in ranked if reasons[c.name] is None)
