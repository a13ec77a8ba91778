"""Plain PyTorch body of every semantic op: the one spelling.

Models call the ops, eager runs execute these bodies, the pass pipeline expands what no pass took
into them, and the tests use them as the oracle. Rows are flattened tokens: `T` tokens, `H` heads,
`D` head dim, pages of `page_size` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dim, statistics in fp32.

    Args:
        x: [..., hidden] any float dtype.
        weight: [hidden].
        eps: added to the mean square.

    Returns:
        [..., hidden] in the dtype of `x` times `weight`'s promotion with it.
    """
    x32 = x.float()
    variance = x32.pow(2).mean(-1, keepdim=True)
    return weight * (x32 * torch.rsqrt(variance + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`r = residual + x`; returns `rms_norm(r, weight, eps)` and `r`, both shaped like `x`."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def scaled_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` whose weight, plus `offset`, is applied before the result is rounded.

    Args:
        x: [..., hidden] any float dtype.
        weight: [hidden] any float dtype.
        eps: added to the mean square.
        offset: 0 as in OLMo 2, 1 as in Gemma.

    Returns:
        [..., hidden] in the dtype of `x`.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2n] holding gate then up; returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    """`gelu(gate) * up` of [..., 2n] holding gate then up: [..., n].

    `approximate` is "none" for the exact function or "tanh", as in torch.
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def swiglu_clamped(x: Tensor, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of [..., 2n] holding gate then up: [..., n].

    The gate is clamped to at most `limit`, up to both sides of it. Source: gpt-oss.
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


# Name of the activation -> what torch calls its approximation.
GELU_APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}


def gated_activation(x: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Gate then up [..., 2n] to [..., n].

    Args:
        x: [..., 2n] any float dtype.
        activation: "silu", "gelu" (exact), "gelu_tanh" or "swiglu_clamped".
        alpha: of "swiglu_clamped".
        limit: of "swiglu_clamped".
    """
    if activation == "silu":
        return silu_and_mul(x)
    if activation == "swiglu_clamped":
        return swiglu_clamped(x, alpha, limit)
    return gelu_and_mul(x, GELU_APPROXIMATIONS[activation])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, impl: str = "") -> Tensor:
    """`x @ weight.T + bias`: [T, k], [n, k], [n] or None to [T, n]; `impl` names a kernel."""
    return torch.nn.functional.linear(x, weight, bias)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the two halves of the first R values of [T, H, D] by angles [T, R // 2], in fp32.

    Interleaved: neighbours instead, each value of an even place with the next one.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    first, second = first.float(), second.float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        parts = [torch.stack(parts, dim=-1).flatten(-2)]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :].float())
    return torch.cat(parts, dim=-1).to(x.dtype)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of the first R values of each head.

    Args:
        q: [T, H, D].
        k: [T, H_kv, D].
        cos: [T, R // 2] fp32, R even and at most D.
        sin: [T, R // 2] fp32.
        interleaved: whether neighbours are pairs; else value i and value i + R // 2 are.
    """
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


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
    """RMS norm of every head (weights [D]), then `rope`."""
    return rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin, interleaved)


def kv_write_functional(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """`kv_write` that returns new caches instead of writing in place."""
    pages, offsets = _page_and_offset(slot_mapping, k_cache.shape[1])
    k, v = as_cached(k, k_cache.dtype), as_cached(v, v_cache.dtype)
    new_k = torch.ops.aten.index_put.default(k_cache, [pages, offsets], k)
    new_v = torch.ops.aten.index_put.default(v_cache, [pages, offsets], v)
    return new_k, new_v


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values into the paged cache in place.

    Args:
        k: [T, H_kv, D].
        v: [T, H_kv, D].
        k_cache: [num_pages, page_size, H_kv, D]; page 0 is the null page. Another dtype than k's
            is a cast, see `as_cached`.
        v_cache: like `k_cache`.
        slot_mapping: [T] int64, `page * page_size + offset`; -1 is padding and lands in page 0,
            which no row owns. A kernel may as well write nothing for it: what page 0 holds is
            no part of the contract.
    """
    pages, offsets = _page_and_offset(slot_mapping, k_cache.shape[1])
    k_cache.index_put_((pages, offsets), as_cached(k, k_cache.dtype))
    v_cache.index_put_((pages, offsets), as_cached(v, v_cache.dtype))


def as_cached(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a cache's dtype: itself or a cast, which saturates for 8-bit floats (scale 1)."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype)


def _page_and_offset(slot_mapping: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    slots = slot_mapping.clamp_min(0)
    return slots // page_size, slots % page_size


def rope_kv_write_functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope` of q and k, then `kv_write_functional`; returns q and the new caches."""
    q, k = rope(q, k, cos, sin, interleaved)
    return q, *kv_write_functional(k, v, k_cache, v_cache, slot_mapping)


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
    """Writes rotated k, and v, into the cache in place; returns the rotated q [T, H, D]."""
    q, k = rope(q, k, cos, sin, interleaved)
    kv_write(k, v, k_cache, v_cache, slot_mapping)
    return q


def qk_norm_rope_kv_write_functional(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, then `kv_write_functional`; returns q and the new caches."""
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved)
    return q, *kv_write_functional(k, v, k_cache, v_cache, slot_mapping)


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
    """Writes normed and rotated k, and v, into the cache in place; returns q likewise prepared."""
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved)
    kv_write(k, v, k_cache, v_cache, slot_mapping)
    return q


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one full sequence: q [T, H, D], k and v [T, H_kv, D] to [T, H, D].

    The options are those of `paged_attention`.
    """
    if window > 0 or soft_cap > 0 or sinks is not None:
        return _dense_attention(q, k, v, scale, window, soft_cap, sinks)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """`causal_attention` with its options, in fp32."""
    num_tokens, num_kv_heads = k.shape[0], k.shape[1]
    at = torch.arange(num_tokens, device=q.device)
    visible = at <= at[:, None]
    if window > 0:
        visible = visible & (at > at[:, None] - window)
    grouped = q.float().unflatten(1, (num_kv_heads, -1)) * scale  # [T, H_kv, G, D]
    scores = torch.einsum("thgd,chd->thgc", grouped, k.float())
    weights = _weights(scores, visible[:, None, None, :], soft_cap, sinks)
    return torch.einsum("thgc,chd->thgd", weights, v.float()).reshape_as(q).to(q.dtype)


def _weights(scores: Tensor, visible: Tensor, soft_cap: float, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [T, H_kv, G, C]; 0 where nothing is visible."""
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logit = sinks.float().reshape(1, *scores.shape[1:3], 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat((scores, logit), -1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return weights if sinks is None else weights[..., :-1]


def paged_attention(
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
    """Causal attention of flattened rows over the paged cache, in fp32, one dense tile a token.

    Args:
        q: [T, H, D]; the tokens of sequence `s` are `query_start_loc[s]` to `[s + 1]`, its last
            `query_start_loc[s + 1] - query_start_loc[s]` positions. Tokens past the end are
            padding.
        k_cache: [num_pages, page_size, H_kv, D], of the dtype of `q` or float8_e4m3fn.
        v_cache: like `k_cache`.
        block_table: [rows, max_pages_per_row] int32.
        seq_rows: [S] int32, row of `block_table` of each sequence.
        seq_lens: [S] int32, tokens whose KV exists after this step.
        query_start_loc: [S + 1] int32.
        token_rows: [T] row of each token, as `seq_rows` says; read by GPU kernels only.
        positions: [T] position of each token, as `seq_lens` says; read by GPU kernels only.
        work: what `attention_work` made of the same tensors; read by GPU kernels only.
        scale: multiplies the scores.
        window: a token sees itself and the `window - 1` tokens before it; 0 is no limit.
        soft_cap: scaled scores `s` become `soft_cap * tanh(s / soft_cap)`; 0 is off.
        sinks: [H], one more logit a head in the softmax's denominator, with no value.
        is_decode: every token is its own sequence: chooses who computes, never the result.
        impl: chooses who computes; "" is the best one.

    Returns:
        [T, H, D]; padding tokens are 0.
    """
    num_tokens = q.shape[0]
    page_size, num_kv_heads = k_cache.shape[1:3]
    row, position = _rows_and_positions(num_tokens, seq_rows, seq_lens, query_start_loc)
    pages = block_table[row].long()  # [T, max_pages_per_row]
    context = pages.shape[1] * page_size
    k, v = (_gather_pages(cache, pages).flatten(1, 2) for cache in (k_cache, v_cache))
    at = torch.arange(context, device=q.device)
    visible = at <= position[:, None]  # [T, context]
    if window > 0:
        visible = visible & (at > position[:, None] - window)
    grouped = q.float().unflatten(1, (num_kv_heads, -1)) * scale  # [T, H_kv, G, D]
    scores = torch.einsum("thgd,tchd->thgc", grouped, k)
    weights = _weights(scores, visible[:, None, None, :], soft_cap, sinks)
    v = torch.where(visible[:, :, None, None], v, 0.0)
    return torch.einsum("thgc,tchd->thgd", weights, v).reshape_as(q).to(q.dtype)


def _rows_and_positions(
    num_tokens: int, seq_rows: Tensor, seq_lens: Tensor, query_start_loc: Tensor
) -> tuple[Tensor, Tensor]:
    """Row of the block table and position, both [T] int64, of each token; padding is at -1."""
    token = torch.arange(num_tokens, device=seq_rows.device)
    seq = torch.searchsorted(query_start_loc[1:].long(), token, right=True)
    seq = seq.clamp_max(seq_rows.shape[0] - 1)
    position = (seq_lens[seq] - (query_start_loc[seq + 1] - token)).long()
    position = torch.where(token < query_start_loc[-1], position, -1)
    return seq_rows[seq].long(), position


def _gather_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """`cache[pages]` in fp32; one-byte floats have no indexing of their own everywhere."""
    if cache.element_size() == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype).float()
    return cache[pages].float()


def sampling_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Smallest logit that min-p, then top-k, then top-p leave in each row.

    Ties at the cut-off are all kept, so the result does not depend on an order of equal values.

    Args:
        logits: [S, vocab] fp32, temperature applied.
        top_k: [S] i32; 0 or less keeps all.
        top_p: [S] fp32 in (0, 1].
        min_p: [S] fp32 in [0, 1].

    Returns:
        [S] fp32.
    """
    if logits.shape[0] == 0:
        return logits.new_empty(0)
    vocab = logits.shape[1]
    ordered = logits.sort(-1, descending=True).values
    top = ordered[:, :1]
    by_min_p = torch.where(min_p > 0, top[:, 0] + min_p.log(), float("-inf"))
    k = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long()
    by_top_k = ordered.gather(1, (k - 1)[:, None]).squeeze(1)
    cut = torch.maximum(torch.minimum(by_min_p, top[:, 0]), by_top_k)
    weights = torch.where(ordered >= cut[:, None], (ordered - top).exp(), 0.0).double()
    reached = weights.cumsum(-1) >= weights.sum(-1, keepdim=True) * top_p[:, None].double()
    last = torch.where(top_p < 1.0, reached.int().argmax(-1), vocab - 1)
    by_top_p = ordered.gather(1, last[:, None]).squeeze(1)
    return torch.where(top_p < 1.0, torch.maximum(cut, by_top_p), cut)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    is_gated: bool,
    impl: str = "",
) -> Tensor:
    """A linear layer with what stands before and after it in a decoder layer.

    `y = linear(rms_norm(x, norm_weight, eps), weight, bias)`, then `silu_and_mul(y)` if gated, then
    `y + residual`; the parts that are None or False are left out.

    Args:
        x: [T, k].
        weight: [n, k]; gated: the n / 2 rows of the gate, then those of the value it multiplies.
        bias: [n] or None.
        norm_weight: [k] or None.
        eps: of the norm; read only with a norm weight.
        residual: [T, n_out] or None; n_out is n, or n / 2 if gated.
        is_gated: whether `weight` holds a gate.
        impl: which kernel computes it on the GPU; not a part of the mathematics.

    Returns:
        [T, n_out] in the dtype of `x`.
    """
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    y = linear(x, weight, bias)
    if is_gated:
        y = silu_and_mul(y)
    return y if residual is None else y + residual
