"""Contract of attention over the paged KV cache, and the CPU launcher.

`attention` is what models call: without a context it is plain causal attention of one full
sequence; with one it is the paged op over the flattened rows of a step. `attention_work` makes the
device-side work list that every layer's attention reads on a GPU, once a step.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference, reference_quant
from compiled_engine.custom_ops.attention_choice import select_attention
from compiled_engine.custom_ops.attention_work import Heads, num_lanes, work_shape
from compiled_engine.custom_ops.attention_work_spec import reference_work
from compiled_engine.custom_ops.library import CPU_DTYPES, LIBRARY, define_op

_E4M3 = torch.float8_e4m3fn


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
    # [T] int64, row of each token; any row for padding
    token_rows: Tensor
    # [T] int64, position of each token in its row
    positions: Tensor
    # int32, what `attention_work` made of the above; empty on the CPU
    work: Tensor


class LayerCache(NamedTuple):
    """KV pages of one layer: both [num_pages, page_size, num_kv_heads, head_dim]."""

    k_cache: Tensor
    v_cache: Tensor


def _example_indices(page_size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Block table, sequences and tokens of a step of 4 tokens and 2 padding tokens."""

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    full = 4 * page_size
    return (
        torch.arange(1, 13, dtype=torch.int32, device=device).view(3, 4),
        ints(2, 0, 1),
        ints(full, page_size + 1, 0),
        ints(0, 3, 4, 4),
        ints(2, 2, 2, 0, 0, 0, dtype=torch.int64),
        ints(full - 3, full - 2, full - 1, page_size, 0, 0, dtype=torch.int64),
    )


def _no_tokens(indices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same rows in a step without tokens."""
    table, rows, lens, starts, token_rows, positions = indices
    return table, rows, lens * 0, starts * 0, token_rows[:0], positions[:0]


def _work_arguments(indices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The order of `attention_work`."""
    table, rows, lens, starts, token_rows, positions = indices
    return table, token_rows, positions, rows, lens, starts


def _work_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    del dtype, seed  # the work list is made of indices alone
    indices = _example_indices(16, device)
    empty = _work_arguments(_no_tokens(indices))
    made: list[tuple[Any, ...]] = []
    for is_decode in (False, True):
        last = (16, 4, 2, is_decode)
        made += [(*_work_arguments(indices), *last), (*empty, *last)]
    made.append((empty[0][:0], *empty[1:], 16, 4, 2, True))
    return made


def _work_fake(
    block_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    seq_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    is_decode: bool,
) -> Tensor:
    del positions, seq_lens, query_start_loc, page_size
    if block_table.device.type != "cuda":
        return block_table.new_empty(0)
    shape = work_shape(
        num_lanes(block_table.device, num_kv_heads),
        Heads(num_heads, num_kv_heads),
        token_rows.shape[0],
        seq_rows.shape[0],
        is_decode=is_decode,
    )
    return block_table.new_empty(shape.total_size)


def _examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    made: list[tuple[Any, ...]] = []
    for heads, kv_heads, dim, page_size in ((4, 2, 64, 16), (3, 1, 20, 2), (8, 8, 128, 16)):
        indices = _example_indices(page_size, device)
        cache, q = random(2, 13, page_size, kv_heads, dim), random(6, heads, dim)
        for is_decode in (False, True):
            last = (page_size, heads, kv_heads, is_decode)
            work = torch.ops.ce.attention_work.default(*_work_arguments(indices), *last)
            made.append((q, cache[0], cache[1], *indices, work, dim**-0.5))
            made[-1] += (0, 0.0, None, is_decode, "")
    q, k_cache, v_cache, *_, work, scale, _, _, _, _, _ = made[0]
    indices, caches = _example_indices(16, device), (k_cache, v_cache)
    made.append((q, *caches, *indices, work, scale, 5, 2.0, random(4).float(), False, ""))
    indices = _no_tokens(indices)
    work = torch.ops.ce.attention_work.default(*_work_arguments(indices), 16, 4, 2, False)
    made.append((q[:0], *caches, *indices, work, scale, 0, 0.0, None, False, ""))
    return made


def _quant_examples(dtype: torch.dtype, device: torch.device, seed: int) -> list[tuple[Any, ...]]:
    """Some of those of `paged_attention`: both kinds of step, all options, no tokens."""
    static_scale = torch.full((1,), 0.01, device=device)
    chosen = _examples(dtype, device, seed)
    return [(*a[:11], static_scale, *a[11:]) for a in (*chosen[:2], *chosen[-2:])]


ATTENTION_WORK = define_op(
    "attention_work(Tensor block_table, Tensor token_rows, Tensor positions, Tensor seq_rows, "
    "Tensor seq_lens, Tensor query_start_loc, int page_size, int num_heads, int num_kv_heads, "
    "bool is_decode) -> Tensor",
    reference=reference_work,
    fake=_work_fake,
    example_inputs=_work_examples,
    is_expandable=False,
)
PAGED_ATTENTION = define_op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_rows, Tensor seq_lens, Tensor query_start_loc, Tensor token_rows, "
    "Tensor positions, Tensor work, float scale, int window=0, float soft_cap=0.0, "
    'Tensor? sinks=None, bool is_decode=False, str impl="") -> Tensor',
    reference=reference.paged_attention,
    fake=lambda q, *_, **__: torch.empty_like(q, memory_format=torch.contiguous_format),
    example_inputs=_examples,
    is_expandable=False,
)
PAGED_ATTENTION_QUANT = define_op(
    "paged_attention_quant(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seq_rows, Tensor seq_lens, Tensor query_start_loc, Tensor token_rows, "
    "Tensor positions, Tensor work, float scale, Tensor static_scale, int window=0, "
    'float soft_cap=0.0, Tensor? sinks=None, bool is_decode=False, str impl="") -> Tensor',
    reference=reference_quant.paged_attention_quant,
    fake=lambda q, *_, **__: q.new_empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=_E4M3),
    example_inputs=_quant_examples,
    is_expandable=False,
)


@functools.cache
def _cpu_kernel() -> Any:
    from compiled_engine.custom_ops.cpp_build import load_cpp_library

    function = load_cpp_library("paged_attention_cpu.cpp").ce_paged_attention
    function.restype = None
    function.argtypes = (
        [ctypes.c_int32] + [ctypes.c_void_p] * 9 + [ctypes.c_int64] * 7 + [ctypes.c_float] * 2
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
    token_rows: Tensor,
    positions: Tensor,
    work: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    is_decode: bool = False,
    impl: str = "",
) -> Tensor:
    """The C++ kernel; arguments and result as `reference.paged_attention`.

    Cost follows the sum of the sequence lengths. Accumulates in fp32. A cache of another dtype than
    the queries' goes to the reference.

    Raises:
        ValueError: no such implementation, or the one asked for cannot serve the call.
    """
    step = (block_table, seq_rows, seq_lens, query_start_loc)
    num_rows = q.shape[0] if is_decode else seq_rows.shape[0]
    if select_attention(impl, q, k_cache, num_rows) == "torch":
        arguments = (q, k_cache, v_cache, *step, token_rows, positions, work, scale)
        return reference.paged_attention(*arguments, window, soft_cap, sinks)
    q = q.contiguous()
    num_tokens, num_heads, head_dim = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    for cache in (k_cache, v_cache):
        assert cache.is_contiguous(), "the KV cache must be contiguous"
        assert cache.dtype == q.dtype, f"q is {q.dtype}, the KV cache {cache.dtype}"
    for indices in step:
        assert indices.dtype == torch.int32, f"indices are {indices.dtype}, not int32"
        assert indices.is_contiguous(), "index tensors must be contiguous"
    if sinks is not None:
        sinks = sinks.float().contiguous()
        assert sinks.shape == (num_heads,), f"sinks are {tuple(sinks.shape)}, not ({num_heads},)"
    _cpu_kernel()(
        CPU_DTYPES[q.dtype],
        *(tensor.data_ptr() for tensor in (q, k_cache, v_cache, *step, out)),
        None if sinks is None else sinks.data_ptr(),
        num_heads,
        *(k_cache.shape[2], head_dim, k_cache.shape[1], block_table.shape[1], seq_rows.shape[0]),
        window,
        scale,
        soft_cap,
    )
    return out


def _attention_quant_cpu(*arguments: Any, **options: Any) -> Tensor:
    attended, static_scale = reference_quant.split_attention_quant(arguments)
    out = paged_attention_cpu(*attended, **options).flatten(1)
    return reference_quant.quantize_fp8(out, "tensor", static_scale)[0]


LIBRARY.impl("paged_attention", paged_attention_cpu, "CPU")
LIBRARY.impl("paged_attention_quant", _attention_quant_cpu, "CPU")


def _work_cuda(*arguments: Any, **options: Any) -> Tensor:
    from compiled_engine.custom_ops.attention_work_triton import attention_work_cuda

    return attention_work_cuda(*arguments, **options)


def _attention_cuda(*arguments: Any, **options: Any) -> Tensor:
    from compiled_engine.custom_ops.attention_decode import paged_attention_cuda

    return paged_attention_cuda(*arguments, **options)


LIBRARY.impl("attention_work", _work_cuda, "CUDA")


def _attention_quant_cuda(*arguments: Any, **options: Any) -> Tensor:
    from compiled_engine.custom_ops.attention_decode import paged_attention_quant_cuda

    return paged_attention_quant_cuda(*arguments, **options)


LIBRARY.impl("paged_attention", _attention_cuda, "CUDA")
LIBRARY.impl("paged_attention_quant", _attention_quant_cuda, "CUDA")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache | None,
    ctx: PagedContext | None,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, H, D] over k, v [T, H_kv, D] or over the paged cache.

    With a context the keys and values of this step are in the cache already (`kv_write`), and `k`,
    `v` are not read. The options are those of `reference.paged_attention`.
    """
    if ctx is None or cache is None:
        return reference.causal_attention(q, k, v, scale, window, soft_cap, sinks)
    return torch.ops.ce.paged_attention.default(
        q,
        cache.k_cache,
        cache.v_cache,
        ctx.block_table,
        ctx.seq_rows,
        ctx.seq_lens,
        ctx.query_start_loc,
        ctx.token_rows,
        ctx.positions,
        ctx.work,
        scale,
        window,
        soft_cap,
        sinks,
    )
