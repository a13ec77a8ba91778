"""Random steps for paged attention: rows with pages of their own and with common prefixes.

Pages of nobody, slots past a row's length, and padding hold NaN, so a kernel that reads what it
must not shows it. The oracle is token by token, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_work import StepIndices

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Row:
    """A sequence of a step: its query tokens, tokens with KV after the step, and prefix.

    Rows with the same `prefix` name share their first `shared` pages, as far as these were full
    before the step.
    """

    queries: int
    length: int
    prefix: int = -1
    shared: int = 0


@dataclass(frozen=True)
class CaseShape:
    """Sizes and types of a case."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    num_padding: int = 2
    num_unused: int = 2  # places for sequences that no row takes


@dataclass
class PagedCase:
    """Tensors of one call."""

    shape: CaseShape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    step: StepIndices
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    num_real: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_real = int(self.step.query_start_loc[-1])

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def arguments(self, work: Tensor, *, is_decode: bool, kernel: str = "") -> tuple[object, ...]:
        """Of the `paged_attention` op."""
        table, token_rows, positions, seq_rows, seq_lens, starts = self.step
        tensors = (self.q, self.k_cache, self.v_cache, table, seq_rows, seq_lens, starts)
        options = (self.window, self.soft_cap, self.sinks, is_decode, kernel)
        return (*tensors, token_rows, positions, work, self.scale, *options)

    def work_arguments(self, *, is_decode: bool) -> tuple[object, ...]:
        """Of the `attention_work` op."""
        shape = self.shape
        return (*self.step, shape.page_size, shape.num_heads, shape.num_kv_heads, is_decode)

    def new_kv(self) -> list[Tensor]:
        """Views of the caches that the step itself writes: keys and values of its tokens."""
        table, rows, positions, *_ = self.step
        views = []
        for row, position in zip(rows[: self.num_real].tolist(), positions.tolist(), strict=False):
            page, offset = divmod(position, self.shape.page_size)
            page = int(table[row, page])
            views += [cache[page, offset] for cache in (self.k_cache, self.v_cache)]
        return views

    def oracle(self) -> Tensor:
        """The result in float64; padding is 0."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        table, rows, positions, *_ = self.step
        size = self.shape.page_size
        group = self.shape.num_heads // self.shape.num_kv_heads
        for token in range(self.num_real):
            last = int(positions[token])
            first = max(0, last + 1 - self.window) if self.window else 0
            at = torch.arange(first, last + 1, device=self.q.device)
            page = table[int(rows[token])].long()[at // size]
            k, v = (_rows_of(cache, page, at % size) for cache in (self.k_cache, self.v_cache))
            q = self.q[token].double().unflatten(0, (-1, group)) * self.scale
            scores = torch.einsum("hgd,lhd->hgl", q, k)
            if self.soft_cap:
                scores = self.soft_cap * (scores / self.soft_cap).tanh()
            if self.sinks is not None:
                sinks = self.sinks.double().reshape(-1, group, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(at)]
            out[token] = torch.einsum("hgl,lhd->hgd", weights, v).flatten(0, 1)
        return out


def _rows_of(cache: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    if cache.dtype == FP8:
        return cache.view(torch.uint8)[page, offset].view(FP8).double()
    return cache[page, offset].double()


def make_case(
    rows: Sequence[Row],
    shape: CaseShape,
    *,
    device: str = "cpu",
    num_extra_pages: int = 1,
) -> PagedCase:
    """A step of `rows`, in block-table rows and pages of random order."""
    size, num_seqs = shape.page_size, len(rows) + shape.num_unused
    needed = [-(-row.length // size) for row in rows]
    pool = (torch.randperm(sum(needed) + num_extra_pages) + 1).tolist()
    table = torch.zeros(num_seqs + 1, max([1, *needed]) + 1, dtype=torch.int32)
    places = torch.randperm(num_seqs)[: len(rows)].tolist()
    prefixes: dict[int, list[int]] = {}
    token_rows: list[int] = []
    positions: list[int] = []
    starts = [0]
    cache_shape = (len(pool) + 1, size, shape.num_kv_heads, shape.head_dim)
    caches = torch.full((2, *cache_shape), float("nan"))
    for row, place, count in zip(rows, places, needed, strict=True):
        prefix = prefixes.setdefault(row.prefix, []) if row.prefix >= 0 else []
        shared = min(row.shared, (row.length - row.queries) // size)
        while len(prefix) < shared and row.prefix >= 0:
            prefix.append(pool.pop())
        common = prefix[:shared]
        pages = common + [pool.pop() for _ in range(count - len(common))]
        table[place, :count] = torch.tensor(pages, dtype=torch.int32)
        for i, page in enumerate(pages):
            filled = min(size, row.length - i * size)
            new = torch.randn(2, filled, *cache_shape[2:])
            old = caches[:, page, :filled]
            caches[:, page, :filled] = torch.where(old.isnan(), new, old)
        starts.append(starts[-1] + row.queries)
        token_rows += [place] * row.queries
        positions += range(row.length - row.queries, row.length)
    padding = shape.num_padding
    step = StepIndices(
        table,
        torch.tensor(token_rows + [num_seqs] * padding, dtype=torch.int64),
        torch.tensor(positions + [0] * padding, dtype=torch.int64),
        torch.tensor(places + [num_seqs] * shape.num_unused, dtype=torch.int32),
        torch.tensor([row.length for row in rows] + [0] * shape.num_unused, dtype=torch.int32),
        torch.tensor(starts + [starts[-1]] * shape.num_unused, dtype=torch.int32),
    )
    q = torch.randn(len(token_rows) + padding, shape.num_heads, shape.head_dim)
    q[len(token_rows) :] = float("nan")
    k, v = caches.to(shape.cache_dtype or shape.dtype).to(device)
    moved = StepIndices(*(tensor.to(device) for tensor in step))
    return PagedCase(shape, q.to(shape.dtype).to(device), k, v, moved)
