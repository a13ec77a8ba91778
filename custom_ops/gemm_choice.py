"""Which kernel of `fused_linear` is fastest for a product, and the sizes it runs with.

Everything here was measured on an H200 with the weights of Qwen3-8B, in chains of 36 layers: what a
kernel leaves of the memory's time to the next one counts. Other weights take what was found for the
nearest shape. What a kernel can take at all is decided in `gemm`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum

from compiled_engine.custom_ops.gemm_skinny import (
    Config,
    HopperConfig,
    MmaConfig,
    RowConfig,
    TileConfig,
    WideConfig,
)
from compiled_engine.custom_ops.registry import Traits
from compiled_engine.custom_ops.toolchain import gluon_reason

# Columns of g, the norm's weight, that fit beside the rings of the Hopper kernel.
MAX_HOPPER_SIZE = 32768
# Tiles from which on the Hopper kernel, of one program a tile, is worth it.
MIN_HOPPER_TILES = 32
# Blocks of threads from which on the wide kernel is worth it.
MIN_WIDE_BLOCKS = 32
# A `lead` of more blocks than any program has.
AT_ONCE = 9999


class Shape(StrEnum):
    """Shapes of weights, in words for people."""

    FEW_ROWS = "up to 4096 rows"
    MORE_ROWS = "4097 to 8192 rows"
    LONG_ROWS = "rows of more than 8192 columns"
    MANY_ROWS = "gated or more than 8192 rows"
    VOCABULARY = "more than 65536 rows"

    @classmethod
    def of(cls, rows: int, size: int, is_gated: bool) -> Shape:
        """The shape of a weight [rows, size]; gated ones are alike, whatever their size."""
        if is_gated or 8192 < rows <= 65536:
            return cls.MANY_ROWS
        if rows > 65536:
            return cls.VOCABULARY
        if size > 8192:
            return cls.LONG_ROWS
        return cls.MORE_ROWS if rows > 4096 else cls.FEW_ROWS


_ROWS = {
    Shape.FEW_ROWS: RowConfig(4, 2048, 1, 8),
    Shape.MORE_ROWS: RowConfig(4, 4096, 1, 8),
    Shape.LONG_ROWS: RowConfig(2, 4096, 1, 8),
    Shape.MANY_ROWS: RowConfig(2, 1024, 4, 4),
    Shape.VOCABULARY: RowConfig(2, 2048, 2, 4),
}
# For one token and 4097 to 8192 rows, by columns, up to; measured with the qkv product of
# Qwen3-30B-A3B and of gpt-oss-20b. Wider ones take what is above.
_NARROW_ROWS = {2048: RowConfig(4, 2048, 1, 4), 3072: RowConfig(4, 1024, 2, 4)}
# For one token and so few rows that programs of several would leave multiprocessors idle: routers.
MAX_LONE_ROWS = 512
_LONE_ROWS = RowConfig(1, 2048, 1, 8)
# By tokens, up to.
_TILES = {
    8: {
        Shape.FEW_ROWS: TileConfig(32, 512, 1, 4, 512, 2),
        Shape.MORE_ROWS: TileConfig(32, 256, 1, 4, 256, 2),
        Shape.LONG_ROWS: TileConfig(16, 256, 2, 5, 512, 1),
        Shape.MANY_ROWS: TileConfig(64, 256, 1, 3, 256, 4),
        Shape.VOCABULARY: TileConfig(32, 256, 1, 4, 0, 2),
    },
    16: {
        Shape.FEW_ROWS: TileConfig(32, 512, 1, 4, 512, 2),
        Shape.MORE_ROWS: TileConfig(16, 256, 1, 5, 512, 1),
        Shape.LONG_ROWS: TileConfig(16, 256, 1, 6, 512, 2),
        Shape.MANY_ROWS: TileConfig(32, 128, 1, 6, 256, 2),
        Shape.VOCABULARY: TileConfig(32, 256, 1, 4, 0, 2),
    },
    32: {
        Shape.FEW_ROWS: TileConfig(32, 512, 1, 4, 1024, 2),
        Shape.MORE_ROWS: TileConfig(64, 256, 2, 4, 256, 4),
        Shape.LONG_ROWS: TileConfig(32, 256, 1, 6, 1024, 2),
        Shape.MANY_ROWS: TileConfig(128, 64, 2, 3, 256, 8),
        Shape.VOCABULARY: TileConfig(64, 64, 1, 8, 0, 4),
    },
}
_HOPPER = {
    8: {
        Shape.FEW_ROWS: HopperConfig(64, 128, 6, 4, 1, 5, 0),
        Shape.MORE_ROWS: HopperConfig(64, 128, 6, 4, 1, 2, 0),
        Shape.LONG_ROWS: HopperConfig(64, 128, 4, 4, 0, AT_ONCE, 0),
        Shape.MANY_ROWS: HopperConfig(128, 128, 2, 2, 1, 0, 1),
        Shape.VOCABULARY: HopperConfig(64, 128, 4, 4, 1, 2, 0),
    },
    16: {
        Shape.FEW_ROWS: HopperConfig(64, 128, 4, 4, 2, AT_ONCE, 0),
        Shape.MORE_ROWS: HopperConfig(64, 128, 4, 4, 1, 5, 0),
        Shape.LONG_ROWS: HopperConfig(64, 128, 4, 4, 0, AT_ONCE, 0),
        Shape.MANY_ROWS: HopperConfig(128, 64, 4, 4, 1, 0, 0),
        Shape.VOCABULARY: HopperConfig(64, 128, 4, 4, 1, 5, 0),
    },
    32: {
        Shape.FEW_ROWS: HopperConfig(64, 128, 4, 4, 2, AT_ONCE, 0),
        Shape.MORE_ROWS: HopperConfig(64, 128, 5, 3, 2, 0, 0),
        Shape.LONG_ROWS: HopperConfig(64, 128, 4, 4, 0, AT_ONCE, 0),
        Shape.MANY_ROWS: HopperConfig(128, 128, 2, 2, 1, 0, 0),
        Shape.VOCABULARY: HopperConfig(64, 128, 4, 4, 1, 5, 0),
    },
}
# For 2 to 8 tokens. What is for few and long rows leaves no room for a norm's weight beside two
# blocks of threads a multiprocessor. For a vocabulary: the fastest of its kind, not of all kernels.
_MMA = {
    Shape.FEW_ROWS: MmaConfig(16, 512, 4, 5, 4, lead=AT_ONCE, stagger=5),
    Shape.MORE_ROWS: MmaConfig(16, 512, 4, 3, 2, lead=AT_ONCE, stagger=1),
    Shape.LONG_ROWS: MmaConfig(16, 512, 4, 5, 4, lead=AT_ONCE),
    Shape.MANY_ROWS: MmaConfig(64, 128, 1, 4, 4, lead=AT_ONCE, stagger=11),
    Shape.VOCABULARY: MmaConfig(128, 64, 1, 4, 4, lead=AT_ONCE),
}
# By tokens, up to.
_WIDE = {
    32: {
        Shape.FEW_ROWS: WideConfig(1, 2, split=2),
        Shape.MORE_ROWS: WideConfig(3, 1, split=4),
        Shape.LONG_ROWS: WideConfig(1, 2, split=2),
        Shape.MANY_ROWS: WideConfig(3, 1),
        Shape.VOCABULARY: WideConfig(3, 1),
    },
    64: {
        Shape.FEW_ROWS: WideConfig(1, 2, split=2),
        Shape.MORE_ROWS: WideConfig(1, 2),
        Shape.LONG_ROWS: WideConfig(2, 1, split=4),
        Shape.MANY_ROWS: WideConfig(3, 1),
        Shape.VOCABULARY: WideConfig(2, 1),
    },
    128: {
        Shape.FEW_ROWS: WideConfig(1, 2, split=2),
        Shape.MORE_ROWS: WideConfig(1, 2),
        Shape.LONG_ROWS: WideConfig(2, 1, split=4),
        Shape.MANY_ROWS: WideConfig(3, 1),
        Shape.VOCABULARY: WideConfig(2, 1),
    },
}
# Where the wide kernel was faster than the others and the library, in whole layers.
_WIDE_WINS = {
    16: (Shape.LONG_ROWS,),
    32: (Shape.LONG_ROWS, Shape.MANY_ROWS),
    64: (Shape.FEW_ROWS, Shape.LONG_ROWS, Shape.MANY_ROWS),
    128: (Shape.LONG_ROWS, Shape.MANY_ROWS),
}
# Where the Hopper kernel was faster than the tile kernel.
_HOPPER_WINS = {
    8: (Shape.FEW_ROWS, Shape.MORE_ROWS, Shape.MANY_ROWS),
    16: (),
    32: (Shape.MORE_ROWS, Shape.MANY_ROWS, Shape.VOCABULARY),
}


def _limit(num_tokens: int) -> int:
    """The first limit of the tables that `num_tokens` is not above; the last serves the rest."""
    return _first_limit(_TILES, num_tokens)


def _first_limit(limits: Collection[int], num_tokens: int) -> int:
    return next((limit for limit in limits if num_tokens <= limit), max(limits))


def _shape_of(traits: Traits) -> Shape:
    return Shape.of(traits["rows"], traits["size"], bool(traits["is_gated"]))


def _pick_rows(traits: Traits) -> RowConfig:
    """Sizes of the kernel for one token."""
    shape = _shape_of(traits)
    if shape == Shape.FEW_ROWS and traits["rows"] <= MAX_LONE_ROWS:
        return _LONE_ROWS
    if shape == Shape.MORE_ROWS and traits["size"] <= max(_NARROW_ROWS):
        return _NARROW_ROWS[_first_limit(_NARROW_ROWS, traits["size"])]
    return _ROWS[shape]


def pick_config(kernel: str, traits: Traits) -> Config:
    """Sizes of a kernel, one of `CANDIDATES` of `gemm`; they can be made for every product.

    Traits: num_tokens, rows, size, is_gated; for "mma" has_norm.
    """
    shape = _shape_of(traits)
    if kernel == "row":
        return _pick_rows(traits)
    if kernel == "mma":
        is_deep = shape in (Shape.FEW_ROWS, Shape.LONG_ROWS)
        return _MMA[Shape.MORE_ROWS if is_deep and traits["has_norm"] else shape]
    if kernel == "wide":
        config = _WIDE[_first_limit(_WIDE, traits["num_tokens"])][shape]
        num_blocks = -(-traits["size"] // (64 * config.slabs))
        return replace(config, split=min(config.split, num_blocks))
    tables: dict[str, dict[int, dict[Shape, TileConfig]] | dict[int, dict[Shape, HopperConfig]]]
    tables = {"tile": _TILES, "hopper": _HOPPER}
    return tables[kernel][_limit(traits["num_tokens"])][shape]


def _hopper_work(traits: Traits) -> tuple[int, int]:
    """Tiles of the Hopper kernel, and how far its counts of blocks times programs go."""
    config = pick_config("hopper", traits)
    assert isinstance(config, HopperConfig)
    num_tiles = -(-traits["rows"] // config.rows)
    num_blocks = num_tiles * -(-traits["size"] // config.block)
    return num_tiles, num_blocks * max(config.parts * num_tiles, 1024)


def hopper_rejects(traits: Traits) -> str | None:
    """What does not fit into the Hopper kernel; same traits as above."""
    if not traits.get("is_described") and (reason := gluon_reason()) is not None:
        return reason
    rows, size = traits["rows"], traits["size"]
    rules = (
        (size <= MAX_HOPPER_SIZE, f"takes up to {MAX_HOPPER_SIZE} columns, not {size}"),
        (_hopper_work(traits)[1] < 2**31, f"counts in 32 bits, too few for {rows} x {size}"),
    )
    return next((reason for is_met, reason in rules if not is_met), None)


def why_hopper_is_slower(traits: Traits) -> str | None:
    """The reason to take another kernel than that for Hopper; same traits as above."""
    num_tokens, limit = traits["num_tokens"], _limit(traits["num_tokens"])
    if num_tokens == 1:
        return "was measured slower than row at 1 token"
    shape = _shape_of(traits)
    if shape not in _HOPPER_WINS[limit]:
        tokens = f"{2 if limit == 8 else limit // 2 + 1} to {limit} tokens"
        return f"was measured no faster than tile at {tokens}, {shape}"
    num_tiles = _hopper_work(traits)[0]
    if num_tiles < MIN_HOPPER_TILES:
        return f"leaves most of the device idle: {num_tiles} tiles, {MIN_HOPPER_TILES} are enough"
    return None


def why_mma_is_slower(traits: Traits) -> str | None:
    """The reason to take another kernel than that in CUDA C++; same traits as above."""
    num_tokens, shape = traits["num_tokens"], _shape_of(traits)
    if num_tokens == 1:
        return "was not measured at 1 token"
    if num_tokens > 16:
        return "was measured slower at 17 to 32 tokens"
    if num_tokens > 8:
        return "was not measured at 9 to 16 tokens"
    if shape == Shape.VOCABULARY:
        return f"was measured slower than tile at 2 to 8 tokens, {shape}"
    return None


def why_wide_is_slower(traits: Traits) -> str | None:
    """The reason to take another kernel than the wide one; same traits as above."""
    num_tokens, shape = traits["num_tokens"], _shape_of(traits)
    limit = _first_limit(_WIDE_WINS, num_tokens)
    if shape not in _WIDE_WINS[limit]:
        tokens = f"{9 if limit == 16 else limit // 2 + 1} to {limit} tokens"
        return f"was measured no faster than others at {tokens}, {shape}"
    config = pick_config("wide", traits)
    assert isinstance(config, WideConfig)
    blocks = -(-traits["rows"] // (64 * config.warpgroups)) * config.split
    if blocks < MIN_WIDE_BLOCKS:
        return f"leaves most of the device idle: {blocks} blocks, {MIN_WIDE_BLOCKS} are enough"
    return None
