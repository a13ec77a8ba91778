"""Contract of attention over the paged KV cache, and the CPU launcher.

`attention` is what models call: without a context it is plain causal attention of one full
sequence; with one it is the paged op over the flattened rows of a step.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import CPU_DTYPES, LIBRARY, define_op


class PagedContext(NamedTuple):
    """What attention of one step needs to know, the same for every layer.

    Shapes: T tokens, S sequences, P pages a row at most.
    """

    # [T] int64, slot each new token is written to; -1 is padding
    slot_mapping: Tensor
    # [max_rows + 1, P] int32, page ids of every row
    block_table: Tensor
    # [S] int32, row of each sequence of this step
    seq_rows: Tensor
    # [S] int32, tokens whose KV exists after this step; 0 for unused places
    seq_lens: Tensor
    # [S + 1] int32, prefix sum of this step's query lengths
    query_start_loc: Tensor


class LayerCache(NamedTuple):
    """KV pages of one layer: both [num_pages, page_size, num_kv_heads, head_dim]."""

    k_cache: Tensor
    v_cache: Tensor


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for heads, kv_heads, dim, page_size in ((4, 2, 64, 4), (3, 1, 20, 2), (8, 8, 128, 16)):
        pages = torch.arange(1, 13, dtype=torch.int32, device=device).view(3, 4)
        cache = torch.randn(2, 13, page_size, kv_heads, dim, generator=generator, device=device).to(
            dtype
        )
        lens = torch.tensor([4 * page_size, page_size + 1, 0], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 3, 4, 4], dtype=torch.int32, device=device)
        q = torch.randn(6, heads, dim, generator=generator, device=device).to(dtype)
        rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        made.append((q, cache[0], cache[1], pages, rows, lens, starts, dim**-0.5))
    q, k_cache, v_cache, pages, rows, lens, starts, scale = made[0]
    made.append((q[:0], k_cache, v_cache, pages, rows, lens * 0, starts * 0, scale))
    return made


PAGED_ATTENTION = define_op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_rows, Tensor seq_lens, Tensor query_start_loc, float scale) -> Tensor",
    reference=reference.paged_attention,
    fake=lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format),
    example_inputs=_examples,
    is_expandable=False,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("paged_attention_cpu.cpp").ce_paged_attention
    function.restype = None
    function.argtypes = (
        [ctypes.c_int32] + [ctypes.c_void_p] * 8 + [ctypes.c_int64] * 6 + [ctypes.c_float]
    )
    return function


def paged_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """The C++ kernel; arguments and result as `reference.paged_attention`.

    Cost follows the sum of the sequence lengths. Accumulates in fp32.
    """
    q = q.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    for cache in (k_cache, v_cache):
        assert cache.is_contiguous(), "the KV cache must be contiguous"
        assert cache.dtype == q.dtype, f"q is {q.dtype}, the KV cache {cache.dtype}"
    for indices in (block_table, seq_rows, seq_lens, query_start_loc):
        assert indices.dtype == torch.int32, f"indices are {indices.dtype}, not int32"
        assert indices.is_contiguous(), "index tensors must be contiguous"
    _cpu_kernel()(
        CPU_DTYPES[q.dtype],
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        seq_rows.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        out.data_ptr(),
        num_heads,
        k_cache.shape[2],
        head_dim,
        k_cache.shape[1],
        block_table.shape[1],
        seq_rows.shape[0],
        scale,
    )
    return out


LIBRARY.impl("paged_attention", paged_attention_cpu, "CPU")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache | None,
    ctx: PagedContext | None,
    scale: float,
) -> Tensor:
    """Causal attention of q [T, H, D] over k, v [T, H_kv, D] or over the paged cache.

    With a context the keys and values of this step are in the cache already (`kv_write`), and `k`,
    `v` are not read.
    """
    if ctx is None or cache is None:
        return reference.causal_attention(q, k, v, scale)
    return torch.ops.ce.paged_attention.default(
        q,
        cache.k_cache,
        cache.v_cache,
        ctx.block_table,
        ctx.seq_rows,
        ctx.seq_lens,
        ctx.query_start_loc,
        scale,
    )
