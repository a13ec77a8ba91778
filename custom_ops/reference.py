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


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2n] holding gate then up; returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: [T, k], [n, k], [n] or None to [T, n]."""
    return torch.nn.functional.linear(x, weight, bias)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of [T, H, D] by angles [T, D // 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding, half-split layout.

    Args:
        q: [T, H, D].
        k: [T, H_kv, D].
        cos: [T, D // 2] fp32.
        sin: [T, D // 2] fp32.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """RMS norm of every head (weights [D]), then `rope`."""
    return rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)


def kv_write_functional(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """`kv_write` that returns new caches instead of writing in place."""
    pages, offsets = _page_and_offset(slot_mapping, k_cache.shape[1])
    new_k = torch.ops.aten.index_put.default(k_cache, [pages, offsets], k)
    new_v = torch.ops.aten.index_put.default(v_cache, [pages, offsets], v)
    return new_k, new_v


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values into the paged cache in place.

    Args:
        k: [T, H_kv, D].
        v: [T, H_kv, D].
        k_cache: [num_pages, page_size, H_kv, D]; page 0 is the null page.
        v_cache: like `k_cache`.
        slot_mapping: [T] int64, `page * page_size + offset`; -1 is padding and lands in page 0,
            which no row owns.
    """
    pages, offsets = _page_and_offset(slot_mapping, k_cache.shape[1])
    k_cache.index_put_((pages, offsets), k)
    v_cache.index_put_((pages, offsets), v)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope` of q and k, then `kv_write_functional`; returns q and the new caches."""
    q, k = rope(q, k, cos, sin)
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
) -> Tensor:
    """Writes rotated k, and v, into the cache in place; returns the rotated q [T, H, D]."""
    q, k = rope(q, k, cos, sin)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope`, then `kv_write_functional`; returns q and the new caches."""
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
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
) -> Tensor:
    """Writes normed and rotated k, and v, into the cache in place; returns q likewise prepared."""
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps)
    kv_write(k, v, k_cache, v_cache, slot_mapping)
    return q


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one full sequence: q [T, H, D], k and v [T, H_kv, D] to [T, H, D]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of flattened rows over the paged cache, in fp32, one dense tile a token.

    Args:
        q: [T, H, D]; the tokens of sequence `s` are `query_start_loc[s]` to `[s + 1]`, its last
            `query_start_loc[s + 1] - query_start_loc[s]` positions. Tokens past the end are
            padding.
        k_cache: [num_pages, page_size, H_kv, D].
        v_cache: like `k_cache`.
        block_table: [rows, max_pages_per_row] int32.
        seq_rows: [S] int32, row of `block_table` of each sequence.
        seq_lens: [S] int32, tokens whose KV exists after this step.
        query_start_loc: [S + 1] int32.
        scale: multiplies the scores.

    Returns:
        [T, H, D]; padding tokens are 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    token = torch.arange(num_tokens, device=q.device)
    seq = torch.searchsorted(query_start_loc[1:].long(), token, right=True)
    is_real = token < query_start_loc[-1]
    seq = seq.clamp_max(seq_rows.shape[0] - 1)
    position = (seq_lens[seq] - (query_start_loc[seq + 1] - token)).long()
    pages = block_table[seq_rows[seq].long()].long()  # [T, max_pages_per_row]
    context = pages.shape[1] * page_size
    k = k_cache[pages].reshape(num_tokens, context, num_kv_heads, head_dim).float()
    v = v_cache[pages].reshape(num_tokens, context, num_kv_heads, head_dim).float()
    visible = torch.arange(context, device=q.device) <= position[:, None]  # [T, context]
    visible = visible & is_real[:, None]
    group = num_heads // num_kv_heads
    grouped = q.float().reshape(num_tokens, num_kv_heads, group, head_dim) * scale
    scores = torch.einsum("thgd,tchd->thgc", grouped, k)
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    v = torch.where(visible[:, :, None, None], v, 0.0)
    return torch.einsum("thgc,tchd->thgd", weights, v).reshape_as(q).to(q.dtype)


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
