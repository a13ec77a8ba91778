"""Launcher of paged attention on a GPU: the decode kernels, and the tile kernel for longer queries.

Owns the Triton decode kernels' launch settings and their scratch for partial results. The kernels
are in `attention_decode_kernels`, `attention_decode_cuda` and `attention_tiles`; what they work on
comes from `attention_work`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.attention_choice import FP8_ARCH, select_attention
from compiled_engine.custom_ops.attention_decode_cuda import CudaDecode, Options
from compiled_engine.custom_ops.attention_decode_kernels import (
    DecodeConfig,
    merge_kernel,
    split_kernel,
)
from compiled_engine.custom_ops.attention_work import (
    Header,
    Heads,
    WorkShape,
    known_work_shape,
    num_lanes,
)
from compiled_engine.custom_ops.reference_quant import split_attention_quant
from compiled_engine.custom_ops.registry import Target
from compiled_engine.custom_ops.triton_common import has_pdl, is_interpreted


@dataclass(frozen=True)
class Tuning:
    """Launch settings of the decode kernels; None: what fits the size of a KV entry.

    Attributes:
        block: KV positions of a step of the inner loop.
        stages: of its software pipeline.
        group_stages: of the pipeline over a shared prefix.
        warps: of a split program.
        registers: most a thread of it may use, so that more programs fit.
        merge_block: partial results combined at a time.
        merge_warps: of a merge program.
        has_prefetch: whether the first positions are asked for in L2 before the wait.
        is_early: whether the next kernel may be placed before this one has waited.
    """

    block: int | None = None
    stages: int = 3
    group_stages: int = 2
    warps: int = 4
    registers: int | None = None
    merge_block: int = 16
    merge_warps: int = 4
    has_prefetch: bool = True
    is_early: bool = True

    def block_for(self, entry_bytes: int) -> int:
        """Positions of one head of `entry_bytes` bytes that keep a stage within 32 KiB."""
        if self.block is not None:
            return self.block
        return max(16, min(64, 16384 // entry_bytes))


def _power_of_two(value: int, least: int = 1) -> int:
    return max(least, int(triton.next_power_of_2(value)))


def decode_config(
    q: Tensor, k_cache: Tensor, shape: WorkShape, options: Options, tuning: Tuning
) -> DecodeConfig:
    """What the decode kernels are compiled for in a call."""
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group, width = num_heads // num_kv_heads, shape.members_per_tile
    padded_dim, starts = _power_of_two(head_dim), shape.starts
    pdl = has_pdl(q.device)
    block = tuning.block_for(padded_dim * max(k_cache.element_size(), q.element_size()))
    return DecodeConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        padded_dim=padded_dim,
        page_size=page_size,
        rows=_power_of_two(group, 16),
        width=width,
        group_rows=_power_of_two(width * group, 16),
        lanes=starts["lanes"],
        units=starts["units"],
        has_groups=shape.max_group_units > 0,
        has_window=options.window > 0,
        has_cap=options.soft_cap > 0,
        has_sinks=options.sinks is not None,
        block=block,
        stages=tuning.stages,
        group_stages=tuning.group_stages,
        prefetch=block if pdl and tuning.has_prefetch else 0,
        merge_block=tuning.merge_block,
        value_bytes=k_cache.element_size(),
        early=tuning.is_early,
        pdl=pdl,
        is_quantized=options.out_scale is not None,
        round_first=is_interpreted(),
    )


class DecodeCall:
    """One call of the decode kernels, with its scratch; `split` and `merge` may be timed apart.

    Args:
        q: [T, H, D], last dim contiguous.
        caches: k and v [num_pages, page_size, H_kv, D], contiguous.
        block_table: [rows, max_pages_per_row] int32.
        positions: [T].
        work: the work list of `shape`.
        shape: its sizes.
        options: how scores are made.
        tuning: launch settings.
    """

    def __init__(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        block_table: Tensor,
        positions: Tensor,
        work: Tensor,
        shape: WorkShape,
        options: Options,
        *,
        tuning: Tuning | None = None,
    ) -> None:
        self.tuning = tuning or Tuning()
        self.q = q
        self.caches = caches
        self.block_table = block_table
        self.positions = positions
        self.work = work
        self.shape = shape
        self.options = options
        self.config = decode_config(q, caches[0], shape, options, self.tuning)
        rows, heads, head_dim = shape.num_partial_rows, *q.shape[1:]
        self.partials = torch.empty(rows, heads, head_dim, dtype=torch.float32, device=q.device)
        self.sums = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        self._launch: dict[str, int] = {"launch_pdl": True} if self.config.pdl else {}

    def _sinks(self) -> Tensor:
        return self.sums if self.options.sinks is None else self.options.sinks

    def _out_scale(self) -> Tensor:
        return self.sums if self.options.out_scale is None else self.options.out_scale

    def launch(self, out: Tensor) -> None:
        """Writes the results of all candidates into `out`, and 0 for padding tokens."""
        self.split(out)
        self.merge(out)

    def split(self, out: Tensor) -> None:
        """Writes the partial results, and those of `out` that are final."""
        grid = (self.shape.num_lanes * self.config.num_kv_heads,)
        split_kernel[grid](
            self.q,
            *self.caches,
            self.block_table,
            self.work,
            self.positions,
            out,
            self.partials,
            self.sums,
            self._sinks(),
            self._out_scale(),
            float(self.options.scale),
            float(self.options.soft_cap),
            self.options.window,
            self.block_table.stride(0),
            self.q.stride(0),
            self.q.stride(1),
            self.shape.starts["members"],
            self.config,
            num_warps=self.tuning.warps,
            maxnreg=self.tuning.registers,
            **self._launch,
        )

    def merge(self, out: Tensor) -> None:
        """Writes the other results into `out`, and 0 for padding tokens."""
        count = self.shape.num_candidates
        merge_kernel[(count * self.config.num_heads,)](
            self.work,
            self.partials,
            self.sums,
            self._sinks(),
            out,
            self._out_scale(),
            self.q,
            self.shape.starts["merges"],
            count,
            self.q.shape[0],
            self.config,
            num_warps=self.tuning.merge_warps,
            **self._launch,
        )


class PagedCall(NamedTuple):
    """Arguments of `paged_attention`, in the order of the op."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    token_rows: Tensor
    positions: Tensor
    work: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    is_decode: bool = False
    impl: str = ""

    @property
    def kernel(self) -> str:
        """Which implementation serves it."""
        candidates = self.q.shape[0] if self.is_decode else self.seq_rows.shape[0]
        return select_attention(self.impl, self.q, self.k_cache, candidates)


def paged_attention_cuda(*arguments: Any, **options: Any) -> Tensor:
    """The GPU's kernels; arguments (`PagedCall`) and result as `reference.paged_attention`.

    Every token (`is_decode`), or every sequence with one query token, goes to a decode kernel, in
    CUDA C++ or Triton; longer queries go to the tile kernel. Both are launched always, so that one
    captured graph serves any plan. What they cannot serve goes to the reference (`attention_choice`
    has the reasons).

    Raises:
        ValueError: no such implementation, or the one asked for cannot serve the call.
    """
    call = PagedCall(*arguments, **options)
    name = call.kernel
    return reference.paged_attention(*call) if name == "torch" else _launch(call, name)


def paged_attention_quant_cuda(*arguments: Any, **options: Any) -> Tensor:
    """As `reference_quant.paged_attention_quant`; the scale comes behind the factor of scores.

    The kernels of `paged_attention_cuda` write e4m3 themselves. Where they cannot serve, results
    are quantised by a kernel of its own.

    Raises:
        ValueError: as `paged_attention_cuda`.
    """
    attended, static_scale = split_attention_quant(arguments)
    call = PagedCall(*attended, **options)
    name = call.kernel
    if name != "torch" and Target.of(call.q.device).arch >= FP8_ARCH:
        return _launch(call, name, static_scale).flatten(1)
    out = paged_attention_cuda(*call).flatten(1)
    return torch.ops.ce.quantize_fp8.default(out, "tensor", static_scale)[0]


def _launch(call: PagedCall, name: str, out_scale: Tensor | None = None) -> Tensor:
    """Runs a kernel; results [T, H, D] in the dtype of q, or in e4m3 with a scale."""
    q, is_decode = call.q, call.is_decode
    q = q if q.stride(-1) == 1 else q.contiguous()
    dtype = q.dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    caches = (call.k_cache, call.v_cache)
    for cache in caches:
        assert cache.is_contiguous(), "the KV cache must be contiguous"
    heads = Heads(q.shape[1], call.k_cache.shape[2])
    lanes, counts = num_lanes(q.device, heads.num_kv_heads), (q.shape[0], call.seq_rows.shape[0])
    shape = known_work_shape(lanes, heads, *counts, is_decode=is_decode)
    shape.check(call.work)
    options = Options(call.scale, call.window, call.soft_cap, call.sinks, out_scale)
    given = (q, caches, call.block_table, call.positions, call.work, shape, options)
    if name == "cuda":
        CudaDecode(*given).launch(out)
    else:
        DecodeCall(*given).launch(out)
    if not is_decode:
        from compiled_engine.custom_ops.attention_tiles import TileWork, prefill_attention

        step = (call.block_table, call.seq_rows, call.seq_lens, call.query_start_loc)
        seqs, starts = (shape.region(call.work, name) for name in ("tile_seq", "tile_start"))
        header = shape.region(call.work, "header")
        tiles = (seqs, starts, header[Header.NUM_QUERY_TILES : Header.NUM_QUERY_TILES + 1], out)
        scores = (call.scale, call.window, call.soft_cap, call.sinks, out_scale)
        prefill_attention(TileWork(q, *caches, *step, *tiles, *scores))  # type: ignore[arg-type]
    return out
