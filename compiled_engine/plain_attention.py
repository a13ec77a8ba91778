"""A model that no attention kernel of the GPU serves: said aloud, and refused if it is too large.

The plain torch attention looks at every cached position for every token of a step at once. It is
right for any shape, but its memory grows with step size times context.
"""

from __future__ import annotations

import logging

import torch

from compiled_engine.custom_ops.attention_choice import CANDIDATES, attention_traits
from compiled_engine.custom_ops.registry import KernelRegistry, Target
from compiled_engine.errors import ConfigError
from compiled_engine.kv_cache import CacheGeometry

logger = logging.getLogger(__name__)


def check_attention(
    target: Target,
    geometry: CacheGeometry,
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_tokens: int,
    context: int,
    num_rows: int,
    free_bytes: int,
) -> None:
    """Warns if attention will be the plain one; raises if that cannot fit.

    Args:
        target: the device.
        geometry: of the KV cache.
        dtype: of the queries.
        num_heads: query heads.
        num_tokens: tokens of the largest step.
        context: positions of the longest row.
        num_rows: rows of the batch.
        free_bytes: memory that a step may take.

    Raises:
        ConfigError: the plain attention is needed and does not fit; says why and what to lower.
    """
    heads = (geometry.num_kv_heads, geometry.head_dim)
    q = torch.empty(1, num_heads, geometry.head_dim, dtype=dtype, device="meta")
    cache = torch.empty(1, geometry.page_size, *heads, dtype=geometry.dtype, device="meta")
    traits = attention_traits(q, cache, num_rows) | {"arch": target.arch}
    choice = KernelRegistry(CANDIDATES).choose("attention", "paged", target, dtype, traits)
    if choice.candidate.name != "torch":
        return
    reasons = "; ".join(f"{name} {reason}" for name, reason in choice.rejected)
    # Keys and values of all positions for each token, in fp32.
    needed = 2 * 4 * num_tokens * context * geometry.num_kv_heads * geometry.head_dim
    if needed > free_bytes:
        raise ConfigError(
            f"no attention kernel can serve this model ({reasons}), and the plain one needs "
            f"{needed / 2**30:.1f} GiB for steps of {num_tokens} tokens over {context} positions; "
            f"{free_bytes / 2**30:.1f} are free: lower --chunked-prefill-size or --max-model-len",
            param="chunked_prefill_size",
        )
    logger.warning(
        "attention runs as plain torch code, slowly: %s; lower --max-model-len to make it cheaper",
        reasons,
    )
