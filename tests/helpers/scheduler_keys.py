"""Chain keys of KV pages, link by link, in plain integers.

Owns the scalar definition that the oracle and the tests use. Owns no tensors: the engine computes
the same numbers with wrapping int64 arithmetic, and the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
LINK = 0xD1B54A32D192ED03


def mix(value: int) -> int:
    """Scrambles 64 bits (the finaliser of splitmix64)."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def root_link(salt: int) -> int:
    """Returns the accumulator before the first page of a prompt with this salt."""
    return mix(salt + GOLDEN)


def page_hash(tokens: Sequence[int]) -> int:
    """Hashes the tokens of one full page; position in the page matters."""
    return sum(mix(token + (j + 1) * GOLDEN) for j, token in enumerate(tokens)) & MASK64


def next_link(link: int, index: int, tokens: Sequence[int]) -> int:
    """Returns the accumulator after page `index`, from the one before it."""
    return (link + mix(page_hash(tokens) + (index + 1) * LINK)) & MASK64


def page_key(link: int, key_bits: int) -> int:
    """Returns the unsigned index key of a page from the accumulator after it."""
    return mix(link) & ((1 << key_bits) - 1)


def chain_links(salt: int, tokens: Sequence[int], page_size: int) -> list[int]:
    """Returns the accumulators after every full page of `tokens`."""
    links: list[int] = []
    link = root_link(salt)
    for index in range(len(tokens) // page_size):
        link = next_link(link, index, tokens[index * page_size : (index + 1) * page_size])
        links.append(link)
    return links


def to_signed(value: int) -> int:
    """Reinterprets an unsigned 64-bit integer as the signed one a tensor holds."""
    return value - (1 << 64) if value >> 63 else value
