"""Device functions of the Hopper kernel of `fused_linear`: shares of the work, the loading warp.

The work is a line of units: tile after tile, the blocks of columns of each. Every program takes an
equal stretch of the line, so it may start and end within a tile; what shares a tile adds up in the
end. The functions that say who does what use plain integer arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PANEL = gl.constexpr(64)  # rows of one product, and columns of one swizzled panel of shared memory
CHUNK = gl.constexpr(1024)  # values of g that the four warps copy at a time

# places in the tuple of barriers
W_FULL = gl.constexpr(0)
X_FULL = gl.constexpr(1)
EMPTY = gl.constexpr(2)
WARM = gl.constexpr(3)


@dataclass(frozen=True)
class Constants:
    """What a compiled kernel is made for.

    Attributes:
        size: columns of the weight.
        tokens: padded to a power of two, 8 at least.
        panels: of 64 rows of the weight in a tile; gated: the second half holds the values' rows.
        block: columns of a unit, a multiple of 64.
        blocks: units of a tile.
        stages: blocks of the weight that shared memory holds.
        x_stages: blocks of x that shared memory holds, at most `stages`.
        is_gated, has_bias, has_norm, has_residual: the parts of the formula.
    """

    size: int
    tokens: int
    panels: int
    block: int
    blocks: int
    stages: int
    x_stages: int
    is_gated: bool
    has_bias: bool
    has_norm: bool
    has_residual: bool

    @property
    def scale_chunks(self) -> int:
        """Chunks of shared memory for g; one, not used, where there is no norm."""
        return -(-self.blocks * self.block // CHUNK.value) if self.has_norm else 1

    @property
    def layout(self) -> gl.NVMMADistributedLayout:
        """Of the sums of one panel, [64, tokens]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.tokens, 16])

    @property
    def x_layout(self) -> gl.BlockedLayout:
        """Of a block of x, [tokens, block]: every value in one thread of four warps."""
        values = min(8, self.tokens * self.block // 128)
        lanes = min(32, self.block // values)
        return gl.BlockedLayout([1, values], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def first_unit(program: gl.tensor, num_programs: gl.tensor, num_units: gl.tensor) -> gl.tensor:
    """Where on the line the program's stretch begins; that of the next program ends it."""
    return program * num_units // num_programs


@gluon.jit
def owner(unit: gl.tensor, num_programs: gl.tensor, num_units: gl.tensor) -> gl.tensor:
    """The program whose stretch holds the unit."""
    return ((unit + 1) * num_programs - 1) // num_units


@gluon.jit
def panel_row(
    tile: gl.tensor, panel: gl.constexpr, num_outputs: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    """First row of the weight that a panel of a tile holds."""
    if C.is_gated:
        half: gl.constexpr = C.panels // 2
        row = (tile * half + panel % half) * PANEL + (panel // half) * num_outputs
    else:
        row = (tile * C.panels + panel) * PANEL
    return row


@gluon.jit
def _load_weights(
    desc: gl.tensor,
    unit: gl.tensor,
    stage: gl.tensor,
    smem: gl.tensor,
    full: gl.tensor,
    num_outputs: gl.tensor,
    C: gl.constexpr,
) -> None:
    panels: gl.constexpr = C.panels
    parts: gl.constexpr = C.block // PANEL
    tile = unit // C.blocks
    column = (unit - tile * C.blocks) * C.block
    bar = full.index(stage)
    mbarrier.expect(bar, C.panels * PANEL * C.block * 2)
    for panel in gl.static_range(panels):
        row = panel_row(tile, panel, num_outputs, C)
        for part in gl.static_range(parts):
            box = smem.index((stage * C.panels + panel) * parts + part)
            tma.async_copy_global_to_shared(desc, [row, column + part * PANEL], bar, box)


@gluon.jit
def _load_x(
    desc: gl.tensor,
    unit: gl.tensor,
    stage: gl.tensor,
    smem: gl.tensor,
    full: gl.tensor,
    C: gl.constexpr,
) -> None:
    parts: gl.constexpr = C.block // PANEL
    column = (unit % C.blocks) * C.block
    bar = full.index(stage)
    mbarrier.expect(bar, C.tokens * C.block * 2)
    for part in gl.static_range(parts):
        box = smem.index(stage * parts + part)
        tma.async_copy_global_to_shared(desc, [0, column + part * PANEL], bar, box)


@gluon.jit
def _ask_l2(
    weight: gl.tensor,
    unit: gl.tensor,
    blocks: gl.tensor,
    num_outputs: gl.tensor,
    C: gl.constexpr,
) -> None:
    """Asks L2 for up to `blocks` blocks of one tile, from `unit` on.

    A bulk prefetch takes its address from a register of the whole warp, so lanes take turns.
    """
    panels: gl.constexpr = C.panels
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = unit // C.blocks
    column = (unit - tile * C.blocks) * C.block
    length = gl.maximum(gl.minimum(C.size - column, blocks * C.block), 0) * 2
    last = num_outputs * (2 if C.is_gated else 1) - 1
    for panel in gl.static_range(panels):
        row = panel_row(tile, panel, num_outputs, C) + gl.arange(0, PANEL, layout=layout)
        row = gl.minimum(row, last)
        start = (weight + (row.to(gl.int64) * C.size + column)).to(gl.uint64)
        lengths = gl.full([PANEL], 0, gl.int32, layout) + length
        gl.inline_asm_elementwise(
            """{
            .reg .pred has_row;
            setp.ne.u32 has_row, $2, 0;
            @has_row cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [start, lengths],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _prepare_x(desc: gl.tensor, smem: gl.tensor, bar: gl.tensor, C: gl.constexpr) -> None:
    """Has x's descriptor fetched by a copy from outside of x, which writes zeros."""
    mbarrier.expect(bar, C.tokens * PANEL * 2)
    tma.async_copy_global_to_shared(desc, [0, C.blocks * C.block], bar, smem.index(0))
    mbarrier.wait(bar, 0)


@gluon.jit
def load_units(
    descs: gl.tensor,
    weight: gl.tensor,
    buffers: gl.tensor,
    bars: gl.tensor,
    sizes: gl.tensor,
    num_units: gl.tensor,
    C: gl.constexpr,
) -> None:
    """The loading warp: the weight's blocks at once, those of x when they have been written.

    Both rings are as far ahead as they can be of the block that was released last. The next kernel
    may start when `lead` blocks of the weight are still to be asked for; L2 is asked for
    `l2_blocks` blocks after those of the first ring.
    """
    w_desc, x_desc = descs
    w_smem, x_smem, _ = buffers
    num_outputs, lead, l2_blocks = sizes
    unit = first_unit(gl.program_id(0), gl.num_programs(0), num_units)
    num = first_unit(gl.program_id(0) + 1, gl.num_programs(0), num_units) - unit
    if num - C.stages <= lead:
        gdc_launch_dependents()
    for i in range(gl.minimum(num, C.stages)):
        _load_weights(w_desc, unit + i, i, w_smem, bars[W_FULL], num_outputs, C)
    if (l2_blocks > 0) & (num > C.stages):
        blocks = gl.minimum(l2_blocks, num - C.stages)
        _ask_l2(weight, unit + C.stages, blocks, num_outputs, C)
    _prepare_x(x_desc, x_smem, bars[WARM].index(0), C)
    gdc_wait()
    for i in range(gl.minimum(num, C.x_stages)):
        _load_x(x_desc, unit + i, i, x_smem, bars[X_FULL], C)
    for i in range(num - C.x_stages):
        mbarrier.wait(bars[EMPTY].index(i % C.stages), (i // C.stages) & 1)
        ahead = i + C.stages
        if ahead < num:
            _load_weights(w_desc, unit + ahead, i % C.stages, w_smem, bars[W_FULL], num_outputs, C)
            if num - 1 - ahead == lead:
                gdc_launch_dependents()
        x_ahead = i + C.x_stages
        _load_x(x_desc, unit + x_ahead, x_ahead % C.x_stages, x_smem, bars[X_FULL], C)
