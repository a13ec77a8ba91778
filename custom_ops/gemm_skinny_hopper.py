"""Kernel of `fused_linear` for few tokens on Hopper: TMA, WGMMA, and one warp that loads.

Formula: `out[t, n] = rstd[t] * sum_k weight[n, k] * (x[t, k] * g[k]) + bias[n]`, `rstd[t]` from the
sum of `x[t, k]^2` in the same loop; gated: silu of the gate's sum times the value's; plus
`residual[t, n]`. `x * g` is rounded to the weight's dtype for the tensor cores; everything else is
fp32, rounded once.

The weight is the left operand, so tokens are padded to 8, not to 64. Its blocks stream through a
ring of shared memory that is full before x has been written: the loading warp fills it before it
waits for the kernel that computes x. In the same spirit the next kernel is let in when this one has
asked for its last blocks, so that the next ring fills, and the memory does not rest, while this
kernel finishes. Four warps multiply; under the product of one block they scale the next block of x
by g, in place, and sum its squares.

Programs take equal stretches of all blocks (see `gemm_skinny_hopper_device`). Those that share a
tile leave their sums in `partials`, and the one that comes last, by a counter a tile, adds them up
in order, so results do not depend on who that was.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from compiled_engine.custom_ops.gemm_skinny import HopperConfig, Operands, num_multiprocessors
from compiled_engine.custom_ops.gemm_skinny_hopper_device import (
    CHUNK,
    EMPTY,
    PANEL,
    W_FULL,
    X_FULL,
    Constants,
    first_unit,
    load_units,
    owner,
    panel_row,
)


@gluon.jit
def _barriers(num: gl.constexpr) -> gl.tensor:
    bars = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _zeros(C: gl.constexpr) -> gl.tensor:
    """Sums of no columns yet, [64, tokens] of each panel."""
    panels: gl.constexpr = C.panels
    sums: gl.tuple = ()
    for _ in gl.static_range(panels):
        sums = sums + (gl.full([PANEL, C.tokens], 0, gl.float32, C.layout),)  # noqa: RUF005
    return sums


@gluon.jit
def _load_scales(norm_weight: gl.tensor, smem: gl.tensor, C: gl.constexpr) -> None:
    """Copies g to shared memory, where its blocks are at hand without a wait; 0 past its end."""
    chunks: gl.constexpr = C.scale_chunks
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    column = gl.arange(0, CHUNK, layout=layout)
    loaded: gl.tuple = ()
    for i in gl.static_range(chunks):
        at = norm_weight + i * CHUNK + column
        loaded = loaded + (gl.load(at, mask=i * CHUNK + column < C.size, other=0.0),)  # noqa: RUF005
    for i in gl.static_range(chunks):
        smem.index(i).store(loaded[i])


@gluon.jit
def _scale(
    x: gl.tensor,
    scales: gl.tensor,
    bars: gl.tensor,
    at: gl.tensor,
    block: gl.tensor,
    squares: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Multiplies a block of x by g, in place, and adds its squares [tokens, block].

    Every value has one thread, so nothing is read after it was multiplied. No load from global
    memory may be under way here: the fence would wait for it.
    """
    mbarrier.wait(bars[X_FULL].index(at % C.x_stages), (at // C.x_stages) & 1)
    x = x.index(at % C.x_stages)
    scale = scales.index(block).load(gl.SliceLayout(0, C.x_layout)).to(gl.float32)
    values = x.load(C.x_layout).to(gl.float32)
    x.store((values * scale[None, :]).to(x.dtype))
    fence_async_shared()
    gl.thread_barrier()
    return squares + values * values


@gluon.jit
def _start_products(
    w: gl.tensor, x: gl.tensor, sums: gl.tensor, stage: gl.tensor, C: gl.constexpr
) -> gl.tensor:
    panels: gl.constexpr = C.panels
    tokens: gl.tuple = ()
    for panel in gl.static_range(panels):
        token = warpgroup_mma(
            w.index(stage * C.panels + panel), x.permute((1, 0)), sums[panel], is_async=True
        )
        tokens = tokens + (token,)  # noqa: RUF005
    return tokens


@gluon.jit
def _end_products(tokens: gl.tensor, C: gl.constexpr) -> gl.tensor:
    if C.panels == 1:
        return (warpgroup_mma_wait(0, deps=tokens),)
    else:
        return warpgroup_mma_wait(0, deps=tokens)


@gluon.jit
def _multiply_block(
    w: gl.tensor,
    x: gl.tensor,
    bars: gl.tensor,
    at: gl.tensor,
    sums: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Starts the products of block number `at` of this program."""
    if not C.has_norm:
        mbarrier.wait(bars[X_FULL].index(at % C.x_stages), (at // C.x_stages) & 1)
    mbarrier.wait(bars[W_FULL].index(at % C.stages), (at // C.stages) & 1)
    return _start_products(w, x.index(at % C.x_stages), sums, at % C.stages, C)


@gluon.jit
def _release(bars: gl.tensor, at: gl.tensor, C: gl.constexpr) -> None:
    gl.thread_barrier()  # a warp waits for its own rows of a product only
    mbarrier.arrive(bars[EMPTY].index(at % C.stages), count=1)


@gluon.jit
def _multiply(
    buffers: gl.tensor,
    bars: gl.tensor,
    at: gl.tensor,
    begin: gl.tensor,
    count: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Sums [64, tokens] of each panel over blocks `begin` to `begin + count`; squares of x.

    `at` blocks of this program came before.
    """
    w, x, scales = buffers
    sums = _zeros(C)
    squares = gl.full([C.tokens, C.block], 0, gl.float32, C.x_layout)
    if C.has_norm:
        squares = _scale(x, scales, bars, at, begin, squares, C)
    for i in range(count - 1):
        started = _multiply_block(w, x, bars, at + i, sums, C)
        if C.has_norm:
            squares = _scale(x, scales, bars, at + i + 1, begin + i + 1, squares, C)
        sums = _end_products(started, C)
        _release(bars, at + i, C)
    sums = _end_products(_multiply_block(w, x, bars, at + count - 1, sums, C), C)
    _release(bars, at + count - 1, C)
    return sums, gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(0, C.layout))


@gluon.jit
def _join_parts(
    sums: gl.tensor,
    squares: gl.tensor,
    scratch: gl.tensor,
    tile: gl.tensor,
    num_units: gl.tensor,
    C: gl.constexpr,
) -> gl.tensor:
    """Leaves this program's sums; the last program of a tile gets all of them, added up in order.

    A program has at most two tiles that it shares. partials: [programs, 2, panels * 64 + 1, tokens]
    fp32: of the tile it starts within, or shares whole stretches of, and of the one it ends within;
    the last row holds the squares.
    """
    panels: gl.constexpr = C.panels
    partials, counters = scratch
    STEP: gl.constexpr = (C.panels * PANEL + 1) * C.tokens
    me = gl.program_id(0)
    first = owner(tile * C.blocks, gl.num_programs(0), num_units)
    last = owner((tile + 1) * C.blocks - 1, gl.num_programs(0), num_units)
    token = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, C.layout))
    row = gl.arange(0, PANEL, layout=gl.SliceLayout(1, C.layout))
    slots = row[:, None] * C.tokens + token[None, :]
    mine = partials + (2 * me + (me == first).to(gl.int32)).to(gl.int64) * STEP
    for panel in gl.static_range(panels):
        gl.store(mine + panel * PANEL * C.tokens + slots, sums[panel])
    gl.store(mine + C.panels * PANEL * C.tokens + token, squares)
    gl.thread_barrier()  # the counter's release covers this thread's own writes only
    is_last = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == last - first
    if is_last:
        sums = _zeros(C)
        squares = gl.zeros_like(squares)
        for program in range(first, last + 1):
            slot = 2 * program + (program == first).to(gl.int32)
            theirs = partials + slot.to(gl.int64) * STEP
            added: gl.tuple = ()
            for panel in gl.static_range(panels):
                at = theirs + panel * PANEL * C.tokens + slots
                added = added + (sums[panel] + gl.load(at, cache_modifier=".cg"),)  # noqa: RUF005
            sums = added
            at = theirs + C.panels * PANEL * C.tokens + token
            squares += gl.load(at, cache_modifier=".cg")
        gl.store(counters + tile, 0)
    return sums, squares, is_last


@gluon.jit
def _places(
    tile: gl.tensor, panel: gl.constexpr, strides: gl.tensor, num_tokens: gl.tensor,
    num_outputs: gl.tensor, C: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Offsets [64, tokens] into a tensor with rows of tokens, and which of them exist."""
    outputs: gl.constexpr = C.panels // 2 if C.is_gated else C.panels
    token = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, C.layout))[None, :]
    row = gl.arange(0, PANEL, layout=gl.SliceLayout(1, C.layout))[:, None]
    output = (tile * outputs + panel) * PANEL + row
    return token * strides + output, (token < num_tokens) & (output < num_outputs)


@gluon.jit
def _finish(
    sums: gl.tensor,
    squares: gl.tensor,
    added: gl.tensor,
    tile: gl.tensor,
    tensors: gl.tensor,
    sizes: gl.tensor,
    C: gl.constexpr,
) -> None:
    """Norm, bias, gate and residual (`added`) of complete sums, and the store."""
    panels: gl.constexpr = C.panels
    bias, _, _, out = tensors
    num_tokens, num_outputs, _, eps = sizes
    outputs: gl.constexpr = C.panels // 2 if C.is_gated else C.panels
    if C.has_norm:
        norm = gl.rsqrt(squares / C.size + eps)[None, :]
    ys: gl.tuple = ()
    for panel in gl.static_range(panels):
        y = sums[panel]
        if C.has_norm:
            y = y * norm
        if C.has_bias:
            row = panel_row(tile, panel, num_outputs, C)
            row = row + gl.arange(0, PANEL, layout=gl.SliceLayout(1, C.layout))
            last = num_outputs * (2 if C.is_gated else 1) - 1
            y = y + gl.load(bias + gl.minimum(row, last)).to(gl.float32)[:, None]
        ys = ys + (y,)  # noqa: RUF005
    for panel in gl.static_range(outputs):
        y = ys[panel]
        if C.is_gated:
            y = y / (1.0 + gl.exp(-y)) * ys[panel + outputs]
        if C.has_residual:
            y = y + added[panel].to(gl.float32)
        offsets, mask = _places(tile, panel, num_outputs, num_tokens, num_outputs, C)
        gl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply_units(
    buffers: gl.tensor,
    bars: gl.tensor,
    tensors: gl.tensor,
    scratch: gl.tensor,
    sizes: gl.tensor,
    num_units: gl.tensor,
    C: gl.constexpr,
) -> None:
    """The four warps that multiply: a tile, or this program's part of one, at a time."""
    _, norm_weight, residual, _ = tensors
    num_tokens, num_outputs, residual_stride, _ = sizes
    w_smem, x_smem, scales = buffers
    flat: gl.constexpr = w_smem.layout
    w = w_smem._reinterpret(w_smem.dtype, [C.stages * C.panels, PANEL, C.block], flat)
    x = x_smem._reinterpret(w_smem.dtype, [C.x_stages, C.tokens, C.block], flat)
    if C.has_norm:
        _load_scales(norm_weight, scales, C)
        plain: gl.constexpr = scales.layout
        blocks: gl.constexpr = C.scale_chunks * CHUNK // C.block
        scales = scales._reinterpret(scales.dtype, [blocks, C.block], plain)
    outputs: gl.constexpr = C.panels // 2 if C.is_gated else C.panels
    start = first_unit(gl.program_id(0), gl.num_programs(0), num_units)
    end = first_unit(gl.program_id(0) + 1, gl.num_programs(0), num_units)
    unit = start
    gdc_wait()
    while unit < end:
        tile = unit // C.blocks
        begin = unit - tile * C.blocks
        count = gl.minimum(C.blocks - begin, end - unit)
        added: gl.tuple = ()
        if C.has_residual:
            for panel in gl.static_range(outputs):
                offsets, mask = _places(tile, panel, residual_stride, num_tokens, num_outputs, C)
                added = added + (gl.load(residual + offsets, mask=mask, other=0.0),)  # noqa: RUF005
        sums, squares = _multiply((w, x, scales), bars, unit - start, begin, count, C)
        is_complete = count == C.blocks
        if count < C.blocks:
            sums, squares, is_complete = _join_parts(sums, squares, scratch, tile, num_units, C)
        if is_complete:
            _finish(sums, squares, added, tile, tensors, sizes, C)
        unit += count


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_outputs", "num_tiles", "residual_stride", "lead", "l2_blocks",
    ]
)  # fmt: skip
def hopper_kernel(
    w_desc: gl.tensor,
    x_desc: gl.tensor,
    weight: gl.tensor,
    bias: gl.tensor,
    norm_weight: gl.tensor,
    residual: gl.tensor,
    out: gl.tensor,
    partials: gl.tensor,
    counters: gl.tensor,
    num_tokens: gl.tensor,
    num_outputs: gl.tensor,
    num_tiles: gl.tensor,
    residual_stride: gl.tensor,
    eps: gl.tensor,
    lead: gl.tensor,
    l2_blocks: gl.tensor,
    C: gl.constexpr,
) -> None:
    """Grid: any number of programs up to the units there are. See the module docstring."""
    flat: gl.constexpr = w_desc.layout
    parts: gl.constexpr = C.block // PANEL
    buffers = (
        gl.allocate_shared_memory(w_desc.dtype, [C.stages * C.panels * parts, PANEL, PANEL], flat),
        gl.allocate_shared_memory(w_desc.dtype, [C.x_stages * parts, C.tokens, PANEL], flat),
        gl.allocate_shared_memory(
            w_desc.dtype, [C.scale_chunks, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
    )
    bars = (_barriers(C.stages), _barriers(C.x_stages), _barriers(C.stages), _barriers(1))
    fence_async_shared()
    num_units = num_tiles * C.blocks
    tensors = (bias, norm_weight, residual, out)
    sizes = (num_tokens, num_outputs, residual_stride, eps)
    ahead = (num_outputs, lead, l2_blocks)
    scratch = (partials, counters)
    gl.warp_specialize(
        [
            (_multiply_units, (buffers, bars, tensors, scratch, sizes, num_units, C)),
            (load_units, ((w_desc, x_desc), weight, buffers, bars, ahead, num_units, C)),
        ],
        [1],
        [40],
    )


def _aligned_rows(rows: Tensor, box_rows: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Rows for copies of `box_rows` rows and one panel of columns; a lone row has no stride."""
    stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    return TensorDescriptor(rows, list(rows.shape), [stride, 1], [box_rows, PANEL.value], layout)


def constants_of(operands: Operands, config: HopperConfig) -> Constants:
    """The compiled kernel that serves these arguments."""
    num_tokens, size = operands.x.shape
    return Constants(
        size=size,
        tokens=max(8, 1 << (num_tokens - 1).bit_length()),
        panels=config.rows // PANEL.value,
        block=config.block,
        blocks=-(-size // config.block),
        stages=config.stages,
        x_stages=config.x_stages,
        is_gated=operands.is_gated,
        has_bias=operands.bias is not None,
        has_norm=operands.norm_weight is not None,
        has_residual=operands.residual is not None,
    )


def max_registers(constants: Constants) -> int:
    """Of a thread: as many as leave room for three programs, or two, on a multiprocessor."""
    return 128 if constants.tokens * constants.panels >= 64 else 80


def launch_hopper(operands: Operands, out: Tensor, config: HopperConfig, counters: Tensor) -> None:
    """Launches the kernel on the current stream; `counters` has a zero for every tile."""
    x, weight, bias, norm_weight, eps, residual, is_gated = operands
    constants = constants_of(operands, config)
    num_tiles = -(-weight.shape[0] // config.rows)
    if is_gated:
        num_tiles = -(-operands.num_outputs // (config.rows // 2))
    wanted = config.parts * num_tiles or num_multiprocessors(x.device)
    programs = min(wanted, num_tiles * constants.blocks)
    assert num_tiles <= counters.shape[0], (num_tiles, counters.shape[0])
    assert programs * num_tiles * constants.blocks < 2**31, (programs, num_tiles)
    assert 2 <= config.x_stages <= config.stages, config
    partials = counters.view(torch.float32)  # not touched, unless some tile is shared
    if num_tiles % programs:
        shape = (programs, 2, config.rows + 1, constants.tokens)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    hopper_kernel[(programs,)](
        _aligned_rows(weight, PANEL.value, layout),
        _aligned_rows(x, constants.tokens, layout),
        weight,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        out,
        partials,
        counters,
        x.shape[0],
        operands.num_outputs,
        num_tiles,
        0 if residual is None else residual.stride(0),
        eps,
        config.lead,
        config.l2_blocks,
        constants,
        num_warps=4,
        maxnreg=max_registers(constants),
        launch_pdl=True,
    )
