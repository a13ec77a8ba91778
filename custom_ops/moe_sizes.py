"""Sizes that the kernels of `experts` run with, by what a call has.

What is fastest was measured on an H200, with the weights of Qwen3-30B-A3B and gpt-oss-20b;
"nvfp4" takes what "mxfp4" does.
"""

from __future__ import annotations

from dataclasses import replace

from compiled_engine.custom_ops.moe_choice import FP8_BLOCK, pairs_of_expert, shared_bytes
from compiled_engine.custom_ops.moe_config import (
    PackedExpertsConfig,
    PackedTokenConfig,
    PairTilesConfig,
    RowsConfig,
    StreamConfig,
)
from compiled_engine.custom_ops.registry import Traits

# By products, first and second.
_ROWS = (RowsConfig(2, 1024, 2, 2), RowsConfig(8, 256, 6, 4))
_ROWS_FP8 = (RowsConfig(2, FP8_BLOCK, 1, 4), RowsConfig(4, FP8_BLOCK, 12, 4))
_ROWS_FP4 = (RowsConfig(4, 1024, 3, 4), RowsConfig(4, 1024, 12, 4))
# By pairs of an expert to expect, up to.
_STREAM = {
    0.2: (StreamConfig(64, 8, 128, 3, 2), StreamConfig(64, 8, 128, 3, 2)),
    0.5: (StreamConfig(128, 8, 128, 3, 4), StreamConfig(64, 8, 128, 3, 2)),
    4: (StreamConfig(128, 16, 128, 3, 4), StreamConfig(64, 16, 128, 4, 4)),
}
_STREAM_MORE = (StreamConfig(128, 32, 64, 5, 4), StreamConfig(64, 32, 128, 4, 4))
_STREAM_FP4 = {
    1.0: (StreamConfig(128, 8, 128, 3, 4), StreamConfig(64, 8, 128, 3, 4)),
}
_STREAM_FP4_MORE = (StreamConfig(128, 16, 128, 3, 4), StreamConfig(32, 16, 128, 3, 2))
# By pairs of an expert to expect, up to.
_TILES = {
    64: (
        PairTilesConfig(64, 64, 64, 4, 4, True),
        PairTilesConfig(64, 128, 64, 4, 4, True),
    ),
}
_TILES_MORE = (
    PairTilesConfig(128, 128, 64, 4, 8, True),
    PairTilesConfig(128, 256, 64, 4, 8, True),
)
_TILES_PACKED = (
    PairTilesConfig(64, 64, 64, 3, 4),
    PairTilesConfig(64, 128, 64, 3, 4),
)
# By pairs of an expert to expect, up to.
_PACKED = {
    2.0: (PackedExpertsConfig(8, 1, 6, 1, 4), PackedExpertsConfig(8, 1, 6, 1, 4)),
    4.0: (PackedExpertsConfig(16, 2, 6, 1, 2), PackedExpertsConfig(16, 2, 6, 1, 2)),
}
_PACKED_MORE = (PackedExpertsConfig(32, 2, 4, 3, 2), PackedExpertsConfig(32, 2, 4, 3, 2))
# The two products of one token.
_PACKED_TOKEN = (PackedTokenConfig(1, 4, 4, 4), PackedTokenConfig(1, 12, 2, 2))


def pick_packed_token() -> tuple[PackedTokenConfig, PackedTokenConfig]:
    """The sizes of the kernels for packed weights and one token."""
    return _PACKED_TOKEN


def pick_packed(traits: Traits) -> tuple[PackedExpertsConfig, PackedExpertsConfig]:
    """The sizes of the kernels for packed weights."""
    pairs = pairs_of_expert(traits)
    return next((c for most, c in _PACKED.items() if pairs <= most), _PACKED_MORE)


def pick_rows(traits: Traits) -> tuple[RowsConfig, RowsConfig]:
    """The sizes of the kernels of pairs on their own."""
    if traits["is_fp4"]:
        return _ROWS_FP4
    return _ROWS if traits["is_plain"] else _ROWS_FP8


def pick_stream(traits: Traits) -> tuple[StreamConfig, StreamConfig]:
    """The sizes of the kernels that stream weights."""
    pairs = pairs_of_expert(traits)
    table, more = _STREAM, _STREAM_MORE
    if traits["is_fp4"]:
        table, more = _STREAM_FP4, _STREAM_FP4_MORE
    first, second = next((c for most, c in table.items() if pairs <= most), more)
    return _held(first, traits), _held(second, traits)


def _held(config: StreamConfig, traits: Traits) -> StreamConfig:
    """With the stages, 2 at least, that shared memory holds where the device is known."""
    if "arch" not in traits:
        return config
    stage = (config.rows + config.pairs) * config.block * 2
    room = shared_bytes(traits["arch"])
    return replace(config, stages=max(2, min(config.stages, room // stage)))


def pick_tiles(traits: Traits) -> tuple[PairTilesConfig, PairTilesConfig]:
    """The sizes of the kernels over tiles of sorted pairs."""
    if not traits["is_plain"]:
        return _TILES_PACKED
    pairs = pairs_of_expert(traits)
    first, second = next((c for most, c in _TILES.items() if pairs <= most), _TILES_MORE)
    if traits["size"] % 8 or traits["inner_size"] % 8:  # rows of descriptors start at 16 bytes
        first, second = (replace(config, has_descriptors=False) for config in (first, second))
    return first, second
