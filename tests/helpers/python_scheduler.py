"""A scalar scheduler in plain Python: the oracle of the tensor scheduler.

Owns the whole policy a second time, one row, page and candidate after another, so that a reader
can check it line by line. Owns no tensors and shares no code with the engine; only the shape record
comes from there. The page pool and its prefix index live in `python_pool.py`. Small methods that
the known traps change (`matches_page`, `charge`, `target_pages`, ...) are separate so that tests
can override one and show what breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from tests.helpers.python_pool import PublishEntry, PythonPool
from tests.helpers.scheduler_keys import chain_links, next_link, page_key, root_link


class RowState(IntEnum):
    """States of a row, numbered as the engine numbers them."""

    FREE = 0
    WAITING = 1
    PREFILL = 2
    DECODE = 3
    BLOCKED = 4
    RETRACTED = 5
    FINISHED = 6
    ABORTING = 7


RUNNABLE = (RowState.PREFILL, RowState.DECODE)
RESIDENT = (RowState.PREFILL, RowState.DECODE, RowState.BLOCKED)
LIVE = (RowState.WAITING, *RESIDENT, RowState.RETRACTED)
ENDED = (RowState.FINISHED, RowState.ABORTING)

NO_SCORES = 2**31 - 1  # of a row whose prompt is not scored

SUBMIT_TO_USED_ROW, MASK_WITHOUT_GRAMMAR, TOKENS_TO_IDLE_ROW = range(3)
NO_TOKEN_PAGE, FORCED_ELSEWHERE = range(3, 5)


class Shape(Protocol):
    """The sizes the oracle reads; the engine's `SchedulerShape` has them."""

    @property
    def max_rows(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def num_candidates(self) -> int: ...

    @property
    def max_releases(self) -> int: ...

    @property
    def index_buckets(self) -> int: ...

    @property
    def index_ways(self) -> int: ...

    @property
    def key_bits(self) -> int: ...

    @property
    def prefix_caching(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass
class PythonRow:
    """One request's state; pages and links are plain lists."""

    index: int
    state: RowState = RowState.FREE
    priority: int = 0
    arrival: int = 0
    gen: int = -1
    salt: int = 0
    num_prompt: int = 0
    max_len: int = 0
    grammar: bool = False
    score_from: int = NO_SCORES
    tokens: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    mask_pos: int = -1
    pub_ok: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Place in policy order: lower runs first."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and sampled ones."""
        return len(self.tokens)

    @property
    def mask_missing(self) -> bool:
        """True while a grammar mask for the next position has not arrived."""
        return self.grammar and self.mask_pos < len(self.tokens)

    @property
    def want(self) -> int:
        """Tokens this row could compute now, page pressure aside."""
        if self.state not in RUNNABLE:
            return 0
        return max(0, self.num_tokens - self.num_computed - int(self.mask_missing))


@dataclass
class PythonPlan:
    """What one step does, by row index, plus what a test may want to look at."""

    give: dict[int, int] = field(default_factory=dict)
    rank: list[int] = field(default_factory=list)
    emit: set[int] = field(default_factory=set)
    victim: int = -1
    admitted: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    matched: dict[int, list[int]] = field(default_factory=dict)
    deferred: list[int] = field(default_factory=list)
    unmet_pages: int = 0


class PythonScheduler:
    """Plans and advances steps of one engine, scalar and readable."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows = [PythonRow(index) for index in range(shape.max_rows)]
        self.pool = PythonPool(
            shape.num_pages,
            shape.index_buckets,
            shape.index_ways,
            shape.key_bits,
            shape.max_tokens // shape.page_size + shape.max_rows,
        )
        self.errors = [0] * 5
        self.current = PythonPlan()

    # ---- inbox -------------------------------------------------------------------------------

    def apply_inbox(self, applied: Sequence[object]) -> None:
        """Applies entries: submits, then aborts, then masks, each in the given order.

        An entry with `prompt` is a submit, one with `position` is a mask, any other is an abort.
        """
        for entry in applied:
            if hasattr(entry, "prompt"):
                self._submit(entry)
        for entry in applied:
            if not hasattr(entry, "prompt") and not hasattr(entry, "position"):
                row = self.rows[entry.row]  # type: ignore[attr-defined]
                if row.gen == entry.gen and row.state in LIVE:  # type: ignore[attr-defined]
                    row.state = RowState.ABORTING
        for entry in applied:
            if hasattr(entry, "position"):
                self._mask(entry)
        for row in self.rows:
            if row.state is RowState.BLOCKED and not row.mask_missing:
                row.state = RowState.DECODE

    def _submit(self, entry: object) -> None:
        row = self.rows[entry.row]  # type: ignore[attr-defined]
        if row.state is not RowState.FREE:
            self.errors[SUBMIT_TO_USED_ROW] += 1
            return
        fields = ("gen", "arrival", "priority", "salt", "max_len", "grammar", "score_from")
        values = {name: getattr(entry, name) for name in fields}
        tokens = list(entry.prompt)  # type: ignore[attr-defined]
        self.rows[row.index] = PythonRow(
            row.index,
            state=RowState.WAITING,
            num_prompt=len(tokens),
            tokens=tokens,
            links=chain_links(values["salt"], tokens, self.shape.page_size),
            **values,
        )

    def _mask(self, entry: object) -> None:
        row = self.rows[entry.row]  # type: ignore[attr-defined]
        if row.gen != entry.gen or row.state not in LIVE:  # type: ignore[attr-defined]
            return
        if not row.grammar:
            self.errors[MASK_WITHOUT_GRAMMAR] += 1
            return
        forced = entry.forced  # type: ignore[attr-defined]
        position = entry.position  # type: ignore[attr-defined]
        if forced and row.num_tokens + len(forced) != position:
            self.errors[FORCED_ELSEWHERE] += 1
            return
        for token in forced:
            self._append(row, token)
        if forced and row.state is RowState.BLOCKED:
            row.state = RowState.PREFILL
        row.mask_pos = max(row.mask_pos, position)

    # ---- plan --------------------------------------------------------------------------------

    def plan(self, applied: Sequence[object], budget: int) -> PythonPlan:
        """Decides one step: who is admitted, who computes how many tokens, who is retracted."""
        self.current = PythonPlan()
        self.apply_inbox(applied)
        self._release()
        budget = min(budget, self.shape.max_tokens)
        self._admit(budget)
        order = self._step_order()
        wanted = self._budget(order, budget)
        self._take_pages(order, wanted)
        self._pick_victim()
        plan = self.current
        plan.rank = [row.index for row in order if plan.give[row.index] > 0]
        for index in plan.rank:
            row = self.rows[index]
            if row.num_computed + plan.give[index] == row.num_tokens:
                plan.emit.add(index)
        return plan

    def awaits_release(self, row: PythonRow) -> bool:
        """True for rows whose pages a later plan gives back."""
        return row.state in ENDED or (row.state is RowState.RETRACTED and bool(row.pages))

    def _release(self) -> None:
        ready = [row for row in self.rows if self.awaits_release(row)][: self.shape.max_releases]
        self.current.released = [row.index for row in ready]
        touched: list[int] = []
        for row in ready:
            touched += reversed(row.pages)
            row.pages, row.num_computed = [], 0
            if row.state in ENDED:
                row.state = RowState.FREE
        self.pool.release(self.touch_order(touched), touched)

    def touch_order(self, touched: Sequence[int]) -> list[int]:
        """Returns distinct pages by their last place: children leave before their parents."""
        return list(reversed(dict.fromkeys(reversed(touched))))

    def target_pages(self, row: PythonRow) -> int:
        """Pages the whole known text and one page of growth need; the last token needs no KV."""
        return self._pages(min(row.num_tokens + self.shape.page_size, row.max_len - 1))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.shape.page_size)

    def _match_limit(self, row: PythonRow) -> int:
        if not self.shape.prefix_caching:
            return 0
        return min(row.num_tokens - 1, row.score_from) // self.shape.page_size

    def page_tokens(self, row: PythonRow, index: int) -> tuple[int, ...]:
        """Returns the tokens of page `index` of the row's text."""
        size = self.shape.page_size
        return tuple(row.tokens[index * size : (index + 1) * size])

    def row_key(self, row: PythonRow, index: int) -> int:
        """Returns the chain key of page `index` of the row's text."""
        return page_key(row.links[index], self.shape.key_bits)

    def matches_page(self, page: int, tokens: tuple[int, ...], parent_uid: int) -> bool:
        """True if a page found by key holds exactly this text after exactly this parent."""
        return self.pool.page_tokens[page] == tokens and self.pool.parent_uid[page] == parent_uid

    def _match(self, row: PythonRow) -> list[int]:
        pages: list[int] = []
        parent_uid = -(row.salt + 1)
        for index in range(self._match_limit(row)):
            page = self.pool.find(self.row_key(row, index))
            if page == 0 or not self.matches_page(page, self.page_tokens(row, index), parent_uid):
                break
            pages.append(page)
            parent_uid = self.pool.uid[page]
        return pages

    def is_deferred(self, row: PythonRow, earlier: Sequence[PythonRow]) -> bool:
        """True if a row ahead is about to compute the page this candidate misses first."""
        matched = self.current.matched
        missing = len(matched[row.index])
        if missing >= self._match_limit(row):
            return False
        key = self.row_key(row, missing)
        for other in earlier:
            index = len(matched[other.index])
            if self.can_fill(other, index) and self.row_key(other, index) == key:
                return True
        for other in self.rows:
            index = other.num_computed // self.shape.page_size
            if (
                other.state is RowState.PREFILL
                and other.pub_ok
                and self.ahead(other, row)
                and self.can_fill(other, index)
                and self.row_key(other, index) == key
            ):
                return True
        return False

    def can_fill(self, row: PythonRow, index: int) -> bool:
        """True if the row can compute all of page `index` without a token a mask holds back."""
        held = int(row.mask_missing)
        return (index + 1) * self.shape.page_size <= row.num_tokens - held

    def ahead(self, other: PythonRow, row: PythonRow) -> bool:
        """True if `other` comes before `row` in policy order."""
        return other.key < row.key

    def reserve_pages(self) -> int:
        """Pages that resident rows still need for their own targets."""
        residents = (row for row in self.rows if row.state in RESIDENT)
        return sum(max(0, self.target_pages(row) - len(row.pages)) for row in residents)

    def charge(self, row: PythonRow, matched: Sequence[int], touched: set[int]) -> int:
        """Free pages that admitting the row uses up: cached ones it revives, and new ones."""
        revived = {page for page in matched if self.pool.ref[page] == 0} - touched
        return len(revived) + self.target_pages(row) - len(matched)

    def has_tokens_left(self, budget: int, wanted: int) -> bool:
        """True if a candidate would get at least one token of this step."""
        return wanted < budget

    def _admit(self, budget: int) -> None:
        plan = self.current
        waiting = [
            row
            for row in self.rows
            if row.state is RowState.WAITING or (row.state is RowState.RETRACTED and not row.pages)
        ]
        candidates = sorted(waiting, key=lambda row: row.key)[: self.shape.num_candidates]
        plan.candidates = [row.index for row in candidates]
        plan.matched = {row.index: self._match(row) for row in candidates}
        allowed = [
            row for i, row in enumerate(candidates) if not self.is_deferred(row, candidates[:i])
        ]
        plan.deferred = [row.index for row in candidates if row not in allowed]
        room = self.pool.num_free - self.reserve_pages()
        wanted = sum(row.want for row in self.rows)
        touched: set[int] = set()
        charged = 0
        passed: list[PythonRow] = []
        for row in allowed:
            matched = plan.matched[row.index]
            charged += self.charge(row, matched, touched)
            touched.update(matched)
            if charged > room or not self.has_tokens_left(budget, wanted):
                break
            passed.append(row)
            held = int(row.mask_missing)
            wanted += row.num_tokens - len(matched) * self.shape.page_size - held
        for row in passed:
            self._enter(row, plan.matched[row.index])
        plan.admitted = [row.index for row in passed]

    def _enter(self, row: PythonRow, matched: Sequence[int]) -> None:
        for page in matched:
            self.pool.hold(page)
        row.pages = list(matched)
        row.num_computed = len(matched) * self.shape.page_size
        row.pub_ok = self.shape.prefix_caching
        if row.state is RowState.WAITING:
            row.num_cached = min(row.num_computed, row.num_prompt)
        row.state = RowState.PREFILL

    def _step_order(self) -> list[PythonRow]:
        admitted = set(self.current.admitted)

        def place(row: PythonRow) -> tuple[int, tuple[int, int]]:
            if row.state is RowState.DECODE:
                return (0, row.key)
            return (2 if row.index in admitted else 1, row.key)

        return sorted((row for row in self.rows if row.state in RUNNABLE), key=place)

    def _budget(self, order: Iterable[PythonRow], budget: int) -> dict[int, int]:
        left = budget
        wanted: dict[int, int] = {}
        for row in order:
            wanted[row.index] = max(0, min(left, row.want))
            left -= row.want
        return wanted

    def _take_pages(self, order: Iterable[PythonRow], wanted: Mapping[int, int]) -> None:
        plan = self.current
        self._short: list[PythonRow] = []
        for row in order:
            give = wanted[row.index]
            need = max(0, self._pages(row.num_computed + give) - len(row.pages))
            got = min(need, self.pool.num_free)
            row.pages += [self.pool.take() for _ in range(got)]
            if got < need:
                self._short.append(row)
                plan.unmet_pages += need - got
            room = len(row.pages) * self.shape.page_size - row.num_computed
            plan.give[row.index] = min(give, room)

    def _pick_victim(self) -> None:
        residents = [row for row in self.rows if row.state in RESIDENT and row.pages]
        if not self._short or self.waits_for_release() or not residents:
            return
        last = max(residents, key=lambda row: row.key)
        if any(row.key < last.key for row in self._short) or self.is_stuck():
            self.current.victim = last.index

    def waits_for_release(self) -> bool:
        """True while rows that ended did not all fit in this step's release."""
        return any(self.awaits_release(row) for row in self.rows)

    def is_stuck(self) -> bool:
        """True if no row got any token although pages are short: a reason to retract."""
        return not any(self.current.give.values())

    # ---- advance -----------------------------------------------------------------------------

    def advance(self, tokens: Mapping[int, int], stops: Mapping[int, bool]) -> None:
        """Books one computed step: appends sampled tokens, publishes pages, moves states.

        Args:
            tokens: sampled token of every row in the plan's `emit`; for any row that computed
                tokens, an id outside the vocabulary if its sampler found none.
            stops: whether that token ends the request.
        """
        plan = self.current
        failed = {i for i in plan.rank if not 0 <= tokens.get(i, 0) < self.shape.vocab_size}
        completed: dict[int, range] = {}
        for row in self.rows:
            give = plan.give.get(row.index, 0)
            if give == 0:
                continue
            size = self.shape.page_size
            first = row.num_computed // size
            row.num_computed += give
            if row.index in failed:
                row.state = RowState.FINISHED
                continue
            completed[row.index] = range(first, row.num_computed // size)
            if row.index in plan.emit:
                self._append(row, tokens[row.index])
        self._publish(completed)
        for index in plan.emit - failed:
            row = self.rows[index]
            is_over = stops.get(index, False) or row.num_tokens == row.max_len
            going_on = RowState.BLOCKED if row.mask_missing else RowState.DECODE
            row.state = RowState.FINISHED if is_over else going_on
        if plan.victim >= 0 and self.rows[plan.victim].state in RESIDENT:
            self.rows[plan.victim].state = RowState.RETRACTED

    def _append(self, row: PythonRow, token: int) -> None:
        row.tokens.append(token)
        index, rest = divmod(row.num_tokens, self.shape.page_size)
        if rest == 0:
            link = row.links[-1] if row.links else root_link(row.salt)
            row.links.append(next_link(link, index - 1, self.page_tokens(row, index - 1)))

    def _publish(self, completed: Mapping[int, range]) -> None:
        if not self.shape.prefix_caching:
            return
        entries: list[PublishEntry] = []
        for row in self.rows:
            if not row.pub_ok:
                continue
            for index in completed.get(row.index, ()):
                parent_page = row.pages[index - 1] if index else None
                entries.append(
                    PublishEntry(
                        place=len(entries),
                        row=row.index,
                        index=index,
                        page=row.pages[index],
                        key=self.row_key(row, index),
                        tokens=self.page_tokens(row, index),
                        root_uid=-(row.salt + 1),
                        parent_page=parent_page,
                    )
                )
        self.pool.publish(entries, self.matches_page)
        for entry in entries:
            row = self.rows[entry.row]
            if entry.chain_ok:
                row.pages[entry.index] = entry.canonical
            else:
                row.pub_ok = False
