"""The sizes that the kernels of `experts` are made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowsConfig:
    """Sizes of a kernel for pairs on their own.

    Attributes:
        outputs: of a program.
        block: columns loaded at a time; a multiple of 32 for "mxfp4", of at most 128 for
            "fp8_block".
        ahead: blocks on their way to registers.
        num_warps: of a program.
    """

    outputs: int
    block: int
    ahead: int
    num_warps: int


@dataclass(frozen=True)
class StreamConfig:
    """Sizes of a kernel that streams weights.

    Attributes:
        rows: of the weight, that a program owns; of the first product half of them are the gate's.
        pairs: of an expert, multiplied at a time: 8, 16, 32 or more.
        block: columns loaded at a time.
        stages: of the pipeline.
        num_warps: of a program.
    """

    rows: int
    pairs: int
    block: int
    stages: int
    num_warps: int


@dataclass(frozen=True)
class PairTilesConfig:
    """Sizes of a kernel over tiles of pairs.

    Attributes:
        pairs: of a tile; the same for both products.
        outputs: of a tile; the first product multiplies twice as many rows of the weight.
        block: columns loaded at a time.
        stages: of the pipeline.
        num_warps: of a program.
        has_descriptors: whether weights are copied by the tensor memory accelerator.
        swath: tiles of pairs that go through all outputs together.
    """

    pairs: int
    outputs: int
    block: int
    stages: int
    num_warps: int
    has_descriptors: bool = False
    swath: int = 1


@dataclass(frozen=True)
class PackedExpertsConfig:
    """Sizes of the kernel for packed weights and few pairs of an expert.

    Attributes:
        pairs: of an expert, multiplied at a time: 8, 16, 24 or 32.
        sixteens: groups of 16 rows of the weight that a block of threads owns.
        warps: of a block, that divide the columns.
        ahead: pieces of 128 bytes of each row on their way to the registers of a warp.
        resident: blocks of threads for which a multiprocessor has registers.
    """

    pairs: int = 8
    sixteens: int = 1
    warps: int = 4
    ahead: int = 3
    resident: int = 4


@dataclass(frozen=True)
class PackedTokenConfig:
    """Sizes of the kernel for packed weights and one token.

    Attributes:
        sixteens: groups of 16 rows of the weight in a tile.
        warps: of a block of threads, that divide the columns.
        ahead: pieces of 128 bytes of each row of a tile on their way to shared memory, of a warp.
        resident: blocks of threads for which a multiprocessor has registers.
    """

    sixteens: int = 1
    warps: int = 6
    ahead: int = 6
    resident: int = 1
