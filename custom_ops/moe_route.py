"""Triton kernels of `route`, and their launcher: scores, the best experts, pairs sorted by expert.

Few tokens take one program. More take two kernels: the first has a program for some tokens each
and leaves how often they chose each expert, the second adds those counts up and sorts. A warp has
one token at a time, so that the best of its experts is found by reductions of a whole warp. All of
it is exact, so results do not depend on how tokens are cut into tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_engine.custom_ops.triton_common import has_pdl, let_next_start, wait_for_previous

# Values of tokens and experts that one program takes alone.
MAX_TABLE = 2048
# Tiles of tokens that many are cut into, at most.
MAX_TILES = 256
# Tokens of a tile at a time: of few tokens, of more than `FEW_TOKENS`, and in the second kernel.
FEW_ROWS, FEW_TOKENS, MANY_ROWS, SORT_ROWS = 4, 512, 8, 32
# Values of tokens and experts that the second kernel holds at a time.
SORT_TABLE = 4096
# Tiles whose counts are added at a time.
_CHUNK = tl.constexpr(32)
_TINY = tl.constexpr(1e-20)  # as in the reference
_LOWEST = tl.constexpr(-(2**31))


class Routing(NamedTuple):
    """How experts are chosen: the last arguments of `reference_moe.route`."""

    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    top_groups: int
    scale: float


@triton.jit
def _rank(values: tl.tensor) -> tl.tensor:
    """Integers that order as the values do, NaN first; above `_LOWEST`."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # no -0
    bits = tl.where(values == values, bits, 0x7FC00000)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(ranks: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The place [T, 1] of each row's largest rank; of equal ones the lower place."""
    largest = tl.max(ranks, axis=1, keep_dims=True)
    return tl.min(tl.where(ranks == largest, place, 0x7FFFFFFF), axis=1, keep_dims=True)


@triton.jit
def _in_best_groups(
    choice: tl.tensor,
    expert: tl.tensor,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """`choice` with -inf outside the best groups of each token."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = tl.arange(0, PADDED)[None, :]
    sums = tl.full((TOKENS, PADDED), float("-inf"), tl.float32)
    for g in range(GROUPS):
        mine = tl.where(expert // SIZE == g, choice, float("-inf"))
        first = tl.max(mine, axis=1)
        at = tl.argmax(mine, axis=1)
        second = tl.max(tl.where(expert == at[:, None], float("-inf"), mine), axis=1)
        sum_of_two = first + second if SIZE > 1 else first
        sums = tl.where(group == g, sum_of_two[:, None], sums)
    ranks = tl.where(group < GROUPS, _rank(sums), _LOWEST)
    is_kept = (expert < 0) & (choice > 0)
    for _ in range(TOP_GROUPS):
        best = _best(ranks, group)
        is_kept = is_kept | (expert // SIZE == best)
        ranks = tl.where(group == best, _LOWEST, ranks)
    return tl.where(is_kept, choice, float("-inf"))


@triton.jit
def score_tokens(
    logits: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    expert: tl.tensor,
    num_tokens: tl.tensor,
    EXPERTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
) -> tl.tensor:
    """Scores [T, E] in fp32, 0 outside."""
    mask = (token < num_tokens) & (expert < EXPERTS)
    values = tl.load(logits + token.to(tl.int64) * stride + expert, mask=mask, other=float("-inf"))
    values = values.to(tl.float32)
    if SOFTMAX:
        top = tl.max(values, axis=1, keep_dims=True)
        top = tl.where(token < num_tokens, top, 0.0)
        raised = tl.exp(values - top)
        total = tl.sum(raised, axis=1, keep_dims=True)
        scores = raised / tl.where(token < num_tokens, total, 1.0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-values))
    return scores


@triton.jit
def choose_experts(
    scores: tl.tensor,
    choice: tl.tensor,
    expert: tl.tensor,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_K: tl.constexpr,
) -> tl.tensor:
    """Takes the best K experts of each token.

    Returns weights and ids [T, PADDED_K], and which choice each expert is [T, PADDED], -1: none.
    """
    column = tl.arange(0, PADDED_K)[None, :]
    weights = tl.zeros((TOKENS, PADDED_K), tl.float32)
    ids = tl.zeros((TOKENS, PADDED_K), tl.int32)
    number = tl.full((TOKENS, PADDED), -1, tl.int32)
    ranks = tl.where(expert < EXPERTS, _rank(choice), _LOWEST)
    bits = scores.to(tl.int32, bitcast=True)
    for j in range(K):
        best = _best(ranks, expert)
        is_best = expert == best
        weight = tl.sum(tl.where(is_best, bits, 0), axis=1, keep_dims=True)
        weights = tl.where(column == j, weight.to(tl.float32, bitcast=True), weights)
        ids = tl.where(column == j, best, ids)
        number = tl.where(is_best, j, number)
        ranks = tl.where(is_best, _LOWEST, ranks)
    return weights, ids, number


@triton.jit
def _sort(
    number: tl.tensor,
    begin: tl.tensor,
    order: tl.tensor,
    token: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Stores a tile's pairs; `begin` [E]: where the tile's first pair of each expert goes."""
    chosen = (number >= 0).to(tl.int32)
    place = begin[None, :] + tl.cumsum(chosen, axis=0) - chosen
    tl.store(order + place, token * K + number, mask=number >= 0)


@triton.jit
def _store_offsets(offsets: tl.tensor, counts: tl.tensor, EXPERTS: tl.constexpr) -> tl.tensor:
    """Where each expert's pairs begin [E], from their counts; stored with the end of the last."""
    PADDED: tl.constexpr = counts.shape[0]
    expert = tl.arange(0, PADDED)
    ends = tl.cumsum(counts, axis=0)
    tl.store(offsets + 1 + expert, ends, mask=expert < EXPERTS)
    tl.store(offsets, 0)
    return ends - counts


@triton.jit
def route_kernel(
    logits: tl.tensor, bias: tl.tensor, weights: tl.tensor, ids: tl.tensor, order: tl.tensor,
    offsets: tl.tensor, counts: tl.tensor, num_tokens: tl.tensor, steps: tl.tensor,
    stride: tl.tensor, scale: tl.tensor, EXPERTS: tl.constexpr, K: tl.constexpr,
    SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    PADDED_K: tl.constexpr, IS_SINGLE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: tiles of `steps * ROWS` tokens. A single one, of one step, sorts too.

    Of several each leaves how often its tokens chose each expert: counts [tiles, PADDED].
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    expert = tl.arange(0, PADDED)[None, :]
    column = tl.arange(0, PADDED_K)[None, :]
    total = tl.zeros((ROWS, PADDED), tl.int32)
    wait_for_previous(PDL)
    for step in range(steps):
        token = (tile * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        scores = score_tokens(logits, stride, token, expert, num_tokens, EXPERTS, SOFTMAX)
        choice = scores
        if HAS_BIAS:
            choice += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        if GROUPS > 1:
            choice = _in_best_groups(choice, expert, EXPERTS, GROUPS, TOP_GROUPS, ROWS)
        chosen, best, number = choose_experts(
            scores, choice, expert, K, EXPERTS, ROWS, PADDED, PADDED_K
        )
        if RENORMALIZE:
            chosen = chosen / (tl.sum(chosen, axis=1, keep_dims=True) + _TINY)
        mask = (token < num_tokens) & (column < K)
        tl.store(weights + token * K + column, chosen * scale, mask=mask)
        tl.store(ids + token * K + column, best, mask=mask)
        number = tl.where(token < num_tokens, number, -1)
        if IS_SINGLE:
            mine = tl.sum((number >= 0).to(tl.int32), axis=0)
            begin = _store_offsets(offsets, mine, EXPERTS)
            _sort(number, begin, order, token, K)
        else:
            total += (number >= 0).to(tl.int32)
    if not IS_SINGLE:
        tl.store(counts + tile * PADDED + tl.arange(0, PADDED), tl.sum(total, axis=0))


@triton.jit
def sort_kernel(
    ids: tl.tensor, counts: tl.tensor, order: tl.tensor, offsets: tl.tensor,
    num_tokens: tl.tensor, tile_tokens: tl.tensor, EXPERTS: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: the tiles of `route_kernel`. Sorts a tile's pairs behind those of the tiles before."""
    let_next_start(PDL)
    tile = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    wait_for_previous(PDL)
    before = tl.zeros((_CHUNK, PADDED), tl.int32)
    total = tl.zeros((_CHUNK, PADDED), tl.int32)
    for first in tl.range(0, tl.num_programs(0), _CHUNK, num_stages=2):
        other = first + tl.arange(0, _CHUNK)[:, None]
        at = counts + other * PADDED + expert[None, :]
        theirs = tl.load(at, mask=other < tl.num_programs(0), other=0)
        total += theirs
        before += tl.where(other < tile, theirs, 0)
    sums = tl.sum(total, axis=0)
    begin = tl.cumsum(sums, axis=0) - sums + tl.sum(before, axis=0)
    if tile == 0:
        _store_offsets(offsets, sums, EXPERTS)
    last = tl.minimum((tile + 1) * tile_tokens, num_tokens)
    for first in range(tile * tile_tokens, last, ROWS):
        token = first + tl.arange(0, ROWS)[:, None]
        number = tl.full((ROWS, PADDED), -1, tl.int32)
        for j in tl.static_range(K):
            best = tl.load(ids + token * K + j, mask=token < last, other=-1)
            number = tl.where(expert[None, :] == best, j, number)
        _sort(number, begin, order, token, K)
        begin += tl.sum((number >= 0).to(tl.int32), axis=0)


@dataclass(frozen=True)
class Cut:
    """How tokens are cut into tiles.

    Attributes:
        rows: tokens of a tile at a time.
        steps: through a tile.
        tiles: in all; one of one step sorts by itself.
        sort_rows: tokens of a tile that the second kernel takes at a time.
    """

    rows: int
    steps: int
    tiles: int
    sort_rows: int


def cut(num_tokens: int, padded: int) -> Cut:
    """How `num_tokens` tokens, at least one, are cut; `padded` experts."""
    single = triton.next_power_of_2(num_tokens)
    if single * padded <= MAX_TABLE:
        return Cut(single, 1, 1, 0)
    rows = FEW_ROWS if num_tokens <= FEW_TOKENS else MANY_ROWS
    steps = triton.cdiv(num_tokens, rows * MAX_TILES)
    sort_rows = min(rows * triton.next_power_of_2(steps), SORT_ROWS, max(1, SORT_TABLE // padded))
    return Cut(rows, steps, triton.cdiv(num_tokens, rows * steps), sort_rows)


def launch_route(
    logits: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference_moe.route`, for what the candidate in `moe_choice` takes."""
    assert logits.shape[0] * routing.top_k < 2**31, (logits.shape, routing)
    num_tokens, num_experts = logits.shape
    k = routing.top_k
    weights = logits.new_empty((num_tokens, k), dtype=torch.float32)
    ids = logits.new_empty((num_tokens, k), dtype=torch.int32)
    order = logits.new_empty(num_tokens * k, dtype=torch.int32)
    offsets = logits.new_empty(num_experts + 1, dtype=torch.int32)
    if num_tokens == 0:
        return weights, ids, order, offsets.zero_()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    padded = triton.next_power_of_2(num_experts)
    sizes = cut(num_tokens, padded)
    is_single = sizes.sort_rows == 0
    counts = offsets if is_single else offsets.new_empty((sizes.tiles, padded))
    pdl = has_pdl(logits.device)
    route_kernel[(sizes.tiles,)](
        logits, logits if bias is None else bias, weights, ids, order, offsets, counts,
        num_tokens, sizes.steps, logits.stride(0), float(routing.scale),
        EXPERTS=num_experts,
        K=k,
        SOFTMAX=routing.scoring == "softmax",
        HAS_BIAS=bias is not None,
        RENORMALIZE=routing.renormalize,
        GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups,
        ROWS=sizes.rows,
        PADDED=padded,
        PADDED_K=triton.next_power_of_2(k),
        IS_SINGLE=is_single,
        PDL=pdl,
        num_warps=min(16, max(1, sizes.rows * min(32, padded) // 32)),
        launch_pdl=pdl,
    )  # fmt: skip
    if not is_single:
        sort_kernel[(sizes.tiles,)](
            ids, counts, order, offsets, num_tokens, sizes.rows * sizes.steps,
            EXPERTS=num_experts,
            K=k,
            ROWS=sizes.sort_rows,
            PADDED=padded,
            PDL=pdl,
            num_warps=min(8, max(1, padded // 16)),
            launch_pdl=pdl,
        )  # fmt: skip
    return weights, ids, order, offsets
