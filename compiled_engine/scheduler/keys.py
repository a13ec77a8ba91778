"""Page keys: 64-bit sums over the tokens of a prefix, mixed before use.

`chain_i = root(salt) + sum over pages k <= i of mix(h_k + (k + 1) * PAGE_STEP)`, and the key of
page
i is `mix(chain_i)`. A sum of mixed terms can be formed for a whole prompt by one wrapping cumsum,
or link by link as tokens arrive; both give the same bits. Correctness never rests on a key: tokens
and the parent's publication number are compared too.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_engine.custom_ops.hashing import mix, signed

if TYPE_CHECKING:
    from compiled_engine.scheduler.state import SchedulerShape


GOLDEN = signed(0x9E3779B97F4A7C15)
PAGE_STEP = signed(0xD1B54A32D192ED03)


def root_sum(salt: Tensor) -> Tensor:
    """Chain value before the first page of a row with this salt (int64, any shape)."""
    return mix(salt + GOLDEN)


def place_steps(page_size: int, device: torch.device | str) -> Tensor:
    """`(j + 1) * GOLDEN` for the places j of a page: [page_size] i64.

    A tensor and not computed where it is used: compilers may do index arithmetic in 32 bits.
    """
    return torch.arange(1, page_size + 1, dtype=torch.int64, device=device) * GOLDEN


def page_term(tokens: Tensor, page: Tensor, steps: Tensor) -> Tensor:
    """What a page adds to the chain.

    Args:
        tokens: [..., page_size] ids.
        page: [...] int64, index of the page in its row.
        steps: from `place_steps`.
    """
    content = mix(tokens.long() + steps).sum(-1)
    return mix(content + (page + 1) * PAGE_STEP)


def page_key(shape: SchedulerShape, chain: Tensor) -> Tensor:
    """Index key of a page with this chain value."""
    key = mix(chain)
    return key if shape.key_bits >= 64 else key & ((1 << shape.key_bits) - 1)


def salt_of(text: str) -> int:
    """A request's cache salt as the scheduler's non-negative integer; the empty one is 0."""
    if not text:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
