"""Rotary embeddings written out become one op of queries and keys, each in its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_engine.custom_ops import LayerCache, PagedContext, attention, kv_write
from tests.helpers.pass_harness import Captured, Harness, calls_of, ce, item, op_counts, source_of

NAME = "lift_rope"
KEPT = frozenset(
    {"rope", "qk_norm_rope", "kv_write", "rope_kv_write", "qk_norm_rope_kv_write", "rms_norm"}
)
HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 8, 4
EPS = 1e-5


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x) * sin)


def tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[1, 1, T, D] as transformers' code has them."""
    return tuple(torch.cat((t, t), -1).to(dtype)[None, None] for t in (cos, sin))  # type: ignore[return-value]


Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, q.dtype)
    return turned(q, cos, sin), turned(k, cos, sin)


def keys_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, q.dtype)
    k = turned(k, cos, sin)
    return turned(q, cos, sin), k


def in_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, torch.float32)
    return turned(q, cos, sin).to(q.dtype), turned(k, cos, sin).to(k.dtype)


def part(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The first 6 of 8 values turn."""
    cos, sin = tables(cos[:, :3], sin[:, :3], q.dtype)
    first = (turned(x[..., :6], cos, sin) for x in (q, k))
    q2, k2 = (torch.cat((y, x[..., 6:]), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


def part_in_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `part`, rounded before the rest is put behind."""
    cos, sin = tables(cos[:, :2], sin[:, :2], torch.float32)
    first = (turned(x[..., :4], cos, sin).to(x.dtype) for x in (q, k))
    q2, k2 = (torch.cat((y, x[..., 4:]), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


def turned_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + half * sin


def repeated(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[1, 1, T, D], every angle twice in a row."""
    return tuple(t.repeat_interleave(2, -1).to(dtype)[None, None] for t in (cos, sin))  # type: ignore[return-value]


def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = repeated(cos, sin, q.dtype)
    return turned_neighbours(q, cos, sin), turned_neighbours(k, cos, sin)


def neighbours_of_wide_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Heads in fp32, rounded behind."""
    cos, sin = repeated(cos, sin, q.dtype)
    q2, k2 = (turned_neighbours(x.float(), cos, sin).to(x.dtype) for x in (q, k))
    return q2, k2


def neighbours_widened_late(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Turned first, then in fp32."""
    cos, sin = repeated(cos, sin, torch.float32)

    def turn(x: Tensor) -> Tensor:
        half = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return ((x.float() * cos) + (half.float() * sin)).to(x.dtype)

    return turn(q), turn(k)


def part_of_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The first 6 of 8 values, by the first half of doubled tables."""
    tables_of_all = tables(cos[:, :3], sin[:, :3], q.dtype)
    cos, sin = (t[..., :3].repeat_interleave(2, -1) for t in tables_of_all)
    first = (turned_neighbours(x[..., :6], cos, sin) for x in (q, k))
    q2, k2 = (torch.cat((y, x[..., 6:]), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


class Step:
    """One layer's projections, norms, tables and cache for a sequence of T tokens."""

    def __init__(self, num_tokens: int = 5, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv = torch.randn(num_tokens, width).to(dtype)
        angles = torch.randn(num_tokens, DIM // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = torch.randn(2, DIM).to(dtype)
        pages = -(-num_tokens // PAGE_SIZE)
        shape = (pages + 2, PAGE_SIZE, KV_HEADS, DIM)
        self.cache = LayerCache(torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype))
        places = torch.arange(num_tokens)
        self.ctx = PagedContext(
            places + PAGE_SIZE,
            torch.arange(1, pages + 1, dtype=torch.int32)[None],
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([num_tokens], dtype=torch.int32),
            torch.tensor([0, num_tokens], dtype=torch.int32),
            torch.zeros(num_tokens, dtype=torch.long),
            places,
            torch.empty(0, dtype=torch.int32),
        )

    def arguments(self) -> tuple[Any, ...]:
        cache = LayerCache(*(tensor.clone() for tensor in self.cache))
        return self.qkv, self.norms, self.cos, self.sin, cache, self.ctx


def layer(rotation: Rotation, *, has_norm: bool = False) -> Callable[..., Tensor]:
    """Attention as transformers' layers do it, over [1, H, T, D]."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * full.to(x.dtype)

    def function(
        qkv: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, ctx: PagedContext
    ) -> Tensor:
        heads = qkv[None].view(1, qkv.shape[0], -1, DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        if has_norm:
            q, k = normed(q, norms[0]), normed(k, norms[1])
        q, k = rotation(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v.transpose(1, 2)))
        kv_write(k, v, cache.k_cache, cache.v_cache, ctx.slot_mapping)
        return attention(q, k, v, cache, ctx, 0.5)

    return function


def run(function: Callable[..., Tensor], step: Step, **options: Any) -> Captured:
    mine, theirs = step.arguments(), step.arguments()
    found = Harness(kept_ops=KEPT, **options).run(function, *mine)
    expected = function(*theirs)
    # The op rounds less than the spelling in 16 bits.
    loose = {"rtol": 0.05, "atol": 0.05} if expected.dtype != torch.float32 else {}
    torch.testing.assert_close(found.outputs, expected, **loose)
    torch.testing.assert_close(mine[4], theirs[4], **loose)
    return found


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rotation", [plain, keys_first, in_fp32])
def test_queries_and_keys_have_their_roles(rotation: Rotation, dtype: torch.dtype, num_tokens):
    found = run(layer(rotation), Step(num_tokens, dtype), disabled=("fuse_qk_norm_rope_kv",))
    assert found.matches(NAME) == 1
    (rope,) = calls_of(found.after, ce.rope.default)
    q, k, cos, sin = rope.args
    assert [n.meta["val"].shape for n in (q, k)] == [
        (num_tokens, HEADS, DIM), (num_tokens, KV_HEADS, DIM),
    ]  # fmt: skip
    assert [item(source_of(n))[1] for n in (q, k)] == [0, 1]
    assert [n.op for n in (cos, sin)] == ["placeholder"] * 2
    assert cos is not sin
    (attended,) = calls_of(found.after, ce.paged_attention.default)
    assert item(attended.args[0]) == (rope, 0)
    (write,) = calls_of(found.after, ce.kv_write.default)
    assert item(write.kwargs["k"]) == (rope, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rotation", "half"), [(part, 3), (part_in_fp32, 2)])
def test_a_part_of_each_head(rotation: Rotation, half: int, dtype: torch.dtype):
    found = run(layer(rotation, has_norm=True), Step(5, dtype), disabled=("fuse_qk_norm_rope_kv",))
    assert found.matches(NAME) == 1
    (rope,) = calls_of(found.after, ce.qk_norm_rope.default)
    q, k, _, _, cos, sin, _ = rope.args
    assert [n.meta["val"].shape for n in (q, k)] == [(5, HEADS, DIM), (5, KV_HEADS, DIM)]
    assert [n.meta["val"].shape for n in (cos, sin)] == [(5, half)] * 2
    assert source_of(cos) is not source_of(sin)
    (attended,) = calls_of(found.after, ce.paged_attention.default)
    assert item(attended.args[0]) == (rope, 0)
    fused = run(layer(rotation), Step(5, dtype))
    assert op_counts(fused.after) == {"rope_kv_write": 1, "paged_attention": 1}


@pytest.mark.parametrize(
    ("rotation", "dtype", "num_tokens"),
    [
        (neighbours, torch.float32, 5),
        (neighbours, torch.bfloat16, 1),
        (neighbours_of_wide_heads, torch.bfloat16, 5),
        (neighbours_widened_late, torch.bfloat16, 5),
        (part_of_neighbours, torch.bfloat16, 5),
    ],
)
def test_neighbours_that_turn_together(rotation: Rotation, dtype: torch.dtype, num_tokens: int):
    found = run(layer(rotation), Step(num_tokens, dtype), disabled=("fuse_qk_norm_rope_kv",))
    assert found.matches(NAME) == 1
    (rope,) = calls_of(found.after, ce.rope.default)
    q, k, cos, sin, interleaved = rope.args
    assert interleaved is True
    assert [n.meta["val"].dtype for n in (q, k, cos, sin)] == [dtype] * 2 + [torch.float32] * 2
    half = 3 if rotation is part_of_neighbours else DIM // 2
    assert [n.meta["val"].shape for n in (cos, sin)] == [(num_tokens, half)] * 2
    assert source_of(cos) is not source_of(sin)
    fused = run(layer(rotation, has_norm=True), Step(num_tokens, dtype))
    assert op_counts(fused.after) == {"qk_norm_rope_kv_write": 1, "paged_attention": 1}
    (node,) = calls_of(fused.after, ce.qk_norm_rope_kv_write.default)
    assert node.kwargs["interleaved"] is True


def test_with_the_write_it_is_one_op():
    found = run(layer(plain), Step())
    assert found.matches("fuse_qk_norm_rope_kv") == 1
    assert op_counts(found.after) == {"rope_kv_write": 1, "paged_attention": 1}


def test_norms_of_heads_in_front():
    found = run(layer(plain, has_norm=True), Step())
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"qk_norm_rope_kv_write": 1, "paged_attention": 1}
    (node,) = calls_of(found.after, ce.qk_norm_rope_kv_write.default)
    assert node.kwargs["eps"] == EPS
    weights = [node.kwargs[name] for name in ("q_weight", "k_weight")]
    assert [n.args[1:] for n in weights] == [(0, 0), (0, 1)]


def test_dynamic_sizes():
    for rotation in (plain, neighbours, part_of_neighbours):
        step = Step()
        for tensor in (step.qkv, step.cos, step.sin, *step.ctx[:1], *step.ctx[5:7]):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=100)
        assert run(layer(rotation), step).matches(NAME) == 1


def unlike_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((t, t * 2), -1)[None, None] for t in (cos, sin))
    return turned(q, cos, sin), turned(k, cos, sin)


def other_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tables(cos, sin, q.dtype), tables(cos.sin(), sin, q.dtype)
    return turned(q, *first), turned(k, *second)


def other_way(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, q.dtype)

    def turn(x: Tensor) -> Tensor:
        return x * cos - rotate_half(x) * sin

    return turn(q), turn(k)


def neighbours_by_doubled_tables(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, q.dtype)
    return turned_neighbours(q, cos, sin), turned_neighbours(k, cos, sin)


def halves_by_repeated_tables(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = repeated(cos, sin, q.dtype)
    return turned(q, cos, sin), turned(k, cos, sin)


def neighbours_the_other_way(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = repeated(cos, sin, q.dtype)

    def turn(x: Tensor) -> Tensor:
        half = torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + half * sin

    return turn(q), turn(k)


def swapped_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = repeated(cos, sin, q.dtype)

    def turn(x: Tensor) -> Tensor:
        half = torch.stack((-x[..., ::2], x[..., 1::2]), dim=-1).flatten(-2)
        return x * cos + half * sin

    return turn(q), turn(k)


def one_of_each(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours of queries, halves of keys."""
    k = turned(k, *tables(cos, sin, q.dtype))
    return turned_neighbours(q, *repeated(cos, sin, q.dtype)), k


def four_in_a_row(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Every angle four times, of twice as few."""
    cos, sin = (t[:, : DIM // 4].repeat_interleave(4, -1)[None, None] for t in (cos, sin))
    return turned_neighbours(q, cos, sin), turned_neighbours(k, cos, sin)


def half_of_the_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (t[..., : DIM // 2] for t in tables(cos, sin, q.dtype))

    def turn(x: Tensor) -> Tensor:
        return torch.cat((turned(x[..., : DIM // 2], cos, sin), x[..., DIM // 2 :]), -1)

    return turn(q), turn(k)


def rest_in_front(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos[:, :3], sin[:, :3], q.dtype)
    first = (turned(x[..., :6], cos, sin) for x in (q, k))
    q2, k2 = (torch.cat((x[..., 6:], y), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


def another_rest(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos[:, :3], sin[:, :3], q.dtype)
    first = (turned(x[..., :6], cos, sin) for x in (q, k))
    q2, k2 = (torch.cat((y, x[..., 6:] * 2), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


def a_gap(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What follows is not what was left."""
    cos, sin = tables(cos[:, :3], sin[:, :3], q.dtype)
    first = (turned(x[..., :6], cos, sin) for x in (q, k))
    q2, k2 = (torch.cat((y, x[..., 5:7]), -1) for x, y in zip((q, k), first, strict=True))
    return q2, k2


def queries_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, *tables(cos, sin, q.dtype)), k


def of_something_else(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = tables(cos, sin, q.dtype)
    return q * cos + rotate_half(q.sin()) * sin, k * cos + rotate_half(k.sin()) * sin


@pytest.mark.parametrize(
    "rotation",
    [
        unlike_halves,
        other_tables,
        other_way,
        neighbours_by_doubled_tables,
        halves_by_repeated_tables,
        neighbours_the_other_way,
        swapped_neighbours,
        one_of_each,
        four_in_a_row,
        half_of_the_tables,
        rest_in_front,
        another_rest,
        a_gap,
        queries_alone,
        of_something_else,
    ],
)
def test_near_misses_do_not_match(rotation: Rotation):
    found = run(layer(rotation), Step())
    assert found.matches(NAME) == 0
    assert not calls_of(found.after, ce.rope.default)


def test_a_norm_of_other_eps_stays_in_front():
    def function(*arguments: Any) -> Tensor:
        def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            norms = arguments[1]
            q = torch.ops.ce.rms_norm.default(q.transpose(1, 2), norms[0], 1e-5).transpose(1, 2)
            k = torch.ops.ce.rms_norm.default(k.transpose(1, 2), norms[1], 1e-3).transpose(1, 2)
            return plain(q, k, cos, sin)

        return layer(rotation)(*arguments)

    found = run(function, Step())
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"rms_norm": 2, "rope_kv_write": 1, "paged_attention": 1}


def test_queries_that_are_read_before_the_keys_are_turned():
    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = tables(cos, sin, q.dtype)
        q = turned(q, cos, sin)
        k = k + q.sum()
        return q, turned(k, cos, sin)

    assert run(layer(rotation), Step()).matches(NAME) == 0


def test_queries_that_are_turned_behind_the_write():
    def function(
        qkv: Tensor, norms: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, ctx: PagedContext
    ) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, DIM)
        full = tuple(torch.cat((t, t), -1)[:, None] for t in (cos, sin))
        k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)[1:]
        kv_write(turned(k, *full), v, cache.k_cache, cache.v_cache, ctx.slot_mapping)
        q = turned(heads[:, :HEADS], *full)
        return attention(q, k, v, cache, ctx, 0.5)

    found = run(function, Step())
    assert found.matches(NAME) == 1
    assert op_counts(found.after) == {"rope_kv_write": 1, "paged_attention": 1}


def test_switched_off():
    found = run(layer(plain), Step(), disabled=(NAME,))
    assert op_counts(found.after) == {"kv_write": 1, "paged_attention": 1}
