"""The 64-bit hash that page keys and sampling noise are made of.

Source: the finaliser of splitmix64 as `mix`.
"""

from __future__ import annotations

from torch import Tensor


def signed(value: int) -> int:
    """The int64 with the bits of `value`."""
    return value - (1 << 64) if value >= 1 << 63 else value


MIX_A = signed(0xBF58476D1CE4E5B9)
MIX_B = signed(0x94D049BB133111EB)


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 values to the right and fills with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scrambles int64 values, wrapping."""
    x = (x ^ logical_shift(x, 30)) * MIX_A
    x = (x ^ logical_shift(x, 27)) * MIX_B
    return x ^ logical_shift(x, 31)
