"""Paged attention on the CPU against a dense float64 oracle and against the reference body."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import LayerCache, PagedContext, attention, reference
from compiled_engine.custom_ops.attention import paged_attention_cpu
from tests.helpers.tolerances import assert_close

# (query tokens, tokens after the step) of each sequence
DECODE = [(1, 1), (1, 2), (1, 63), (1, 64), (1, 65), (1, 130)]
EXTEND = [(5, 9), (3, 3), (17, 70), (2, 129)]
MIXED = [(1, 40), (7, 7), (0, 0), (1, 1), (33, 95)]
PREFILL = [(150, 150), (70, 200)]
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "prefill": PREFILL}
HEADS = {
    "mha-2": (2, 2),
    "gqa-6-2": (6, 2),
    "gqa-8-1": (8, 1),
    "gqa-16-2": (16, 2),
    "mqa-5": (5, 1),
}


@dataclass
class Step:
    """Inputs of one call over shuffled pages, with some padding tokens behind the real ones."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def num_real(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Row and position of every token, row 0 and position 0 for padding."""
        rows, positions = torch.zeros(2, self.q.shape[0], dtype=torch.int64)
        for s, row in enumerate(self.seq_rows.tolist()):
            begin, end = self.query_start_loc[s : s + 2].tolist()
            rows[begin:end] = row
            positions[begin:end] = torch.arange(end - begin) + int(self.seq_lens[s]) - (end - begin)
        return rows, positions

    def arguments(self) -> tuple[Tensor | float | None, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_rows,
            self.seq_lens,
            self.query_start_loc,
            *self.tokens,
            torch.empty(0, dtype=torch.int32),
            self.scale,
            self.window,
            self.soft_cap,
            self.sinks,
        )

    def run(self) -> Tensor:
        return torch.ops.ce.paged_attention.default(*self.arguments())

    def oracle(self) -> Tensor:
        """Token by token, each key looked up by its position, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        page_size, group = self.k_cache.shape[1], self.q.shape[1] // self.k_cache.shape[2]
        for s, row in enumerate(self.seq_rows.tolist()):
            begin, end = self.query_start_loc[s : s + 2].tolist()
            length = int(self.seq_lens[s])
            at = torch.arange(length)
            page, offset = self.block_table[row].long()[at // page_size], at % page_size
            k = self.k_cache[page, offset].double().repeat_interleave(group, 1)  # [L, H, D]
            v = self.v_cache[page, offset].double().repeat_interleave(group, 1)
            for token in range(begin, end):
                seen = length - (end - token) + 1
                first = max(0, seen - self.window) if self.window else 0
                q = self.q[token].double() * self.scale
                scores = torch.einsum("hd,lhd->hl", q, k[first:seen])
                if self.soft_cap:
                    scores = self.soft_cap * (scores / self.soft_cap).tanh()
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
                weights = scores.softmax(-1)[:, : seen - first]
                out[token] = torch.einsum("hl,lhd->hd", weights, v[first:seen])
        return out


def make_step(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    num_padding: int = 3,
    table_width: int | None = None,
) -> Step:
    needed = [-(-length // page_size) for _, length in sequences]
    width = table_width or max(needed) + 1
    num_pages = sum(needed) + 1
    order = (torch.randperm(num_pages - 1) + 1).int()
    num_rows = len(sequences) + 2
    table = torch.zeros(num_rows, width, dtype=torch.int32)
    rows = torch.randperm(num_rows)[: len(sequences)].int()
    used = 0
    for row, count in zip(rows.tolist(), needed, strict=True):
        table[row, :count] = order[used : used + count]
        used += count
    cache = torch.randn(2, num_pages, page_size, heads[1], head_dim).to(dtype)
    counts = torch.tensor([0, *(count for count, _ in sequences)])
    starts = counts.cumsum(0).int()
    q = torch.randn(int(starts[-1]) + num_padding, heads[0], head_dim).to(dtype)
    lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
    return Step(q, cache[0], cache[1], table, rows, lengths, starts)


def assert_right(step: Step) -> None:
    got = step.run()
    assert_close("output", got, step.oracle())
    assert not got[step.num_real :].any(), "padding tokens must be 0"


@pytest.mark.parametrize("sequences", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
def test_paged_attention_equals_dense(sequences, heads, head_dim):
    assert_right(make_step(sequences, heads, head_dim))


@pytest.mark.parametrize("head_dim", [1, 32, 96, 112, 256])
def test_other_head_dims(head_dim):
    assert_right(make_step(MIXED, (6, 2), head_dim))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 32, 256])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_page_sizes(page_size, step):
    assert_right(make_step(STEPS[step], (3, 1), 64, page_size))


@pytest.mark.parametrize("heads", [(33, 1), (64, 1), (80, 2)], ids=["33-1", "64-1", "80-2"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_more_query_heads_a_key_head_than_a_block_has_rows(heads, step):
    assert_right(make_step(STEPS[step], heads, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_half_precision(dtype, step, head_dim):
    assert_right(make_step(STEPS[step], (6, 2), head_dim, dtype=dtype))


@pytest.mark.parametrize("step", STEPS)
def test_kernel_equals_reference(step):
    made = make_step(STEPS[step], (6, 2), 64)
    assert_close("output", made.run(), reference.paged_attention(*made.arguments()))


OPTIONS = {
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "window-100": {"window": 100},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-3, 4, 6)},
    "all": {"window": 30, "soft_cap": 2.0, "sinks": torch.linspace(-3, 4, 6)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_window_soft_cap_and_sinks(options, step, head_dim):
    made = make_step(STEPS[step], (6, 2), head_dim)
    for name, value in options.items():
        setattr(made, name, value)
    assert_right(made)
    assert_close("reference", reference.paged_attention(*made.arguments()), made.oracle())


def test_what_lies_before_the_window_is_never_read():
    step = make_step([(1, 100), (3, 90)], (4, 2), 64, 4)
    step.window = 10
    expected = step.oracle()
    for s, row in enumerate(step.seq_rows.tolist()):
        first = int(step.seq_lens[s] - step.query_start_loc[s + 1] + step.query_start_loc[s] - 9)
        at = torch.arange(first)
        step.k_cache[step.block_table[row].long()[at // 4], at % 4] = float("nan")
        step.v_cache[step.block_table[row].long()[at // 4], at % 4] = float("nan")
    assert_close("kernel", step.run(), expected)


def test_one_byte_caches_go_to_the_reference():
    step = make_step(MIXED, (4, 2), 64)
    step.k_cache, step.v_cache = (
        cache.to(torch.float8_e4m3fn) for cache in (step.k_cache, step.v_cache)
    )
    assert_right(step)


def test_implementations_that_cannot_serve_are_refused():
    step = make_step(DECODE, (2, 2), 64)
    for name, message in (("fast", "no implementation fast"), ("triton", "runs on cuda")):
        with pytest.raises(ValueError, match=message):
            paged_attention_cpu(*step.arguments(), False, name)
    named = [paged_attention_cpu(*step.arguments(), True, name) for name in ("cpp", "torch")]
    assert_close("cpp", *named)
    step.k_cache = step.k_cache.bfloat16()
    with pytest.raises(ValueError, match="cpp needs a KV cache of the dtype of the queries"):
        paged_attention_cpu(*step.arguments(), False, "cpp")


def test_large_scores_do_not_overflow():
    step = make_step(MIXED, (2, 1), 64)
    step.q.mul_(200)
    # Scores near 1000 carry an absolute error of 1e-4, which the exponential makes relative.
    assert_close("output", step.run(), step.oracle(), factor=50)


def test_stale_values_behind_a_sequence_are_never_read():
    """Slots past a row's length, pages of nobody and the null page may hold anything, NaN too."""
    step = make_step([(1, 5), (4, 18)], (4, 2), 64, 4)
    expected = step.oracle()
    owned = torch.zeros(step.k_cache.shape[:2], dtype=torch.bool)
    for s, row in enumerate(step.seq_rows.tolist()):
        at = torch.arange(int(step.seq_lens[s]))
        owned[step.block_table[row].long()[at // 4], at % 4] = True
    step.k_cache[~owned] = float("nan")
    step.v_cache[~owned] = float("inf")
    assert_close("kernel", step.run(), expected)


def test_result_does_not_depend_on_neighbours():
    """A row alone, and the same row in a full step, give the same bits."""
    step = make_step(DECODE, (6, 2), 64)
    together = step.run()
    for s in range(len(DECODE)):
        alone = Step(
            step.q[s : s + 1],
            step.k_cache,
            step.v_cache,
            step.block_table,
            step.seq_rows[s : s + 1],
            step.seq_lens[s : s + 1],
            torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(alone.run()[0], together[s])


def test_query_part_of_a_wider_tensor():
    step = make_step(MIXED, (6, 2), 64)
    expected = step.run()
    step.q = torch.cat((step.q, step.q), 1)[:, :6]
    assert torch.equal(step.run(), expected)


def test_arguments_that_the_kernel_cannot_read_are_refused():
    step = make_step(DECODE, (6, 2), 64)
    arguments = step.arguments()
    wide = torch.cat((step.block_table, step.block_table), 1)[:, : step.block_table.shape[1]]
    wrong = {
        3: wide,
        4: step.seq_rows.long(),
        5: step.seq_lens.long(),
        6: step.query_start_loc.long(),
        2: step.v_cache.bfloat16(),
    }
    for index, value in wrong.items():
        changed = [*arguments[:index], value, *arguments[index + 1 :]]
        with pytest.raises(AssertionError, match=r"contiguous|int32|KV cache"):
            paged_attention_cpu(*changed)


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_attention_without_a_context_is_plain_causal_attention(options):
    step = make_step([(9, 9)], (6, 2), 16, num_padding=0)
    for name, value in options.items():
        setattr(step, name, value)
    pages = step.block_table[int(step.seq_rows[0])].long()
    k, v = (cache[pages].flatten(0, 1)[:9] for cache in (step.k_cache, step.v_cache))
    got = attention(step.q, k, v, None, None, step.scale, **options)
    assert_close("output", got, step.oracle())


def test_attention_with_a_context_reads_the_cache():
    step = make_step(MIXED, (4, 2), 32)
    slots = torch.full((step.q.shape[0],), -1)
    indices = (step.block_table, step.seq_rows, step.seq_lens, step.query_start_loc, *step.tokens)
    ctx = PagedContext(slots, *indices, torch.empty(0, dtype=torch.int32))
    unread = torch.full((step.q.shape[0], 2, 32), float("nan"))
    cache = LayerCache(step.k_cache, step.v_cache)
    got = attention(step.q, unread, unread, cache, ctx, step.scale)
    assert torch.equal(got, step.run())


def smallest_seconds(steps: list[Step], num_rounds: int) -> list[float]:
    """Smallest time of a call for each step, the steps taken in turn."""
    best = [float("inf")] * len(steps)
    for _ in range(num_rounds):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step.run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def test_cost_follows_the_lengths_not_the_table():
    """8 rows of 100 tokens cost the same with block tables for 256 and for 8192 tokens."""
    rows = [(1, 100)] * 8
    steps = [make_step(rows, (9, 3), 64, table_width=tokens // 16) for tokens in (256, 8192)]
    # The smallest of many interleaved times is what the call itself costs on a shared machine.
    for _ in range(5):
        short, long = smallest_seconds(steps, 200)
        if 0.8 <= long / short <= 1.2:
            return
    pytest.fail(f"wide tables cost {long / short:.2f} times as much as narrow ones")


def test_cost_grows_with_the_lengths():
    steps = [make_step([(1, length)] * 8, (9, 3), 64) for length in (64, 2048)]
    for _ in range(5):  # on a shared machine all times of one may fall into a pause
        short, long = smallest_seconds(steps, 50)
        if long > 4 * short:
            return
    pytest.fail(f"32 times the tokens cost only {long / short:.2f} times as much")
