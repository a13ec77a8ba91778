"""Device functions of the sampling kernels: order of floats, logarithm, noise, maxima with ids.

Imports Triton, so only kernel modules may import it. Everything is spelled in plain arithmetic: the
interpreter and the device give the same bits but for fused multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What -inf and NaN count as: the lowest bf16 value, so that every kernel dtype can hold it.
LOWEST = tl.constexpr(-3.3895313892515355e38)
# Scaled logits below this are equal, as in the reference.
SCALED_LOWEST = tl.constexpr(-1e30)
NO_ID = tl.constexpr(0x7FFFFFFF)
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))
# `sampling.NO_TOKEN`.
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def clamped(x: tl.tensor) -> tl.tensor:
    """fp32 logits with LOWEST in the place of -inf and NaN."""
    return tl.where(x > LOWEST, x, LOWEST)


@triton.jit
def loaded(place: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """fp32 logits; what is masked, -inf or NaN is LOWEST."""
    return clamped(tl.load(place, mask=mask, other=LOWEST).to(tl.float32))


@triton.jit
def mask_of(
    mask_bits: tl.tensor, mask_stride: tl.tensor, has_grammar: tl.tensor, row: tl.tensor,
    HAS_MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where the mask of a row begins, and whether the row obeys it; see `sampling.Masks`."""
    is_masked = row < 0
    if HAS_MASK:
        is_masked = tl.load(has_grammar + row) != 0
        mask_bits += row.to(tl.int64) * mask_stride
    return mask_bits, is_masked


@triton.jit
def allowed(
    raw: tl.tensor, token: tl.tensor, is_real: tl.tensor, mask: tl.tensor, is_masked: tl.tensor
) -> tl.tensor:
    """Logits with LOWEST in the place of what the mask of `mask_of` forbids, but for a NaN."""
    byte = tl.load(mask + token // 8, mask=is_real & is_masked, other=255).to(tl.int32)
    is_kept = (((byte >> (token % 8)) & 1) != 0) | (raw != raw)
    return tl.where(is_kept, raw, LOWEST)


@triton.jit
def loaded_row(
    logits: tl.tensor, token: tl.tensor, is_real: tl.tensor, mask: tl.tensor, is_masked: tl.tensor,
    HAS_MASK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`loaded` from a row of logits, under its mask."""
    raw = tl.load(logits + token, mask=is_real, other=LOWEST).to(tl.float32)
    if HAS_MASK:
        raw = allowed(raw, token, is_real, mask, is_masked)
    return clamped(raw)


@triton.jit
def flipped(bits: tl.tensor) -> tl.tensor:
    """Between the bits of floats and signed integers of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_of(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Signed integer of `x` whose order is the floats'; SHIFT 16 for values that are all bf16."""
    return flipped(x.to(tl.int32, bitcast=True)) >> SHIFT


@triton.jit
def value_of(order: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Inverse of `order_of`."""
    bits = order
    if SHIFT > 0:
        bits = (order << SHIFT) | tl.where(order < 0, (1 << SHIFT) - 1, 0)
    return flipped(bits).to(tl.float32, bitcast=True)


@triton.jit
def log_of(x: tl.tensor) -> tl.tensor:
    """Natural logarithm of positive normal floats, relative error about 1e-7, near 1 as well.

    The device's fast logarithm has an absolute error of 2^-22: the largest noise values, which
    decide, come from arguments near 1 and would be garbage.

    Source: logf of the Cephes library.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    tail = f * square * p - 2.12194440e-4 * e - 0.5 * square
    return (f + tail) + 0.693359375 * e


@triton.jit
def mixed(x: tl.tensor) -> tl.tensor:
    """`hashing.mix` of uint64 values."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The part of the noise's hash that a row shares, uint64."""
    return mixed(mixed(seed.to(tl.uint64)) + position.to(tl.uint64))


@triton.jit
def noise_of(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Gumbel noise of token ids; as `sampling.gumbel_noise` up to the logarithm's last bits."""
    bits = mixed(key + token.to(tl.uint64)) & 0x7FFFFF
    uniform = (bits.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -log_of(-log_of(uniform))


@triton.jit
def scaled_of(x: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits over temperature, rounded as in the reference."""
    return tl.maximum(tl.div_rn(x, temperature + tl.zeros_like(x)), SCALED_LOWEST)


@triton.jit
def safe_temperature(temperature: tl.tensor) -> tl.tensor:
    """What logits are divided by; see the reference."""
    return tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, 1e-6))


@triton.jit
def first_of_max(x: tl.tensor, ids: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Maximum of `x` where `mask`, and the lowest of the ids that have it."""
    x = tl.where(mask, x, MINUS_INFINITY)
    best = tl.max(x)
    return best, tl.min(tl.where(mask & (x == best), ids, NO_ID))


@triton.jit
def raw_floor(cut: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Lowest logit whose scaled value is at least `cut`: division is monotone, so one exists.

    The product is within two units in the last place of it; 8 on either side are tried.
    """
    near = order_of(cut * temperature, 0) + tl.arange(0, 16) - 8
    tried = value_of(near, 0)
    is_kept = scaled_of(tried, temperature) >= cut
    lowest = tl.min(tl.where(is_kept, tried, float("inf")))
    return tl.where(cut <= SCALED_LOWEST, LOWEST, tl.maximum(lowest, LOWEST))
