"""Launchers of the `fused_linear` kernels for few tokens, and the sizes they are made for.

`launch` runs one kernel with one configuration; `gemm_choice` knows which is best. What a kernel
can take at all is decided in `gemm`, not here. The kernels need compute capability 8.0; from 9.0 on
they overlap with the kernel before them (programmatic dependent launch).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_engine.custom_ops import reference


class Operands(NamedTuple):
    """Arguments of `fused_linear`, without the kernel's name."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    eps: float
    residual: Tensor | None
    is_gated: bool

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)


@dataclass(frozen=True)
class RowConfig:
    """Sizes of `row_kernel`.

    Attributes:
        rows: of the weight, that a program owns.
        block: columns loaded at a time.
        ahead: blocks on their way to registers.
        num_warps: of a program.
    """

    rows: int
    block: int
    ahead: int
    num_warps: int


@dataclass(frozen=True)
class TileConfig:
    """Sizes of `tile_kernel`.

    Attributes:
        rows: of the weight, that a program owns.
        block: columns loaded at a time.
        split: parts of the columns, each a program of its own.
        stages: of the pipeline; one less are on their way to shared memory.
        l2_first: columns that L2 is asked for before the wait.
        num_warps: of a program.
    """

    rows: int
    block: int
    split: int
    stages: int
    l2_first: int
    num_warps: int


@dataclass(frozen=True)
class HopperConfig:
    """Sizes of `hopper_kernel`.

    Attributes:
        rows: of the weight, in a tile: a multiple of 64, of 128 if gated.
        block: columns loaded at a time, a multiple of 64.
        stages: blocks of the weight in shared memory.
        x_stages: blocks of x in shared memory, at most `stages`.
        parts: programs a tile; 0: a program a multiprocessor, for equal stretches of all blocks.
        lead: blocks of the weight still to be asked for when the next kernel may start.
        l2_blocks: blocks after the first `stages` that L2 is asked for before the wait.
    """

    rows: int
    block: int
    stages: int
    x_stages: int
    parts: int
    lead: int
    l2_blocks: int


@dataclass(frozen=True)
class MmaConfig:
    """Sizes of the kernel in `gemm_mma`.

    Attributes:
        rows: of the weight, in a tile: a multiple of 16 for each of `4 / k_warps` warps; gated:
            half of them are the values' rows.
        block: columns copied at a time: a multiple of 64, and of 32 for each of `k_warps`.
        k_warps: warps, of 4, that divide the columns of a block; the others divide its rows.
        stages: blocks of the weight in shared memory.
        x_stages: blocks of x in shared memory, at most `stages`.
        lead: blocks of the weight still to be asked for when the next kernel may start.
        stagger: blocks of columns by which a tile begins after the tile before; they go round.
    """

    rows: int
    block: int
    k_warps: int
    stages: int
    x_stages: int
    lead: int = 0
    stagger: int = 0


@dataclass(frozen=True)
class WideConfig:
    """Sizes of the kernel in `gemm_wide`.

    Attributes:
        warpgroups: that multiply, each 64 rows of the weight: the rows of a tile.
        slabs: of 64 columns, copied at a time.
        split: blocks of threads that divide the columns of a tile.
    """

    warpgroups: int
    slabs: int
    split: int = 1


Config = RowConfig | TileConfig | HopperConfig | MmaConfig | WideConfig

# Tiles of which one kernel may have a counter.
MAX_SPLIT_TILES = 65536


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zeros that every kernel leaves as zeros; shared by all, so kernels must not run side by side.

    Raises:
        RuntimeError: asked for the first time while a CUDA graph is captured, which would give the
            counters to that graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("fused_linear: run it once before a CUDA graph with it is captured")
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


def launch(kernel: str, operands: Operands, config: Config) -> Tensor:
    """Runs `kernel`, one that has a configuration, with `config`; returns [T, num_outputs].

    Programs that split columns count on counters and sums of the device: calls on one device must
    follow each other, as they do on one stream.
    """
    x = operands.x
    if kernel == "wide" and operands.norm_weight is not None:
        from compiled_engine.custom_ops.norm_triton import rms_norm

        normed = rms_norm(x, operands.norm_weight, operands.eps)
        operands = operands._replace(x=normed, norm_weight=None)
    elif kernel != "row" and x.dtype == torch.float16 and operands.norm_weight is not None:
        # x times the norm's weight, not yet divided by the norm, may be too large for fp16.
        normed = reference.rms_norm(x, operands.norm_weight, operands.eps)
        operands = operands._replace(x=normed, norm_weight=None)
    out = x.new_empty((x.shape[0], operands.num_outputs))
    if isinstance(config, RowConfig):
        assert kernel == "row", kernel
        _launch_rows(operands, out, config)
    elif isinstance(config, HopperConfig):
        from compiled_engine.custom_ops.gemm_skinny_hopper import launch_hopper

        assert kernel == "hopper", kernel
        launch_hopper(operands, out, config, _counters(x.device))
    elif isinstance(config, MmaConfig):
        from compiled_engine.custom_ops.gemm_mma import launch_mma

        assert kernel == "mma", kernel
        launch_mma(operands, out, config)
    elif isinstance(config, WideConfig):
        from compiled_engine.custom_ops.gemm_wide import launch_wide

        assert kernel == "wide", kernel
        launch_wide(operands, out, config)
    else:
        assert kernel == "tile", kernel
        _launch_tiles(operands, out, config)
    return out


def _common(operands: Operands, num_warps: int) -> dict[str, Any]:
    """Constants that both kernels have."""
    from compiled_engine.custom_ops.triton_common import has_pdl

    pdl = has_pdl(operands.x.device)
    return {
        "SIZE": operands.weight.shape[1],
        "GATED": operands.is_gated,
        "HAS_BIAS": operands.bias is not None,
        "HAS_NORM": operands.norm_weight is not None,
        "HAS_RESIDUAL": operands.residual is not None,
        "PDL": pdl,
        "num_warps": num_warps,
        "launch_pdl": pdl,
    }


def _or_x(tensor: Tensor | None, x: Tensor) -> Tensor:
    """A tensor to pass where there is none; the kernel does not read it."""
    return x if tensor is None else tensor


def _launch_rows(operands: Operands, out: Tensor, config: RowConfig) -> None:
    from compiled_engine.custom_ops.gemm_skinny_row import row_kernel

    x, weight, bias, norm_weight, eps, residual, is_gated = operands
    assert x.shape[0] == 1, x.shape
    assert not is_gated or config.rows >= 2, config
    common = _common(operands, config.num_warps)
    num_blocks = -(-weight.shape[1] // config.block)
    outputs = config.rows // 2 if is_gated else config.rows
    row_kernel[(-(-operands.num_outputs // outputs),)](
        x,
        weight,
        _or_x(bias, x),
        _or_x(norm_weight, x),
        _or_x(residual, x),
        out,
        operands.num_outputs,
        eps,
        ROWS=config.rows,
        BLOCK=config.block,
        AHEAD=min(config.ahead, num_blocks),
        **common,
    )


def _launch_tiles(operands: Operands, out: Tensor, config: TileConfig) -> None:
    from compiled_engine.custom_ops.gemm_skinny_tile import tile_kernel

    x, weight, bias, norm_weight, eps, residual, is_gated = operands
    num_tokens = x.shape[0]
    padded = max(8, 1 << (num_tokens - 1).bit_length())
    common = _common(operands, config.num_warps)
    outputs = config.rows // 2 if is_gated else config.rows
    num_tiles = -(-operands.num_outputs // outputs)
    partials = counters = out
    if config.split > 1:
        assert num_tiles <= MAX_SPLIT_TILES, (num_tiles, MAX_SPLIT_TILES)
        counters = _counters(x.device)
        partials = torch.empty(
            num_tiles * config.split * (config.rows + 1) * padded,
            dtype=torch.float32,
            device=x.device,
        )
    tile_kernel[(num_tiles * config.split,)](
        x,
        weight,
        _or_x(bias, x),
        _or_x(norm_weight, x),
        _or_x(residual, x),
        out,
        partials,
        counters,
        num_tokens,
        operands.num_outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        TOKENS=padded,
        ROWS=config.rows,
        BLOCK=config.block,
        SPLIT=config.split,
        STAGES=config.stages,
        L2_FIRST=config.l2_first if common["PDL"] else 0,
        THREADS=32 * config.num_warps,
        **common,
    )
