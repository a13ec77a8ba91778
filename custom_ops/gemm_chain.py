"""Launcher of a chain of products of up to 128 tokens in one launch, on Hopper.

Each product's x is what the product before it made; see `csrc/gemm_chain/chain.cu`. Blocks of
threads meet at a counter between products and leave sums for each other in a scratch of the
device, so launches of one device must follow each other, as they do on one stream.

Owns the variants of the kernel, its arguments and the scratch. When it is the fastest kernel, and
with which sizes, is known to `gemm_choice`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops.cuda_build import (
    Kernel,
    arch_of,
    inductor_cubin_dir,
    load_library,
)
from compiled_engine.custom_ops.gemm_skinny import num_multiprocessors
from compiled_engine.custom_ops.tensor_maps import MAP_BYTES, Boxes, encode_boxes

SOURCE = "gemm_chain/chain.cu"
KERNEL = "product_chain"
MAX_TOKENS = 128
PADDED_TOKENS = (8, 16, 32, 64, 96, 128)
MAX_SEGMENTS = 4
# Of shared memory, of one block of threads at most.
MAX_SHARED_BYTES = 232448
# A `lead` of more blocks than there are.
AT_ONCE = 1 << 20
_SLAB = 64  # columns of a box
_PANEL = 64  # rows of a warpgroup


class Segment(ctypes.Structure):
    """Mirror of `Segment` in `csrc/gemm_chain/args.cuh`; the maps are aligned to 64 bytes there."""

    _fields_: ClassVar = [
        *((name, ctypes.c_uint8 * MAP_BYTES) for name in ("weight", "x")),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "out", "scale", "scaled")),
        *((name, ctypes.c_void_p) for name in ("squares", "norm_squares", "partials")),
        ("residual_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_outputs", "size", "num_blocks", "warpgroups")),
        *((name, ctypes.c_int32) for name in ("tiles", "split", "is_gated", "num_squares")),
        ("eps", ctypes.c_float),
        ("padding", ctypes.c_int32 * 9),
        ("tail", ctypes.c_int32 * 12),
    ]


class ChainArgs(ctypes.Structure):
    """Mirror of `ChainArgs` in `csrc/gemm_chain/args.cuh`."""

    _fields_: ClassVar = [
        ("segments", Segment * MAX_SEGMENTS),
        ("arrived", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_segments", "num_tokens", "lead", "is_paired")),
        ("padding", ctypes.c_int32 * 10),
    ]


class Tiling(NamedTuple):
    """How a product is divided: tiles of 64 rows a warpgroup, columns in 1 or `split` parts."""

    warpgroups: int
    is_split: bool


@dataclass(frozen=True)
class ChainConfig:
    """Sizes of the kernel.

    Attributes:
        tilings: of the products.
        warpgroups: that multiply, at least those of any tiling.
        slabs: of 64 columns, copied at a time.
        stages: panels of a weight in shared memory, 64 rows of a block of columns.
        x_stages: blocks of x in shared memory.
        split: parts of the columns of a tile, of products that are divided so.
        resident: blocks of threads a multiprocessor.
        lead: blocks of weights still to be asked for when the next kernel may start.
    """

    tilings: tuple[Tiling, ...]
    warpgroups: int
    slabs: int
    stages: int
    x_stages: int
    split: int = 4
    resident: int = 1
    lead: int = AT_ONCE

    def shared_bytes(self, tokens: int) -> int:
        """Dynamic shared memory of a block of threads, for so many padded tokens."""
        rings = (self.stages * _PANEL + self.x_stages * tokens) * self.slabs * _SLAB * 2
        factors = tokens * 4 * (1 + 4 * self.warpgroups)
        return rings + factors + 8 * (2 * self.stages + 2 * self.x_stages + 1)

    def rejects(self, tokens: int) -> str | None:
        """Why the kernel cannot be made with these sizes, for so many padded tokens."""
        size = self.shared_bytes(tokens)
        rules = (
            (1 <= len(self.tilings) <= MAX_SEGMENTS, f"1 to {MAX_SEGMENTS} products"),
            (all(t.warpgroups <= self.warpgroups for t in self.tilings), "too few warpgroups"),
            (self.stages >= 2 * self.warpgroups, "fewer than two stages a warpgroup"),
            (self.x_stages >= 2, "fewer than two blocks of x"),
            (size <= MAX_SHARED_BYTES, f"{size} bytes of shared memory, {MAX_SHARED_BYTES} are"),
        )
        return next((reason for is_met, reason in rules if not is_met), None)


@dataclass(frozen=True)
class Product:
    """One product of a chain.

    Attributes:
        weight: [rows, size], contiguous; gated: rows of the gate, then of the values.
        bias: [rows] or None.
        residual: [T, num_outputs] or None; 0 or above: the output of that product of the chain.
        is_gated: the output is silu of the gate times the value.
        norm_weight: of the norm in front, [size], or None; not of the first product.
        eps: of that norm.
    """

    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | int | None = None
    is_gated: bool = False
    norm_weight: Tensor | None = None
    eps: float = 0.0

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)


def padded_tokens(num_tokens: int) -> int:
    """The tokens that the kernel computes for `num_tokens`."""
    return next(tokens for tokens in PADDED_TOKENS if num_tokens <= tokens)


def variant_flags(config: ChainConfig, tokens: int, *, is_half: bool) -> tuple[str, ...]:
    """Of the compiler, for padded tokens; tilings and `lead` are arguments of the kernel."""
    values = {
        "WARPGROUPS": config.warpgroups,
        "TOKENS": tokens,
        "SLABS": config.slabs,
        "STAGES": config.stages,
        "X_STAGES": config.x_stages,
        "SPLIT": config.split,
        "RESIDENT": config.resident,
        "HALF": int(is_half),
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


def _weight_boxes(product: Product) -> Boxes:
    """Boxes of 64 rows; gated: 8 rows of the gate, the 8 of their values, and so on."""
    weight, outputs = product.weight, product.num_outputs
    num_rows, size = weight.shape
    row, is_half = size * 2, weight.dtype == torch.float16
    if not product.is_gated:
        return Boxes(weight.data_ptr(), (size, num_rows), (row,), (_SLAB, _PANEL), is_half)
    assert outputs % 8 == 0, f"{outputs} outputs are gated, not a multiple of 8"
    sizes, strides = (size, 8, 2, outputs // 8), (row, outputs * row, 8 * row)
    return Boxes(weight.data_ptr(), sizes, strides, (_SLAB, 8, 2, _PANEL // 16), is_half)


def _x_boxes(x: Tensor, tokens: int) -> Boxes:
    num_tokens, size = x.shape
    # A lone row may have any stride.
    stride = x.stride(0) if num_tokens > 1 else -(-size // 8) * 8
    return Boxes(
        x.data_ptr(), (size, num_tokens), (stride * 2,), (_SLAB, tokens), x.dtype == torch.float16
    )


@functools.lru_cache(maxsize=4096)
def _encode_kept(boxes: Boxes) -> bytes:
    """As `encode_boxes`; what it says depends on nothing but the boxes."""
    return encode_boxes(boxes)


def _bytes(encoded: bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * MAP_BYTES).from_buffer_copy(encoded)


class Scratch(NamedTuple):
    """What launches of one device share.

    counter: [1] int64, arrivals. partials: fp32, all bits set but within a launch. squares: fp32.
    """

    counter: Tensor
    partials: Tensor
    squares: Tensor


def num_tiles(product: Product, tiling: Tiling) -> int:
    """Tiles of a product's weight."""
    return -(-product.weight.shape[0] // (_PANEL * tiling.warpgroups))


def _partial_floats(product: Product, tiling: Tiling, split: int, tokens: int) -> int:
    if not tiling.is_split:
        return 0
    return num_tiles(product, tiling) * split * tokens * _PANEL * tiling.warpgroups


def make_scratch(
    products: list[Product], config: ChainConfig, tokens: int, device: torch.device
) -> Scratch:
    """Scratch that is large enough for these products."""
    pairs = list(zip(products, config.tilings, strict=True))
    floats = sum(_partial_floats(p, t, config.split, tokens) for p, t in pairs)
    tiles = sum(num_tiles(p, t) for p, t in pairs)
    partials = torch.full((max(floats, 4),), -1, dtype=torch.int32, device=device)
    return Scratch(
        torch.zeros(1, dtype=torch.int64, device=device),
        partials.view(torch.float32),
        torch.zeros(tiles * tokens, dtype=torch.float32, device=device),
    )


def make_arguments(
    x: Tensor,
    products: list[Product],
    config: ChainConfig,
    scratch: Scratch,
    encode: Callable[[Boxes], bytes] = _encode_kept,
) -> tuple[ChainArgs, list[Tensor]]:
    """The kernel's argument, and the outputs of all products, each [T, num_outputs]."""
    num_tokens = x.shape[0]
    tokens = padded_tokens(num_tokens)
    reason = config.rejects(tokens)
    assert reason is None, f"{config}: {reason}"
    args = ChainArgs(
        arrived=scratch.counter.data_ptr(),
        num_segments=len(products),
        num_tokens=num_tokens,
        lead=config.lead,
        is_paired=1,
    )
    outs: list[Tensor] = []
    kept: list[Tensor] = []
    source, place, tile_place = x, 0, 0
    for i, (product, tiling) in enumerate(zip(products, config.tilings, strict=True)):
        size, outputs = product.weight.shape[1], product.num_outputs
        split = config.split if tiling.is_split else 1
        num_blocks = -(-size // (_SLAB * config.slabs))
        assert source.shape == (num_tokens, size), (source.shape, num_tokens, size)
        assert num_blocks >= split, (num_blocks, split)
        out = x.new_empty((num_tokens, outputs))
        segment = Segment(
            weight=_bytes(encode(_weight_boxes(product))),
            x=_bytes(encode(_x_boxes(source, tokens))),
            bias=None if product.bias is None else product.bias.data_ptr(),
            out=out.data_ptr(),
            partials=scratch.partials.data_ptr() + 4 * place,
            num_outputs=outputs,
            size=size,
            num_blocks=num_blocks,
            warpgroups=tiling.warpgroups,
            tiles=num_tiles(product, tiling),
            split=split,
            is_gated=product.is_gated,
            eps=product.eps,
        )
        residual = product.residual
        if isinstance(residual, int):
            residual = outs[residual]
        if residual is not None:
            segment.residual, segment.residual_stride = residual.data_ptr(), residual.stride(0)
        for tensor in (out, *([residual] if residual is not None else [])):
            args.is_paired &= int(tensor.stride(0) % 2 == tensor.data_ptr() % 4 == 0)
        if product.norm_weight is not None:
            segment.norm_squares = args.segments[i - 1].squares
            segment.num_squares = args.segments[i - 1].tiles
        after = products[i + 1].norm_weight if i + 1 < len(products) else None
        source = out
        if after is not None:
            source = torch.empty_like(out)
            segment.scale, segment.scaled = after.data_ptr(), source.data_ptr()
            segment.squares = scratch.squares.data_ptr() + 4 * tile_place * tokens
            kept.append(source)
        outs.append(out)
        args.segments[i] = segment
        place += _partial_floats(product, tiling, config.split, tokens)
        tile_place += segment.tiles
    args.kept = kept  # as long as the argument is
    return args, outs


def num_blocks_of_threads(
    products: list[Product], config: ChainConfig, num_processors: int
) -> int:
    """Blocks of a launch: as many as run at once.

    All parts of a tile are in different blocks, or the first would wait for the last for ever.
    """
    units = max(
        num_tiles(p, t) * (config.split if t.is_split else 1)
        for p, t in zip(products, config.tilings, strict=True)
    )
    most = config.resident * num_processors
    is_split = any(tiling.is_split for tiling in config.tilings)
    assert not is_split or min(units, most) >= config.split, (units, most, config)
    return min(units, most)


@functools.cache
def _load(config: ChainConfig, tokens: int, arch: str, is_half: bool) -> Kernel:
    library = load_library(
        SOURCE, arch, inductor_cubin_dir(), variant_flags(config, tokens, is_half=is_half)
    )
    return Kernel(
        library,
        KERNEL,
        block=128 * config.warpgroups + 128,
        shared_bytes=config.shared_bytes(tokens),
        is_dependent=True,
    )


def load_variant(config: ChainConfig, tokens: int, arch: str, *, is_half: bool) -> Kernel:
    """The kernel, ready to be launched. Not to be called for the first time while capturing."""
    return _load(replace(config, tilings=(), lead=0), tokens, arch, is_half)


def launch_chain(
    x: Tensor, products: list[Product], config: ChainConfig, scratch: Scratch
) -> list[Tensor]:
    """Runs the kernel on the current stream; returns the outputs of all products."""
    args, outs = make_arguments(x, products, config, scratch)
    kernel = load_variant(
        config, padded_tokens(x.shape[0]), arch_of(x.device), is_half=x.dtype == torch.float16
    )
    blocks = num_blocks_of_threads(products, config, num_multiprocessors(x.device))
    kernel.launch(blocks, args)
    return outs
