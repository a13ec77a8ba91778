"""Attention of whole prompts by what torch brings, as calls for the op bench.

None of them could stand in the engine's place: SDPA and the attention over sequences of any length
read the keys of the step itself, and FlexAttention's mask is made of blocks of 128 tokens, where a
page of the engine has 16 to 64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perf.qwen3_8b import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS

Call = Callable[[], Any]
FLEX_PAGE = 128  # a block of FlexAttention's mask


def _normal(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def sdpa(count: int, length: int, device: str = "cuda") -> Call:
    """Prompts of one length, [B, H, T, D], not paged; torch picks the kernel."""
    q = _normal(count, NUM_HEADS, length, HEAD_DIM, device=device)
    k, v = (_normal(count, NUM_KV_HEADS, length, HEAD_DIM, device=device) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(attend, q, k, v, is_causal=True, enable_gqa=True)


def varlen(count: int, length: int, device: str = "cuda") -> Call:
    """Prompts one behind the other, [T, H, D], not paged."""
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    has_gqa = "enable_gqa" in takes
    num_kv_heads = NUM_KV_HEADS if has_gqa else NUM_HEADS
    q = _normal(count * length, NUM_HEADS, HEAD_DIM, device=device)
    k, v = (_normal(count * length, num_kv_heads, HEAD_DIM, device=device) for _ in range(2))
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    options: dict[str, Any] = {"enable_gqa": True} if has_gqa else {}
    options |= {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    return partial(varlen_attn, q, k, v, starts, starts, length, length, **options)


def flex(count: int, length: int, device: str = "cuda", *, is_compiled: bool = True) -> Call:
    """Prompts over a paged cache, by FlexAttention's template and a mask of its pages."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def is_causal(_: Tensor, __: Tensor, q_place: Tensor, kv_place: Tensor) -> Tensor:
        return q_place >= kv_place

    num_pages = count * -(-length // FLEX_PAGE)
    pages = PagedAttention(num_pages, FLEX_PAGE, count, device=device)
    for row in range(count):
        places = (torch.tensor(n, device=device) for n in (row, length))
        pages.reserve(*places)
    rows = torch.arange(count, device=device)
    lengths = torch.full((count,), length, device=device)
    logical = create_block_mask(
        is_causal, count, None, length, length, device=device, BLOCK_SIZE=FLEX_PAGE
    )
    mask = pages.convert_logical_block_mask(logical, rows, lengths)
    q = _normal(count, NUM_HEADS, length, HEAD_DIM, device=device)
    shape = (1, NUM_KV_HEADS, num_pages * FLEX_PAGE, HEAD_DIM)
    k, v = (_normal(*shape, device=device) for _ in range(2))
    attend = torch.compile(flex_attention, dynamic=False) if is_compiled else flex_attention
    call = partial(attend, q, k, v, block_mask=mask, enable_gqa=True)
    call()  # compiled here, and not inside a capture
    return call
