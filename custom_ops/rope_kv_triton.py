"""Triton kernel of the rotary family: per-head norm, rotation and KV write, apart or fused.

One kernel with switches serves `rope`, `qk_norm_rope`, `kv_write`, `rope_kv_write` and
`qk_norm_rope_kv_write`. q, k and v may be strided views, as of one qkv tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops import reference
from compiled_engine.custom_ops.library import note_plain_body
from compiled_engine.custom_ops.triton_common import (
    DTYPES,
    has_pdl,
    let_next_start,
    wait_for_previous,
)

MAX_HEAD_DIM = 512
CACHE_DTYPES = (*DTYPES, torch.float8_e4m3fn)


class Config(NamedTuple):
    """How a launch is cut: heads a program, and its warps."""

    heads: int
    num_warps: int


class Norm(NamedTuple):
    """Weights [D] of the norms of q's and k's heads."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Cache(NamedTuple):
    """Where k and v go: caches [pages, page_size, H_kv, D] and slots [T] int64."""

    k: Tensor
    v: Tensor
    slot_mapping: Tensor


@triton.jit
def _load_heads(
    base: tl.tensor, head: tl.tensor, stride: tl.tensor, mask: tl.tensor, columns: tl.tuple
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves [HEADS, BLOCK_HALF] of some heads of a token, in the stored dtype."""
    place = base + head * stride
    first, second = columns
    a = tl.load(place + first, mask=mask, other=0.0)
    return a, tl.load(place + second, mask=mask, other=0.0)


@triton.jit
def _normed(
    first: tl.tensor, second: tl.tensor, gain_first: tl.tensor, gain_second: tl.tensor,
    eps: tl.tensor, HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """RMS norm over both halves; rounded before and after the gain, as in the reference."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a + b * b, axis=1, keep_dims=True)) / HEAD_DIM + eps)
    a = (a * scale).to(first.dtype).to(tl.float32) * gain_first.to(tl.float32)
    b = (b * scale).to(first.dtype).to(tl.float32) * gain_second.to(tl.float32)
    return a.to(first.dtype), b.to(first.dtype)


@triton.jit
def _prepared(
    a: tl.tensor, b: tl.tensor, gain_first: tl.tensor, gain_second: tl.tensor, c: tl.tensor,
    s: tl.tensor, eps: tl.tensor, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The halves of some heads after norm and rotation, rounded to their own dtype."""
    if HAS_NORM:
        a, b = _normed(a, b, gain_first, gain_second, eps, HEAD_DIM)
    if HAS_ROPE:
        first, second = a.to(tl.float32), b.to(tl.float32)
        a = (first * c - second * s).to(a.dtype)
        b = (second * c + first * s).to(b.dtype)
    return a, b


@triton.jit
def _store_halves(
    place: tl.tensor, a: tl.tensor, b: tl.tensor, mask: tl.tensor, columns: tl.tuple
) -> None:
    """Stores both halves in the target's dtype; 8-bit floats saturate at their largest value."""
    if place.dtype.element_ty == tl.float8e4nv:
        a = tl.minimum(tl.maximum(a.to(tl.float32), -448.0), 448.0)
        b = tl.minimum(tl.maximum(b.to(tl.float32), -448.0), 448.0)
    first, second = columns
    tl.store(place + first, a.to(place.dtype.element_ty), mask=mask)
    tl.store(place + second, b.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _gains(
    q_weight: tl.tensor, k_weight: tl.tensor, is_q: tl.tensor, is_lane: tl.tensor,
    columns: tl.tuple,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Both halves [1, BLOCK_HALF] of the norm weight of q's or k's heads, in fp32."""
    weight = q_weight
    if not is_q:
        weight = k_weight
    first = tl.load(weight + columns[0], mask=is_lane, other=0.0)
    second = tl.load(weight + columns[1], mask=is_lane, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _columns(
    lane: tl.tensor, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Columns of the pairs that turn, and behind these pairs of what does not turn."""
    turned: tl.constexpr = ROTARY_DIM // 2
    rest: tl.constexpr = (HEAD_DIM - ROTARY_DIM) // 2
    first, second = lane, lane + turned
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    elif rest > 0:
        first = tl.where(lane < turned, lane, second)
        second = tl.where(lane < turned, second, second + rest)
    return first, second


@triton.jit
def _rope_kv_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, k_cache: tl.tensor,
    v_cache: tl.tensor, slots: tl.tensor, eps: tl.tensor, q_token: tl.tensor, q_stride: tl.tensor,
    k_token: tl.tensor, k_stride: tl.tensor, v_token: tl.tensor, v_stride: tl.tensor,
    cos_token: tl.tensor, sin_token: tl.tensor, k_page: tl.tensor, k_slot: tl.tensor,
    k_head: tl.tensor, v_page: tl.tensor, v_slot: tl.tensor, v_head: tl.tensor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_CACHE: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Heads of a token: norm (HAS_NORM), rotation by [T, R / 2] angles (HAS_ROPE), KV write.

    Grid: tokens x (groups of `HEADS` q heads, then groups of k heads, which also copy their v). q
    goes to packed `q_out`, k to packed `k_out` or, with HAS_CACHE, to its slot; slot -1 is padding
    and nothing is written. Arithmetic in fp32.
    """
    let_next_start(PDL)
    half: tl.constexpr = HEAD_DIM // 2
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    groups: tl.constexpr = q_groups + (NUM_KV_HEADS + HEADS - 1) // HEADS
    token, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    is_lane = lane < half
    columns = _columns(lane, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    is_q = group < q_groups
    gain_first = tl.zeros((1, BLOCK_HALF), tl.float32)
    gain_second = gain_first
    if HAS_NORM:
        gain_first, gain_second = _gains(q_weight, k_weight, is_q, is_lane, columns)
    wait_for_previous(PDL)
    c, s = gain_first, gain_first
    if HAS_ROPE:
        cos, sin = cos + token * cos_token + lane, sin + token * sin_token + lane
        turns = lane < ROTARY_DIM // 2
        c, s = tl.load(cos, mask=turns, other=1.0), tl.load(sin, mask=turns, other=0.0)
    if is_q:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & is_lane
        a, b = _load_heads(q + token * q_token, head, q_stride, mask, columns)
        a, b = _prepared(a, b, gain_first, gain_second, c, s, eps, HEAD_DIM, HAS_NORM, HAS_ROPE)
        q_place = q_out + (token * NUM_HEADS + head) * HEAD_DIM
        _store_halves(q_place, a, b, mask, columns)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_KV_HEADS) & is_lane
        a, b = _load_heads(k + token * k_token, head, k_stride, mask, columns)
        v_a, v_b = a, b
        if HAS_CACHE:
            v_a, v_b = _load_heads(v + token * v_token, head, v_stride, mask, columns)
        a, b = _prepared(a, b, gain_first, gain_second, c, s, eps, HEAD_DIM, HAS_NORM, HAS_ROPE)
        if HAS_CACHE:
            slot = tl.load(slots + token)
            mask = mask & (slot >= 0)
            page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
            k_place = k_cache + page * k_page + offset * k_slot + head * k_head
            _store_halves(k_place, a, b, mask, columns)
            v_place = v_cache + page * v_page + offset * v_slot + head * v_head
            _store_halves(v_place, v_a, v_b, mask, columns)
        else:
            k_place = k_out + (token * NUM_KV_HEADS + head) * HEAD_DIM
            _store_halves(k_place, a, b, mask, columns)


def unsupported_reason(
    heads: tuple[Tensor, ...],
    angles: tuple[Tensor, ...] = (),
    norm: Norm | None = None,
    cache: Cache | None = None,
) -> str | None:
    """Why the kernel cannot serve these arguments; None if it can. Reads shapes and dtypes only.

    Args:
        heads: those of q, k and v that the op has.
        angles: cos and sin, if the op rotates.
        norm: weights, if the op norms.
        cache: where it writes, if it does.
    """
    head_dim, dtype = heads[0].shape[-1], heads[0].dtype
    weights = () if norm is None else (norm.q_weight, norm.k_weight)
    caches = () if cache is None else (cache.k, cache.v)
    rules = (
        (dtype in DTYPES, f"{dtype}, it takes {', '.join(map(str, DTYPES))}"),
        (all(t.dtype == dtype for t in (*heads, *weights)), "the tensors differ in dtype"),
        (all(t.dtype == torch.float32 for t in angles), "angles that are not fp32"),
        (all(t.dtype in CACHE_DTYPES for t in caches), "a cache dtype it does not write"),
        (all(2 * t.shape[1] <= head_dim for t in angles), "more angles than a head has"),
        (head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM, f"heads of {head_dim} values"),
        (
            all(t.stride(-1) == 1 for t in (*heads, *angles, *weights, *caches)),
            "a last dim that is strided",
        ),
        (cache is None or cache.slot_mapping.is_contiguous(), "slots that are not contiguous"),
        (cache is None or cache.slot_mapping.dtype == torch.int64, "slots that are not int64"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def default_config(num_tokens: int, num_heads: int) -> Config:
    """Heads a program and warps that suit the number of tokens."""
    if num_tokens <= 16:
        return Config(1, 1)
    return Config(4, 1) if num_tokens <= 256 else Config(min(16, _power_of_2(num_heads)), 4)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As `reference.rope`, which also serves what `unsupported_reason` names."""
    if (reason := unsupported_reason((q, k), (cos, sin))) is not None:
        note_plain_body("rope", reason)
        return reference.rope(q, k, cos, sin, interleaved)
    return launch((q, k, k), (cos, sin), is_interleaved=interleaved)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.qk_norm_rope`, which also serves what `unsupported_reason` names."""
    norm = Norm(q_weight, k_weight, eps)
    if (reason := unsupported_reason((q, k), (cos, sin), norm)) is not None:
        note_plain_body("qk_norm_rope", reason)
        return reference.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved)
    return launch((q, k, k), (cos, sin), norm, is_interleaved=interleaved)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `reference.kv_write`, but padding is not written at all; see `unsupported_reason`."""
    cache = Cache(k_cache, v_cache, slot_mapping)
    if (reason := unsupported_reason((k, v), cache=cache)) is not None:
        note_plain_body("kv_write", reason)
        reference.kv_write(k, v, k_cache, v_cache, slot_mapping)
    else:
        launch((k[:, :0], k, v), None, cache=cache)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """As `reference.rope_kv_write`, but padding is not written at all; see `unsupported_reason`."""
    cache = Cache(k_cache, v_cache, slot_mapping)
    if (reason := unsupported_reason((q, k, v), (cos, sin), cache=cache)) is not None:
        note_plain_body("rope_kv_write", reason)
        return reference.rope_kv_write(q, k, v, cos, sin, *cache, interleaved)
    return launch((q, k, v), (cos, sin), cache=cache, is_interleaved=interleaved)[0]


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """As the reference, but padding is not written at all; see `unsupported_reason`."""
    cache = Cache(k_cache, v_cache, slot_mapping)
    norm = Norm(q_weight, k_weight, eps)
    if (reason := unsupported_reason((q, k, v), (cos, sin), norm, cache)) is not None:
        note_plain_body("qk_norm_rope_kv_write", reason)
        return reference.qk_norm_rope_kv_write(
            q, k, v, q_weight, k_weight, cos, sin, eps, *cache, interleaved
        )
    return launch((q, k, v), (cos, sin), norm, cache, is_interleaved=interleaved)[0]


def launch(
    heads: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor] | None,
    norm: Norm | None = None,
    cache: Cache | None = None,
    *,
    config: Config | None = None,
    is_pdl: bool = True,
    is_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel on arguments it supports.

    Args:
        heads: q [T, H, D], k and v [T, H_kv, D]; H may be 0.
        angles: cos and sin [T, R / 2], None for no rotation.
        norm: None for no norm.
        cache: where k and v are written, None to return k instead.
        config: None for the default.
        is_pdl: use programmatic launch where the device has it.
        is_interleaved: neighbours turn together.

    Returns:
        The prepared q, and k: prepared, or without storage of its own if `cache` took it.
    """
    q, k, v = heads
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format) if cache is None else k
    num_tokens = q.shape[0]
    if not num_tokens:
        return q_out, k_out
    *weights, eps = norm or (q, k, 0.0)
    cos, sin = angles or (q, q)
    k_cache, v_cache, slots = (k.unsqueeze(0), v.unsqueeze(0), k) if cache is None else cache
    config = config or default_config(num_tokens, max(q.shape[1], k.shape[1]))
    is_pdl = is_pdl and has_pdl(q.device)
    groups = triton.cdiv(q.shape[1], config.heads) + triton.cdiv(k.shape[1], config.heads)
    _rope_kv_kernel[(num_tokens * groups,)](
        *heads, *weights, cos, sin, q_out, k_out, k_cache, v_cache, slots, eps,
        *(stride for t in heads for stride in t.stride()[:2]),
        cos.stride(0), sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=q.shape[2],
        PAGE_SIZE=1 if cache is None else k_cache.shape[1],
        HEADS=config.heads,
        BLOCK_HALF=triton.next_power_of_2(q.shape[2] // 2),
        HAS_NORM=norm is not None,
        HAS_ROPE=angles is not None,
        HAS_CACHE=cache is not None,
        ROTARY_DIM=2 * cos.shape[1] if angles else q.shape[2],
        INTERLEAVED=is_interleaved,
        PDL=is_pdl,
        num_warps=config.num_warps,
        launch_pdl=is_pdl,
    )  # fmt: skip
    return q_out, k_out


def _power_of_2(value: int) -> int:
    return triton.next_power_of_2(max(value, 1))
