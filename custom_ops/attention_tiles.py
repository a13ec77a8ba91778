"""Attention of query tiles: the many-token half of paged attention on the GPU.

A tile is up to `tile_tokens(...)` consecutive query tokens of one sequence, times all query heads.
The lists of tiles live on the device and the kernels are persistent, so one captured launch serves
any lists. Owns the choice between the two kernels and their launch arguments. Does not own the
tile lists (`attention_work`), nor sequences with a single query token, which the decode kernel
serves. Needs torch only; the kernels are imported when they are first launched.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.registry import Target
from compiled_engine.custom_ops.toolchain import gluon_reason

# rows of a tile's matrix: query tokens times the query heads folded into it
TILE_ROWS = 128
MAX_FOLDED_HEADS = 64
# tiles that are finished for one set of heads before the next set begins: their keys stay in L2
CHUNK = 128
LOG2E = 1.4426950408889634
HOPPER = Target("cuda", 90)
HOPPER_DIMS = (64, 128, 256)


def folded_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads of one kv head that share a tile: the largest power of two in the group size."""
    group = num_heads // num_kv_heads
    return min(group & -group, MAX_FOLDED_HEADS)


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Most query tokens of one tile, a power of two from 2 to 128.

    Args:
        num_heads: query heads.
        num_kv_heads: heads of the cache.
        head_dim: values of a head; does not change the result today.
    """
    del head_dim
    return TILE_ROWS // folded_heads(num_heads, num_kv_heads)


class TileWork(NamedTuple):
    """One call's arguments, as the kernels' launchers take them.

    Attributes:
        q: [T, H, D] bf16 or fp16; may be a view with a row stride.
        k_cache: [num_pages, page_size, H_kv, D] in q's dtype or float8_e4m3fn; the keys of this
            step are in it already.
        v_cache: like `k_cache`.
        block_table: [rows, P] int32, page ids.
        seq_rows: [S] int32, row of each sequence in the block table.
        seq_lens: [S] int32, tokens with KV after this step.
        query_start_loc: [S + 1] int32, prefix sum of this step's tokens.
        tile_seq: [N] int32, sequence of each tile; heaviest first gives the best balance.
        tile_start: [N] int32, first token of each tile (in 0..T); the tile ends after
            `tile_tokens(...)` tokens or with its sequence.
        num_tiles: [1] int32, how many of the N tiles exist.
        out: [T, H, D]; tokens of no tile keep what they hold.
        scale: factor of the scores.
        window: keys a token sees at most, its own included; 0 for all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; 0 for none.
        sinks: [H], a logit of each head that takes weight and has no value; or None.
        out_scale: fp32 [1], the scale of results, which are e4m3 then; or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    tile_seq: Tensor
    tile_start: Tensor
    num_tiles: Tensor
    out: Tensor
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None
    out_scale: Tensor | None = None

    @property
    def folded(self) -> int:
        """Query heads of one tile."""
        return folded_heads(self.q.shape[1], self.k_cache.shape[2])

    @property
    def num_groups(self) -> int:
        """Sets of `folded` heads."""
        return self.q.shape[1] // self.folded

    @property
    def factors(self) -> tuple[float, float, float]:
        """Factor of scores to base-2 exponents, factor into the soft cap's tanh, soft cap."""
        if self.soft_cap:
            return LOG2E, self.scale / self.soft_cap, self.soft_cap
        return self.scale * LOG2E, 0.0, 0.0


def hopper_rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why the Hopper kernel cannot serve these tensors; None if it can."""
    if q.device.type != "cuda" or Target.of(q.device) != HOPPER:
        return "needs compute capability 9.0"
    if (reason := gluon_reason()) is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}, not bfloat16 or float16"
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        return f"the cache is {k_cache.dtype}, the queries are {q.dtype}"
    head_dim, page_size = q.shape[2], k_cache.shape[1]
    if head_dim not in HOPPER_DIMS:
        return f"head_dim {head_dim} is not one of {HOPPER_DIMS}"
    if page_size not in (16, 32, 64):
        return f"page_size {page_size} is not 16, 32 or 64"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous() or cache.data_ptr() % 16:
            return f"{name} is not contiguous or not aligned to 16 bytes"
    if q.stride(2) != 1 or q.stride(1) % 8 or q.stride(0) % 8 or q.data_ptr() % 16:
        return "the rows of q are not contiguous or not aligned to 16 bytes"
    return None


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs of a persistent launch: one a multiprocessor, two where there is no GPU."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(work: TileWork) -> None:
    heads, kv_heads = work.q.shape[1], work.k_cache.shape[2]
    assert heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} kv heads"
    assert work.out.shape == work.q.shape, f"out is {work.out.shape}, q {work.q.shape}"
    for rows in (work.q, work.out):
        assert rows.stride(2) == 1, "the last dim of q and out must be contiguous"
    for cache in (work.k_cache, work.v_cache):
        assert cache.stride() == work.k_cache.stride(), "k_cache and v_cache differ in strides"
        assert cache.stride(3) == 1, "the last dim of the cache must be contiguous"
    assert work.block_table.stride(1) == 1, "rows of the block table must be contiguous"
    for indices in (work.seq_rows, work.seq_lens, work.query_start_loc, work.tile_seq):
        assert indices.dtype == torch.int32, f"indices are {indices.dtype}, not int32"


def prefill_attention(work: TileWork) -> None:
    """Attention of the tiles' tokens over the paged cache, written into `work.out`.

    Token `query_start_loc[s] + j` of sequence s has position `seq_lens[s] - n + j`, n its tokens in
    this step, and sees the keys up to its own.
    """
    if work.tile_seq.shape[0] == 0 or work.q.shape[0] == 0:
        return
    _check(work)
    if hopper_rejects(work.q, work.k_cache, work.v_cache) is None:
        from compiled_engine.custom_ops.attention_tiles_hopper import launch_hopper

        launch_hopper(work)
    else:
        from compiled_engine.custom_ops.attention_tiles_portable import launch_portable

        launch_portable(work)
