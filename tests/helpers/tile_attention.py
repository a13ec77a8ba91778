"""Steps for the tile kernels: paged inputs, their tile lists, and a float64 oracle.

Run as a program with `TRITON_INTERPRET=1` (`run_interpreted` of `interpreted.py`) it checks the
portable kernel on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_engine.custom_ops.attention_tiles import TileWork, prefill_attention, tile_tokens
from compiled_engine.custom_ops.reference_quant import quantize_fp8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. `sequences` are (query tokens, tokens after the step)."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 1)
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None


class TileStep:
    """Inputs of a case over shuffled pages; slots that no token fills hold NaN.

    Queries are a strided view, tokens of no tile and the rows past the last token are padding.
    """

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        self.case = case
        heads, kv_heads = case.heads
        lengths = [after for _, after in case.sequences]
        pages = [-(-n // case.page_size) for n in lengths]
        num_pages = sum(pages) + 2
        shape = (num_pages, case.page_size, kv_heads, case.head_dim)
        cache = torch.randn(2, *shape, generator=make)
        if (case.cache_dtype or case.dtype) != case.dtype:
            cache = cache.to(case.cache_dtype).float()
        order = (torch.randperm(num_pages - 1, generator=make) + 1).tolist()
        table = torch.full((len(pages) + 1, max(pages) + 1), 0x7FFF0000, dtype=torch.int32)
        rows = torch.randperm(len(pages), generator=make)
        filled = torch.zeros(num_pages, case.page_size, dtype=torch.bool)
        for row, length, count in zip(rows.tolist(), lengths, pages, strict=True):
            mine = [order.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            at = torch.arange(length)
            filled[torch.tensor(mine)[at // case.page_size], at % case.page_size] = True
        cache[:, ~filled] = float("nan")
        starts = [0]
        for queries, _ in case.sequences:
            starts.append(starts[-1] + queries)
        tokens = starts[-1] + 3
        q = torch.randn(tokens, heads + 2, case.head_dim, generator=make)
        sinks = torch.randn(heads, generator=make) if case.has_sinks else None
        self.q = q.to(device, case.dtype)[:, 1:-1]
        cache = cache.to(device, case.cache_dtype or case.dtype)
        self.k_cache, self.v_cache = cache[0], cache[1]
        self.table = table.to(device)
        self.rows = rows.to(device, torch.int32)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.sinks = None if sinks is None else sinks.to(device, case.dtype)
        self.scale = case.head_dim**-0.5 * (4 if case.soft_cap else 1)
        self.tiles = self._tiles(device)

    def _tiles(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence and first token of each tile, heaviest first, with unused places behind."""
        case, size = self.case, tile_tokens(*self.case.heads, self.case.head_dim)
        found = []
        begin = 0
        for index, (queries, after) in enumerate(case.sequences):
            for offset in range(0, queries if queries > 1 else 0, size):
                last = after - queries + min(offset + size, queries)
                found.append((-last, index, begin + offset))
            begin += queries
        found.sort()
        unused = [1 << 30] * 3
        seqs = torch.tensor([t[1] for t in found] + unused, dtype=torch.int32, device=device)
        firsts = torch.tensor([t[2] for t in found] + unused, dtype=torch.int32, device=device)
        return seqs, firsts, torch.tensor([len(found)], dtype=torch.int32, device=device)

    def run(self, out_scale: Tensor | None = None) -> Tensor:
        """The kernel's output over a buffer of NaN; in e4m3 with a scale."""
        dtype = self.q.dtype if out_scale is None else torch.float8_e4m3fn
        out = torch.full(self.q.shape, float("nan"), device=self.q.device).to(dtype)
        work = TileWork(
            self.q, self.k_cache, self.v_cache, self.table, self.rows, self.lens, self.starts,
            *self.tiles, out, self.scale, self.case.window, self.case.soft_cap, self.sinks,
            out_scale,
        )  # fmt: skip
        prefill_attention(work)
        return out

    def oracle(self) -> Tensor:
        """Float64, NaN where no tile writes: single queries and padding."""
        out = torch.full(self.q.shape, float("nan"), dtype=torch.float64)
        begin = 0
        for index, (queries, after) in enumerate(self.case.sequences):
            if queries > 1:
                out[begin : begin + queries] = self._sequence(index, begin, queries, after)
            begin += queries
        return out

    def _sequence(self, index: int, begin: int, queries: int, after: int) -> Tensor:
        case = self.case
        group = case.heads[0] // case.heads[1]
        at = torch.arange(after)
        pages = self.table[int(self.rows[index])].cpu().long()
        keys, values = (
            cache.cpu().float()[pages[at // case.page_size], at % case.page_size]
            .double().repeat_interleave(group, 1)
            for cache in (self.k_cache, self.v_cache)
        )  # fmt: skip
        q = self.q[begin : begin + queries].cpu().double()
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        if case.soft_cap:
            scores = case.soft_cap * (scores / case.soft_cap).tanh()
        position = torch.arange(after - queries, after)[:, None]
        hidden = at > position
        if case.window:
            hidden |= at <= position - case.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.cpu().double()[:, None, None].expand(-1, queries, 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


def quantized_difference(step: TileStep) -> int:
    """How many results in e4m3 are not those in the dtype of q, quantised; some are too large."""
    static_scale = torch.tensor([1.0 / 300], device=step.q.device)
    got, plain = step.run(static_scale), step.run()
    expected = quantize_fp8(plain.flatten(1), "tensor", static_scale)[0].view(plain.shape)
    mine, theirs = got.cpu().float(), expected.cpu().float()
    return int((mine.nan_to_num(1e9) != theirs.nan_to_num(1e9)).sum())


def relative_error(step: TileStep) -> float:
    """Norm of the error over the norm of the result; infinite if the wrong tokens are written."""
    got, expected = step.run().cpu().double(), step.oracle()
    written = ~expected.isnan()
    if not torch.equal(~got.isnan(), written):
        return float("inf")
    return float((got[written] - expected[written]).norm() / expected[written].norm())


# Sums over rounded weights: about one unit in the last place of the dtype.
LIMITS = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}

# The interpreter multiplies the bit patterns of bf16: fp16 and fp32 only.
INTERPRETED = (
    Case(name="odd lengths", sequences=((37, 70), (1, 9), (5, 5)), dtype=torch.float32),
    Case(
        name="window, sinks, folded 2 of 6",
        sequences=((70, 150), (3, 200)),
        heads=(6, 1),
        head_dim=80,
        window=33,
        has_sinks=True,
        dtype=torch.float16,
    ),
    Case(
        name="soft cap, two kv heads",
        sequences=((9, 9),),
        heads=(4, 2),
        page_size=32,
        soft_cap=5.0,
        dtype=torch.float32,
    ),
    Case(name="wide head", sequences=((4, 66),), head_dim=256, page_size=64, dtype=torch.float16),
)
# Both kernels on a GPU: page sizes, head dims, groups, lengths around a block's and a tile's end.
ON_GPU = (
    Case(
        name="fresh",
        sequences=((300, 300), (2, 2), (1, 77), (129, 129)),
        heads=(32, 8),
        head_dim=128,
    ),
    Case(name="extend", sequences=((33, 1000), (64, 64), (7, 513)), heads=(32, 8), head_dim=128),
    Case(
        name="page 32", sequences=((40, 500), (200, 200)), heads=(8, 8), head_dim=128, page_size=32
    ),
    Case(name="page 64", sequences=((40, 500), (200, 200)), heads=(16, 1), page_size=64),
    Case(name="odd group", sequences=((150, 290), (17, 400)), heads=(14, 2), dtype=torch.float16),
    Case(name="group 64", sequences=((50, 200),), heads=(64, 1), head_dim=128),
    Case(name="wide", sequences=((150, 290), (17, 400)), heads=(8, 4), head_dim=256),
    Case(name="window", sequences=((300, 900), (17, 400)), heads=(8, 4), head_dim=128, window=150),
    Case(
        name="cap and sinks",
        sequences=((300, 900), (17, 400)),
        heads=(8, 4),
        head_dim=128,
        soft_cap=20.0,
        has_sinks=True,
    ),
    Case(name="sinks, window", sequences=((300, 700),), heads=(8, 1), window=128, has_sinks=True),
    Case(name="dim 80", sequences=((150, 290), (17, 400)), heads=(8, 4), head_dim=80),
    Case(name="dim 96", sequences=((150, 290), (17, 400)), heads=(6, 2), head_dim=96),
    Case(
        name="fp8 cache",
        sequences=((150, 290), (17, 400)),
        heads=(8, 2),
        head_dim=128,
        cache_dtype=torch.float8_e4m3fn,
    ),
)


def allow_tensor_ranges() -> None:
    """Lets interpreted loops end at loaded values: NumPy 2.4 no longer makes ints of 1-d arrays."""
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def main() -> None:
    """Checks the cases that the interpreter is fast enough for."""
    allow_tensor_ranges()
    for case in INTERPRETED:
        error = relative_error(TileStep(case))
        assert error <= LIMITS[case.dtype], f"{case.name}: relative error {error:.2e}"
        assert quantized_difference(TileStep(case)) == 0, case.name
        print(case.name, f"{error:.1e}")


if __name__ == "__main__":
    main()
