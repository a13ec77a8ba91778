"""The kernels of `attention_work` on a GPU: the scan for common prefixes, and the launcher.

`scan_kernel`, a program a candidate, compares its first page, then its leading pages, with those of
the first candidate that has the same first page, and lists the query tiles of longer sequences.
`plan_kernel` (in `attention_work_plan`) makes the work list of what it finds.

Neither kernel lets the next one start early: later kernels read the work list, and KV of earlier
steps, before they wait for their direct predecessor, and that is safe only because nothing starts
before these have ended, and these end only when all that came before has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.attention_work import (
    MAX_CANDIDATES,
    MIN_MEMBERS,
    MIN_SHARED_POSITIONS,
    Heads,
    StepIndices,
    WorkShape,
    num_lanes,
    work_shape,
)
from compiled_engine.custom_ops.attention_work_plan import (
    Places,
    WorkConfig,
    candidates_at,
    plan_kernel,
)
from compiled_engine.custom_ops.triton_common import has_pdl, wait_for_previous


@triton.jit
def _list_query_tiles(
    me: tl.tensor, starts: tl.tensor, work: tl.tensor, at: tl.tuple, C: tl.constexpr
) -> None:
    """Lists the query tiles of sequence `me`, those that see most KV first."""
    places = tl.arange(0, C.padded)
    begin = tl.load(starts + places, mask=places < at.num_candidates, other=0)
    end = tl.load(starts + places + 1, mask=places < at.num_candidates, other=0)
    size: tl.constexpr = C.query_tile_tokens
    tiles = tl.where(end - begin > 1, (end - begin + size - 1) // size, 0)
    first = tl.sum(tl.where(places < me, tiles, 0), 0)
    count = tl.sum(tl.where(places == me, tiles, 0), 0)
    my_begin = tl.load(starts + me)
    for i in range(0, count, C.tile_block):
        tile = i + tl.arange(0, C.tile_block)
        mask = tile < count
        target = work + first + tile
        tl.store(target + at.tile_seq, tl.zeros_like(tile) + me, mask=mask)
        tl.store(target + at.tile_start, my_begin + (count - 1 - tile) * size, mask=mask)
    if me == 0:
        tl.store(work + C.header + C.num_query_tiles, tl.sum(tiles, 0))


@triton.jit
def _count_shared(
    mine: tl.tensor, his: tl.tensor, limit: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Number of leading entries below `limit` that are equal in two rows of the block table."""
    at = tl.arange(0, BLOCK)
    shared = limit * 0
    going = limit > 0
    while going:
        place = shared + at
        inside = place < limit
        my_page = tl.load(mine + place, mask=inside, other=0)
        his_page = tl.load(his + place, mask=inside, other=0)
        ends = (my_page != his_page) | (place >= limit)
        equal = tl.min(tl.where(ends, at, BLOCK), 0)
        shared += equal
        going = (equal == BLOCK) & (shared < limit)
    return shared


@triton.jit
def _find_leader(
    me: tl.tensor,
    block_table: tl.tensor,
    table_stride: tl.tensor,
    step: tl.tuple,
    at: tl.tuple,
    C: tl.constexpr,
) -> tl.tuple:
    """First candidate with the first page of `me` (or -1), and leading pages in common with it."""
    places = tl.arange(0, C.padded)
    _, row, length, _ = candidates_at(places, step, at, C)
    has_page = length >= C.page_size
    first_page = tl.load(block_table + row.to(tl.int64) * table_stride, mask=has_page, other=-1)
    is_me = places == me
    my_length = tl.sum(tl.where(is_me, length, 0), 0)
    my_row = tl.sum(tl.where(is_me, row, 0), 0)
    my_page = tl.sum(tl.where(is_me, first_page, 0), 0)
    same = (first_page == my_page) & has_page
    leader = my_length * 0 - 1
    shared = my_length * 0
    if (my_length >= C.page_size) & (tl.sum(same.to(tl.int32), 0) >= C.min_members):
        leader = tl.min(tl.where(same, places, C.padded), 0)
        is_leader = places == leader
        his_length = tl.sum(tl.where(is_leader, length, 0), 0)
        his_row = tl.sum(tl.where(is_leader, row, 0), 0)
        mine = block_table + my_row.to(tl.int64) * table_stride
        his = block_table + his_row.to(tl.int64) * table_stride
        limit = (tl.minimum(my_length, his_length) - 1) // C.page_size
        shared = _count_shared(mine, his, limit, C.page_block)
    return leader, shared


@triton.jit
def scan_kernel(
    block_table: tl.tensor,
    table_stride: tl.tensor,
    token_rows: tl.tensor,
    positions: tl.tensor,
    seq_rows: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    work: tl.tensor,
    at: tl.tuple,
    C: tl.constexpr,
) -> None:
    """Grid: one program a candidate. Writes its leader and shared pages, and its query tiles."""
    wait_for_previous(C.pdl)
    me = tl.program_id(0)
    if not C.is_decode:
        _list_query_tiles(me, starts, work, at, C)
    if C.has_groups:
        step = (token_rows, positions, seq_rows, seq_lens, starts)
        leader, shared = _find_leader(me, block_table, table_stride, step, at, C)
        tl.store(work + at.leaders + me, leader)
        tl.store(work + at.shared_pages + me, shared)


def launch_work(
    work: Tensor, shape: WorkShape, step: StepIndices, page_size: int, *, is_decode: bool
) -> None:
    """Fills a zeroed work list in place.

    Raises:
        ValueError: more candidates than one program handles.
    """
    count = shape.num_candidates
    if count > MAX_CANDIDATES:
        raise ValueError(f"{count} tokens or sequences decode at once; at most {MAX_CANDIDATES}")
    if count == 0:
        return
    starts = shape.starts
    config = WorkConfig(
        padded=max(4, triton.next_power_of_2(count)),
        num_seqs=step.seq_rows.shape[0],
        num_lanes=shape.num_lanes,
        padded_lanes=triton.next_power_of_2(shape.num_lanes),
        width=shape.members_per_tile,
        query_tile_tokens=shape.query_tile_tokens,
        page_size=page_size,
        min_pages=-(-MIN_SHARED_POSITIONS // page_size),
        lanes=starts["lanes"],
        units=starts["units"],
        is_decode=is_decode,
        has_groups=count >= MIN_MEMBERS,
        pdl=has_pdl(work.device),
    )
    sizes = {"num_candidates": count, "group_partial": shape.group_partial_start, **starts}
    at = Places(*(sizes[name] for name in Places._fields))
    table, *indices = step
    options = {"launch_pdl": True} if config.pdl else {}
    arguments = (table, table.stride(0), *indices, work, at, config)
    if config.has_groups or not is_decode:
        scan_kernel[(count,)](*arguments, num_warps=2, **options)
    plan_kernel[(1,)](*arguments, num_warps=4 if count <= 64 else 8, **options)


def attention_work_cuda(
    block_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    seq_rows: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    is_decode: bool,
) -> Tensor:
    """The work list made by the kernels; arguments and result as `reference_work`.

    Raises:
        ValueError: more candidates than one program handles.
    """
    step = StepIndices(block_table, token_rows, positions, seq_rows, seq_lens, query_start_loc)
    shape = work_shape(
        num_lanes(block_table.device, num_kv_heads),
        Heads(num_heads, num_kv_heads),
        token_rows.shape[0],
        seq_rows.shape[0],
        is_decode=is_decode,
    )
    step = StepIndices(*(tensor.contiguous() for tensor in step))
    work = block_table.new_zeros(shape.total_size)
    launch_work(work, shape, step, page_size, is_decode=is_decode)
    return work
