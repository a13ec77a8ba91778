"""State of the device scheduler: struct-of-arrays tensors over rows and pages, mutated in place.

`R` rows plus one dump row that takes the masked lanes of a scatter; `N` pages, page 0 is the null
page; `P` pages a row at most. `ring`, `free_token_pages` and the index tables have one dump place
behind their last real one, for the same purpose. Written by `plan` (inbox, release, match, admit,
take) and `advance` (tokens, publish, transitions); read by `layout`, `sampler` and `outbox`.

| tensor | shape, dtype | written by | read by |
|---|---|---|---|
| state | R+1 i8 | inbox, release, admit, advance | all |
| priority, arrival, gen, salt, num_prompt, max_len, grammar | R+1 | inbox | order, match, stop |
| score_from | R+1 i32 | inbox | match, logprobs |
| num_tokens (known), num_computed (KV written) | R+1 i32 | inbox, admit, release, advance | all |
| mask_pos | R+1 i32 | inbox | budget, unblock |
| pub_ok | R+1 bool | admit, publish | publish, deferral |
| num_cached | R+1 i32 | admit | outbox |
| owned, block_table | R+1 i32; R+1 x P i32 | admit, take, publish, release | layout, attention |
| ref, uid, parent_uid, index_slot, page_tokens | N | release, admit, take, publish | page maths |
| ring, ring_pos, head, tail | C+1 i32; N i64; scalars i64 | release, admit, take, publish | take |
| tkey, tpage | buckets+1 x ways | publish, take | match, publish |
| num_free, num_free_cached | scalars i32 | release, admit, take, publish | gate, take, outbox |
| token_table, token_pages, chain | paged token store | inbox, advance, release | match, layout |
| error | kinds i32 | inbox, advance | outbox |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_engine.scheduler.keys import place_steps

FREE, WAITING, PREFILL, DECODE, BLOCKED, RETRACTED, FINISHED, ABORTING = range(8)


class RowState:
    """Names of the row states, for tests and messages."""

    FREE = FREE
    WAITING = WAITING
    PREFILL = PREFILL
    DECODE = DECODE
    BLOCKED = BLOCKED
    RETRACTED = RETRACTED
    FINISHED = FINISHED
    ABORTING = ABORTING


ERROR_SUBMIT_TO_USED_ROW = 0
ERROR_MASK_WITHOUT_GRAMMAR = 1
ERROR_TOKENS_TO_IDLE_ROW = 2
ERROR_NO_TOKEN_PAGE = 3
ERROR_FORCED_ELSEWHERE = 4
NUM_ERROR_KINDS = 5

# Ring positions are absolute and may move below the start; -1 must stay outside their range.
RING_START = 1 << 40
NO_POSITION = -1
# `score_from` of a row that wants no log probabilities of its prompt.
NO_SCORES = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SchedulerShape:
    """Static sizes of one scheduler; every tensor shape follows from them.

    Attributes:
        max_rows: R, requests on the device at once.
        num_pages: N, KV pages including the null page.
        page_size: tokens of one page.
        max_model_len: longest row, tokens.
        max_tokens: largest token budget of a step.
        num_candidates: A, rows that can be admitted in one step.
        max_releases: F, rows whose pages are released in one step.
        index_buckets: buckets of the prefix index, a power of two.
        index_ways: entries of a bucket.
        key_bits: bits of a page key that are kept; fewer make collisions, for tests.
        token_page_size: tokens of one page of the token store, a multiple of `page_size`.
        num_token_pages: pages of the token store.
        max_submits, max_pieces, max_aborts, max_masks: inbox entries a step.
        max_forced: tokens that a grammar mask can bring with it, at most `token_page_size`; 0 takes
            32 or that.
        prefix_caching: match, defer and publish pages.
        vocab_size: sampled ids from it on, and below 0, are no tokens: they end their row.
    """

    max_rows: int
    num_pages: int
    page_size: int
    max_model_len: int
    max_tokens: int
    num_candidates: int = 32
    max_releases: int = 16
    index_buckets: int = 0
    index_ways: int = 8
    key_bits: int = 64
    token_page_size: int = 256
    num_token_pages: int = 0
    max_submits: int = 16
    max_pieces: int = 16
    max_aborts: int = 16
    max_masks: int = 64
    max_forced: int = 0
    prefix_caching: bool = True
    vocab_size: int = 2**31 - 1

    def __post_init__(self) -> None:
        if self.token_page_size % self.page_size:
            raise ValueError(
                f"token_page_size {self.token_page_size} is no multiple of "
                f"page_size {self.page_size}"
            )
        if not self.index_buckets:
            ways = max(4 * self.num_pages, self.index_ways)
            object.__setattr__(self, "index_buckets", _power_of_two(-(-ways // self.index_ways)))
        if self.index_buckets & (self.index_buckets - 1):
            raise ValueError(f"index_buckets {self.index_buckets} is no power of two")
        if not self.max_forced:
            object.__setattr__(self, "max_forced", min(32, self.token_page_size))
        if self.max_forced > self.token_page_size:
            raise ValueError(
                f"max_forced {self.max_forced} is more than token_page_size {self.token_page_size}"
            )
        if not self.num_token_pages:
            object.__setattr__(self, "num_token_pages", self.max_rows * self.token_table_width)

    @property
    def table_width(self) -> int:
        """P: pages a row can own."""
        return -(-self.max_model_len // self.page_size)

    @property
    def token_table_width(self) -> int:
        """Token pages a row can own."""
        return -(-self.max_model_len // self.token_page_size)

    @property
    def ring_size(self) -> int:
        """C: a power of two of at least 2 N."""
        return _power_of_two(2 * self.num_pages)

    @property
    def max_publishes(self) -> int:
        """K: pages that one step can complete at most."""
        return self.max_tokens // self.page_size + self.max_rows


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


class GroupState(NamedTuple):
    """Pages of one cache group. There is one group; layers that cache differently add theirs."""

    owned: Tensor  # [R + 1] i32, pages in the row's block table
    block_table: Tensor  # [R + 1, P] i32
    ref: Tensor  # [N] i32, table entries that name the page; ref[0] is 1 for ever
    uid: Tensor  # [N] i64, publication number, 0 = unpublished
    parent_uid: Tensor  # [N] i64, uid of the page before; -(salt + 1) for a first page
    index_slot: Tensor  # [N] i32, its place in the index, -1
    page_tokens: Tensor  # [N, page_size] i32
    ring: Tensor  # [C + 1] i32, free pages by position, dead entries between them
    ring_pos: Tensor  # [N] i64, position of a page's only valid entry, -1
    head: Tensor  # i64
    tail: Tensor  # i64
    uid_next: Tensor  # i64
    tkey: Tensor  # [buckets + 1, ways] i64
    tpage: Tensor  # [buckets + 1, ways] i32, 0 = empty
    num_free: Tensor  # i32, pages with ref 0
    num_free_cached: Tensor  # i32, of these, published ones


class SchedulerState(NamedTuple):
    """Everything `plan` and `advance` read and write. Rows are [R + 1], the last is the dump."""

    state: Tensor  # i8
    priority: Tensor  # i32
    arrival: Tensor  # i64, unique, increasing
    gen: Tensor  # i32
    salt: Tensor  # i64, at least 0
    num_prompt: Tensor  # i32
    max_len: Tensor  # i32, prompt plus answer at most
    grammar: Tensor  # bool
    score_from: Tensor  # i32, prompt positions from here on are computed and scored, never reused
    num_tokens: Tensor  # i32, tokens known
    num_computed: Tensor  # i32, tokens whose KV is written
    mask_pos: Tensor  # i32, last position that the grammar mask here serves, -1
    pub_ok: Tensor  # bool, the published chain is unbroken
    num_cached: Tensor  # i32, prompt tokens found cached at the first admission
    groups: tuple[GroupState, ...]
    token_table: Tensor  # [R + 1, token_table_width] i32; 0 = the null token page
    token_pages: Tensor  # [num_token_pages + 1, token_page_size] i32
    chain: Tensor  # [num_token_pages + 1, token_page_size / page_size] i64, key sums by page
    free_token_pages: Tensor  # [num_token_pages + 1] i32, a stack
    num_free_token_pages: Tensor  # i32
    place_steps: Tensor  # [page_size] i64, a constant of the key sums
    num_retractions: Tensor  # i64, total
    error: Tensor  # [kinds] i32


def new_state(shape: SchedulerShape, device: torch.device | str = "cpu") -> SchedulerState:
    """A scheduler with every row FREE and every page free and unpublished."""
    rows = shape.max_rows + 1

    def row(dtype: torch.dtype, fill: int = 0) -> Tensor:
        return torch.full((rows,), fill, dtype=dtype, device=device)

    def scalar(dtype: torch.dtype, value: int) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    token_pages = shape.num_token_pages
    return SchedulerState(
        state=row(torch.int8),
        priority=row(torch.int32),
        arrival=row(torch.int64),
        gen=row(torch.int32),
        salt=row(torch.int64),
        num_prompt=row(torch.int32),
        max_len=row(torch.int32),
        grammar=row(torch.bool),
        score_from=row(torch.int32, NO_SCORES),
        num_tokens=row(torch.int32),
        num_computed=row(torch.int32),
        mask_pos=row(torch.int32, -1),
        pub_ok=row(torch.bool),
        num_cached=row(torch.int32),
        groups=(_new_group(shape, device),),
        token_table=torch.zeros(rows, shape.token_table_width, dtype=torch.int32, device=device),
        token_pages=torch.zeros(
            token_pages + 1, shape.token_page_size, dtype=torch.int32, device=device
        ),
        chain=torch.zeros(
            token_pages + 1,
            shape.token_page_size // shape.page_size,
            dtype=torch.int64,
            device=device,
        ),
        free_token_pages=torch.arange(token_pages, -1, -1, dtype=torch.int32, device=device),
        num_free_token_pages=scalar(torch.int32, token_pages),
        place_steps=place_steps(shape.page_size, device),
        num_retractions=scalar(torch.int64, 0),
        error=torch.zeros(NUM_ERROR_KINDS, dtype=torch.int32, device=device),
    )


def _new_group(shape: SchedulerShape, device: torch.device | str) -> GroupState:
    pages, rows = shape.num_pages, shape.max_rows + 1

    def full(*size: int, dtype: torch.dtype, fill: int = 0) -> Tensor:
        return torch.full(size, fill, dtype=dtype, device=device)

    ref = full(pages, dtype=torch.int32)
    ref[0] = 1
    ring = full(shape.ring_size + 1, dtype=torch.int32)
    ring[: pages - 1] = torch.arange(1, pages, dtype=torch.int32, device=device)
    ring_pos = torch.arange(pages, dtype=torch.int64, device=device) + RING_START - 1
    ring_pos[0] = NO_POSITION
    return GroupState(
        owned=full(rows, dtype=torch.int32),
        block_table=full(rows, shape.table_width, dtype=torch.int32),
        ref=ref,
        uid=full(pages, dtype=torch.int64),
        parent_uid=full(pages, dtype=torch.int64),
        index_slot=full(pages, dtype=torch.int32, fill=-1),
        page_tokens=full(pages, shape.page_size, dtype=torch.int32),
        ring=ring,
        ring_pos=ring_pos,
        head=torch.tensor(RING_START, dtype=torch.int64, device=device),
        tail=torch.tensor(RING_START + pages - 1, dtype=torch.int64, device=device),
        uid_next=torch.tensor(1, dtype=torch.int64, device=device),
        tkey=full(shape.index_buckets + 1, shape.index_ways, dtype=torch.int64),
        tpage=full(shape.index_buckets + 1, shape.index_ways, dtype=torch.int32),
        num_free=torch.tensor(pages - 1, dtype=torch.int32, device=device),
        num_free_cached=torch.tensor(0, dtype=torch.int32, device=device),
    )


def known_tokens(shape: SchedulerShape, state: SchedulerState, row: int) -> list[int]:
    """The tokens a row knows, read back to the host (for tests and debugging; synchronises)."""
    count = int(state.num_tokens[row])
    pages = state.token_table[row].long()
    return state.token_pages[pages].flatten()[:count].tolist()
