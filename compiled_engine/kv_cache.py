"""KV pages of all layers, and how many of them memory allows.

Page 0 is the null page: padding tokens write into it and nobody reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from compiled_engine.custom_ops import LayerCache
from compiled_engine.errors import ConfigError

CPU_CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """What one token costs in the cache.

    Attributes:
        num_layers, num_kv_heads, head_dim: of the model.
        page_size: tokens of a page.
        dtype: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        values = self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize


def choose_num_pages(
    geometry: CacheGeometry,
    *,
    max_total_tokens: int | None,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
) -> int:
    """Pages of the pool, the null page included.

    Takes `max_total_tokens` if given, else what fits into `available_bytes`, and never more than
    all rows at full length could use.

    Raises:
        ConfigError: not even one page and the null page fit.
    """
    most = max_num_seqs * -(-max_model_len // geometry.page_size)
    fitting = available_bytes // geometry.page_bytes - 1
    if max_total_tokens is None:
        pages = min(most, fitting)
    else:
        pages = max_total_tokens // geometry.page_size
        if pages > fitting:
            raise ConfigError(
                f"--max-total-tokens {max_total_tokens} needs {pages * geometry.page_bytes} "
                f"bytes of KV cache, {available_bytes} are available: lower it to "
                f"{max(fitting, 0) * geometry.page_size}",
                param="max_total_tokens",
            )
    if pages < 1:
        raise ConfigError(
            f"no room for a KV page: {available_bytes} bytes are available and a page takes "
            f"{geometry.page_bytes}; lower --block-size or free memory",
            param="max_total_tokens",
        )
    return pages + 1


def allocate(
    geometry: CacheGeometry, num_pages: int, device: torch.device
) -> tuple[LayerCache, ...]:
    """Zeroed pages of every layer: k and v [num_pages, page_size, num_kv_heads, head_dim]."""
    shape = (num_pages, geometry.page_size, geometry.num_kv_heads, geometry.head_dim)

    def zeros() -> torch.Tensor:
        return torch.zeros(shape, dtype=geometry.dtype, device=device)

    return tuple(LayerCache(zeros(), zeros()) for _ in range(geometry.num_layers))


def available_bytes(device: torch.device, utilization: float, *, is_size_given: bool) -> int:
    """Bytes the KV pool may take.

    On a GPU up to `utilization` of it. On a CPU a fixed share, but all of the machine's memory
    where the config says how many tokens the pool shall hold (`is_size_given`).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * utilization) - (total - free))
    if is_size_given:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CPU_CACHE_BYTES
