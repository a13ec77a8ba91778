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
    sums: str = "",
) -> int:
    """Pages of the pool, the null page included.

    Takes `max_total_tokens` if given, else what fits into `available_bytes`, and never more than
    all rows at full length could use. `sums` says in an error where memory went.

    Raises:
        ConfigError: not even one page and the null page fit.
    """
    most = max_num_seqs * -(-max_model_len // geometry.page_size)
    fitting = available_bytes // geometry.page_bytes - 1
    if fitting < 1:
        raise ConfigError(
            f"no room for a KV page: {available_bytes} bytes are available and a page takes "
            f"{geometry.page_bytes}; lower --block-size or free memory{sums}",
            param="gpu_memory_utilization" if sums else "max_total_tokens",
        )
    if max_total_tokens is None:
        return min(most, fitting) + 1
    pages = max_total_tokens // geometry.page_size
    if pages > fitting:
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens} needs {pages * geometry.page_bytes} "
            f"bytes of KV cache, {available_bytes} are available: lower it to "
            f"{fitting * geometry.page_size}{sums}",
            param="max_total_tokens",
        )
    if pages < 1:
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens} is no page of {geometry.page_size} tokens",
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


def memory_sums(device: torch.device, utilization: float, reserved_bytes: int) -> str:
    """Where a GPU's memory goes, and what would change it, to end an error with."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    gib = [n / 2**30 for n in (total, total * utilization, total - free, reserved_bytes)]
    return (
        f". Of {gib[0]:.1f} GiB --gpu-memory-utilization {utilization:g} allows {gib[1]:.1f}; "
        f"{gib[2]:.1f} are in use, weights and other processes among them, and steps and graphs "
        f"need {gib[3]:.1f}, less with a smaller --chunked-prefill-size or --max-num-seqs"
    )


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
