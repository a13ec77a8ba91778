"""Inputs of the kernel bench: ops at the shapes of a model and a number of tokens.

One function a family; `families` says which family takes which. A case makes its arguments anew
each time, so that a bench can give every call inputs of its own, in all more than a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

PAGE_SIZE = 16
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a model; the defaults are those of Qwen3-8B.

    Attributes:
        hidden, inner: width of the residual stream and of the gated MLP.
        num_heads, num_kv_heads, head_dim: of attention.
        vocab_size: rows of the head.
        dtype: of weights and activations.
        context: tokens of KV that a sequence of a decode step has.
    """

    hidden: int = 4096
    inner: int = 12288
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024


@dataclass(frozen=True)
class BenchCase:
    """A call's arguments in the order of the op's schema, made anew by each call of `make`."""

    label: str
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Sequences:
    """What a step's attention computes: context and query tokens of each row.

    Attributes:
        lens: tokens with KV after the step.
        query_lens: tokens of the step, the last ones of each row.
        num_shared: tokens, whole pages, that all rows have in common.
    """

    lens: list[int]
    query_lens: list[int]
    num_shared: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV must be read, shared ones once."""
        return sum(self.lens) - self.num_shared * (len(self.lens) - 1)

    def indices(self, device: torch.device | str) -> dict[str, Tensor]:
        """Index arguments of `paged_attention`, by name; page 0 stays free."""
        widths = [-(-length // PAGE_SIZE) for length in self.lens]
        shared = self.num_shared // PAGE_SIZE
        table = torch.zeros(len(self.lens) + 1, max(widths), dtype=torch.int32)
        order = (torch.randperm(self.num_pages - 1) + 1).int()
        used = shared
        for row, width in enumerate(widths):
            own = width - shared
            table[row, :shared] = order[:shared]
            table[row, shared:width] = order[used : used + own]
            used += own
        ends = torch.tensor(self.query_lens).cumsum(0)
        rows = torch.arange(len(self.lens))
        starts = torch.tensor(self.lens) - torch.tensor(self.query_lens)
        token_rows = rows.repeat_interleave(torch.tensor(self.query_lens))
        first = torch.cat((torch.zeros(1, dtype=torch.int64), ends[:-1]))
        positions = torch.arange(int(ends[-1])) - first[token_rows] + starts[token_rows]
        made = {
            "block_table": table,
            "seq_rows": rows.int(),
            "seq_lens": torch.tensor(self.lens, dtype=torch.int32),
            "query_start_loc": torch.cat((first[:1], ends)).int(),
            "token_rows": token_rows,
            "positions": positions,
        }
        return {name: tensor.to(device) for name, tensor in made.items()}

    @property
    def num_pages(self) -> int:
        """Pages of a cache that holds them, the null page included."""
        shared = self.num_shared // PAGE_SIZE
        return 1 + shared + sum(-(-length // PAGE_SIZE) - shared for length in self.lens)


def _random(shapes: Shapes, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(shapes.dtype)


def filled(arguments: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Random floats and zero integers of the same shapes and strides."""

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape, stride = tuple(value.shape), tuple(value.stride())
        out = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
        if value.dtype.is_floating_point:
            return out.copy_(torch.randn(shape, device=device) * 0.1)
        return out.zero_()

    return {name: real(value) for name, value in arguments.items()}


def attention_step(
    arguments: Mapping[str, Any], device: torch.device, context: int
) -> dict[str, Any]:
    """Indices of a step with the shapes of a call of `paged_attention`.

    Decode: a token a sequence of `context` tokens. Else the tokens are one prompt.
    """
    q, cache = arguments["q"], arguments["k_cache"]
    num_tokens, num_heads, _ = q.shape
    num_pages, page_size, num_kv_heads, _ = cache.shape
    is_decode, rows = arguments["is_decode"], arguments["seq_rows"]
    width = arguments["block_table"].shape[1]
    count = num_tokens if is_decode else 1
    context = min(context if is_decode else max(num_tokens, 1), width * page_size)
    used = -(-context // page_size)
    table = torch.zeros(arguments["block_table"].shape, dtype=torch.int32)
    # Pages are shared where the cache has too few.
    pages = torch.arange(count * used) % max(1, num_pages - 1) + min(1, num_pages - 1)
    count = min(count, table.shape[0], rows.shape[0])
    table[:count, :used] = pages[: count * used].view(count, used)
    seq_rows = torch.arange(rows.shape[0], dtype=torch.int32).clamp_max(table.shape[0] - 1)
    each = 1 if is_decode else min(num_tokens, context)
    lens, query_lens = (torch.zeros(rows.shape[0], dtype=torch.int32) for _ in range(2))
    lens[:count], query_lens[:count] = context, each
    starts = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0, dtype=torch.int32)))
    token_rows = torch.arange(num_tokens) // max(1, each)
    token_rows = token_rows.clamp_max(max(0, table.shape[0] - 1))
    positions = context - each + torch.arange(num_tokens) % max(1, each)
    made = {
        "block_table": table,
        "seq_rows": seq_rows,
        "seq_lens": lens,
        "query_start_loc": starts,
        "token_rows": token_rows,
        "positions": positions,
    }
    step = {name: tensor.to(device) for name, tensor in made.items()}
    order = ("block_table", "token_rows", "positions", "seq_rows", "seq_lens", "query_start_loc")
    work = torch.ops.ce.attention_work.default(
        *(step[name] for name in order), page_size, num_heads, num_kv_heads, is_decode
    )
    return {**step, "work": work}


def step_sequences(num_tokens: int, context: int) -> tuple[Sequences, bool]:
    """The sequences of a step, and whether it is a decode step.

    Up to 256 tokens are decoded, each in a sequence of `context` tokens; more are one prompt.
    """
    if num_tokens <= 256:
        return Sequences([context] * num_tokens, [1] * num_tokens), True
    return Sequences([num_tokens], [num_tokens]), False


def attention_arguments(
    sequences: Sequences, shapes: Shapes, device: torch.device, *, is_decode: bool
) -> tuple[Any, ...]:
    """Arguments of `paged_attention` over a cache of their own, up to `is_decode`."""
    where = sequences.indices(device)
    table, rows, lens, starts, token_rows, positions = where.values()
    work = torch.ops.ce.attention_work.default(
        table, token_rows, positions, rows, lens, starts, PAGE_SIZE, shapes.num_heads,
        shapes.num_kv_heads, is_decode,
    )  # fmt: skip
    cache = (sequences.num_pages, PAGE_SIZE, shapes.num_kv_heads, shapes.head_dim)
    q = _random(shapes, device, len(token_rows), shapes.num_heads, shapes.head_dim)
    caches = (_random(shapes, device, *cache), _random(shapes, device, *cache))
    last = (work, shapes.head_dim**-0.5, 0, 0.0, None, is_decode)
    return (q, *caches, *where.values(), *last)


def attention_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """A decode step, or a whole prompt."""
    sequences, is_decode = step_sequences(num_tokens, shapes.context)
    kind = f"decode {num_tokens}x{shapes.context}" if is_decode else f"prompt 1x{num_tokens}"
    make = partial(attention_arguments, sequences, shapes, device, is_decode=is_decode)
    yield BenchCase(kind, make)


def products(shapes: Shapes) -> dict[str, tuple[int, int, bool, bool, bool]]:
    """Rows and columns of a layer's products and of the head; norm in front, residual, gate."""
    heads = shapes.num_heads * shapes.head_dim
    kv_heads = shapes.num_kv_heads * shapes.head_dim
    return {
        "qkv": (heads + 2 * kv_heads, shapes.hidden, True, False, False),
        "o": (shapes.hidden, heads, False, True, False),
        "gate_up": (2 * shapes.inner, shapes.hidden, True, False, True),
        "down": (shapes.hidden, shapes.inner, False, True, False),
        "head": (shapes.vocab_size, shapes.hidden, True, False, False),
    }


def fused_linear_cases(
    shapes: Shapes, num_tokens: int, device: torch.device
) -> Iterator[BenchCase]:
    """The products of a layer with what stands around them, and the head."""
    for name, (rows, size, has_norm, has_residual, is_gated) in products(shapes).items():

        def make(
            rows: int = rows,
            size: int = size,
            has_norm: bool = has_norm,
            has_residual: bool = has_residual,
            is_gated: bool = is_gated,
        ) -> tuple[Any, ...]:
            width = rows // 2 if is_gated else rows
            norm = _random(shapes, device, size) if has_norm else None
            residual = _random(shapes, device, num_tokens, width) if has_residual else None
            weight = _random(shapes, device, rows, size) * size**-0.5
            x = _random(shapes, device, num_tokens, size)
            return (x, weight, None, norm, EPS, residual, is_gated)

        yield BenchCase(f"{name} {num_tokens}x{rows}x{size}", make)


def linear_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The products of a layer alone, and the head."""
    for name, (rows, size, *_) in products(shapes).items():

        def make(rows: int = rows, size: int = size) -> tuple[Any, ...]:
            weight = _random(shapes, device, rows, size) * size**-0.5
            return (_random(shapes, device, num_tokens, size), weight, None)

        yield BenchCase(f"{name} {num_tokens}x{rows}x{size}", make)


def norm_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The norm of the residual stream."""

    def make() -> tuple[Any, ...]:
        x = _random(shapes, device, num_tokens, shapes.hidden)
        return (x, _random(shapes, device, shapes.hidden), EPS)

    yield BenchCase(f"{num_tokens}x{shapes.hidden}", make)


def add_norm_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The norm of the residual stream behind an add."""

    def make() -> tuple[Any, ...]:
        x, residual = (_random(shapes, device, num_tokens, shapes.hidden) for _ in range(2))
        return (x, residual, _random(shapes, device, shapes.hidden), EPS)

    yield BenchCase(f"{num_tokens}x{shapes.hidden}", make)


def activation_cases(
    shapes: Shapes, num_tokens: int, device: torch.device, *, rest: tuple[Any, ...] = ()
) -> Iterator[BenchCase]:
    """The gate of the MLP; `rest` are the gate's own arguments."""
    width = 2 * shapes.inner

    def make() -> tuple[Any, ...]:
        return _random(shapes, device, num_tokens, width), *rest

    yield BenchCase(f"{num_tokens}x{width}", make)


def _rope_arguments(
    shapes: Shapes, num_tokens: int, device: torch.device, *, has_norm: bool
) -> tuple[Any, ...]:
    counts = [shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads]
    heads = _random(shapes, device, num_tokens, sum(counts), shapes.head_dim)
    q, k, v = heads.split(counts, dim=1)
    angles = torch.rand(num_tokens, shapes.head_dim // 2, device=device)
    num_pages = num_tokens // PAGE_SIZE + 2
    cache = (num_pages, PAGE_SIZE, shapes.num_kv_heads, shapes.head_dim)
    caches = [_random(shapes, device, *cache) for _ in range(2)]
    slots = torch.arange(PAGE_SIZE, PAGE_SIZE + num_tokens, device=device)
    tables = (angles.cos(), angles.sin())
    if not has_norm:
        return (q, k, v, *tables, *caches, slots)
    weights = [_random(shapes, device, shapes.head_dim) for _ in range(2)]
    return (q, k, v, *weights, *tables, EPS, *caches, slots)


def rope_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """Rotation and KV write of a step."""
    make = partial(_rope_arguments, shapes, num_tokens, device, has_norm=False)
    yield BenchCase(f"{num_tokens} tokens", make)


def norm_rope_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The same with a norm on every head."""
    make = partial(_rope_arguments, shapes, num_tokens, device, has_norm=True)
    yield BenchCase(f"{num_tokens} tokens", make)


def _sampling_arguments(
    shapes: Shapes, rows: int, device: torch.device, *, is_greedy: bool
) -> tuple[Any, ...]:
    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    seeds = torch.randint(0, 2**62, (rows,), device=device)
    position = filled(1024, torch.int32)
    settings = (filled(0.8), filled(50, torch.int32), filled(0.9), filled(0.02), seeds, position)
    logits = 4 * _random(shapes, device, rows, shapes.vocab_size)
    return (logits, *settings, shapes.vocab_size, is_greedy)


def sampling_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """From logits to tokens, for up to 256 rows."""
    rows = min(num_tokens, 256)
    for label, is_greedy in (("greedy", True), ("top-k, top-p, min-p", False)):
        make = partial(_sampling_arguments, shapes, rows, device, is_greedy=is_greedy)
        yield BenchCase(f"{rows}x{shapes.vocab_size} {label}", make)


def logprob_cases(shapes: Shapes, num_tokens: int, device: torch.device) -> Iterator[BenchCase]:
    """The five likeliest tokens, for up to 256 rows."""
    rows = min(num_tokens, 256)

    def make() -> tuple[Any, ...]:
        chosen = torch.arange(rows, dtype=torch.int32, device=device)
        return (4 * _random(shapes, device, rows, shapes.vocab_size), chosen, 5)

    yield BenchCase(f"{rows}x{shapes.vocab_size} top 5", make)
