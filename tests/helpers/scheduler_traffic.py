"""Random requests and a host that submits, aborts and masks them, for scheduler tests.

Owns what clients and the host do. Owns no scheduling: the host only looks at row states, as the
real host does through its outbox. Sampled tokens and stops are a function of (prompt, position)
alone, so the text a request must produce is known before it runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tests.helpers.python_scheduler import NO_SCORES, PythonScheduler, RowState


@dataclass(frozen=True)
class Request:
    """One request a client will make."""

    arrival: int
    step: int
    prompt: tuple[int, ...]
    max_len: int
    priority: int = 0
    salt: int = 0
    grammar: bool = False
    score_from: int = NO_SCORES
    vocab: int = 3
    stop_every: int = 0
    nan_at: int | None = None  # position from which on its logits are NaN

    def spoils(self, end: int) -> bool:
        """True if the logits after a chunk that ends before position `end` are NaN."""
        return self.nan_at is not None and end > self.nan_at

    def sample(self, position: int) -> int:
        """Returns the token at a position, whatever the schedule was."""
        return hash((self.prompt, self.salt, position)) % self.vocab

    def stops(self, position: int) -> bool:
        """True if the token at this position ends the text."""
        if self.stop_every == 0:
            return False
        return hash((self.prompt, position, 11)) % self.stop_every == 0

    def forced(self, position: int, count: int) -> tuple[int, ...]:
        """Returns up to `count` tokens from a position on that a grammar could force there."""
        end = min(position + count, self.max_len - 1)
        if self.nan_at is not None:
            end = min(end, self.nan_at)
        tokens: list[int] = []
        for place in range(position, end):
            if self.stops(place):
                break
            tokens.append(self.sample(place))
        return tuple(tokens)

    def text(self) -> list[int]:
        """Returns prompt and output, up to where its logits are NaN."""
        tokens = list(self.prompt)
        while len(tokens) < self.max_len and not self.spoils(len(tokens)):
            position = len(tokens)
            tokens.append(self.sample(position))
            if self.stops(position):
                break
        return tokens


@dataclass(frozen=True)
class Traffic:
    """What happens to an engine: requests, and how wild the host and clients are.

    Attributes:
        seed: start of every random choice of the host.
        requests: in order of arrival.
        abort_rate: chance a step that some request is aborted.
        noise_rate: chance a step of an entry with an old generation or position.
        max_mask_delay: steps a grammar mask comes late at most.
        max_forced: forced tokens that a mask brings with it at most.
        first_mask_step: no mask is sent before this step.
        budgets: token budgets a step draws from.
        first_budgets: budgets of the first steps, in order.
    """

    seed: int
    requests: tuple[Request, ...]
    abort_rate: float = 0.0
    noise_rate: float = 0.0
    max_mask_delay: int = 0
    max_forced: int = 0
    first_mask_step: int = 0
    budgets: tuple[int, ...] = (8,)
    first_budgets: tuple[int, ...] = ()


@dataclass
class SimpleSubmit:
    """A submit that takes effect at once; same fields as the engine's entry."""

    row: int
    gen: int
    arrival: int
    priority: int
    salt: int
    prompt: list[int]
    max_len: int
    grammar: bool
    score_from: int = NO_SCORES


@dataclass
class SimpleAbort:
    """An abort for (row, generation)."""

    row: int
    gen: int


@dataclass
class SimpleMask:
    """A mask for (row, generation, position), and forced tokens that end in front of it."""

    row: int
    gen: int
    position: int
    forced: tuple[int, ...] = ()


class Sink(Protocol):
    """Where the host pushes entries: the engine's inbox builder, or the simple one here."""

    def submit(self, **fields: Any) -> Any: ...

    def abort(self, row: int, gen: int) -> Any: ...

    def mask(self, row: int, gen: int, position: int, forced: tuple[int, ...] = ()) -> Any: ...

    @property
    def is_empty(self) -> bool: ...


@dataclass
class SimpleSink:
    """Applies everything in the next step."""

    entries: list[Any] = field(default_factory=list)

    def submit(self, **fields: Any) -> None:
        """Queues a submit."""
        self.entries.append(SimpleSubmit(**fields))

    def abort(self, row: int, gen: int) -> None:
        """Queues an abort."""
        self.entries.append(SimpleAbort(row, gen))

    def mask(self, row: int, gen: int, position: int, forced: tuple[int, ...] = ()) -> None:
        """Queues a mask."""
        self.entries.append(SimpleMask(row, gen, position, forced))

    @property
    def is_empty(self) -> bool:
        """True if nothing waits."""
        return not self.entries

    def take(self) -> list[Any]:
        """Returns what takes effect now."""
        entries, self.entries = self.entries, []
        return entries


class Host:
    """Feeds one traffic into a sink and remembers which request sits in which row."""

    def __init__(self, traffic: Traffic, sink: Sink, num_rows: int) -> None:
        self.traffic = traffic
        self.sink = sink
        self.random = random.Random(traffic.seed)
        self.forced_random = random.Random(traffic.seed + 2)
        self.waiting = list(traffic.requests)
        self.request_of: dict[int, Request] = {}
        self.gens = [0] * num_rows
        self.uploading: dict[int, int] = {}  # row -> generation not yet applied
        self.aborted: set[int] = set()  # arrivals
        self.cut: set[int] = set()  # arrivals aborted before their whole prompt was sent
        self.masks: dict[tuple[int, int, int], int] = {}  # (row, gen, position) -> step to send at
        self.finished: dict[int, list[int]] = {}  # arrival -> text

    def push(self, step: int, oracle: PythonScheduler) -> None:
        """Queues this step's submits, aborts and masks."""
        self._push_submits(step, oracle)
        self._push_aborts(oracle)
        self._push_masks(step, oracle)
        if self.random.random() < self.traffic.noise_rate:
            self._push_noise(oracle)

    def saw(self, applied: Sequence[Any], oracle: PythonScheduler) -> None:
        """Notes what took effect and what ended; call after `advance`."""
        for entry in applied:
            if self.uploading.get(entry.row) == entry.gen and not hasattr(entry, "position"):
                del self.uploading[entry.row]
        if self.sink.is_empty:
            self.uploading.clear()
        for index, request in list(self.request_of.items()):
            row = oracle.rows[index]
            if row.state is RowState.FINISHED:
                self.finished[request.arrival] = list(row.tokens)
            is_free = row.state is RowState.FREE and index not in self.uploading
            if is_free:
                del self.request_of[index]

    @property
    def is_done(self) -> bool:
        """True if no request is left anywhere on the host's side."""
        return not self.waiting and not self.request_of and self.sink.is_empty

    def _push_submits(self, step: int, oracle: PythonScheduler) -> None:
        free = [
            row.index
            for row in oracle.rows
            if row.state is RowState.FREE and row.index not in self.request_of
        ]
        while self.waiting and self.waiting[0].step <= step and free:
            request = self.waiting.pop(0)
            row = free.pop(self.random.randrange(len(free)))
            self.gens[row] += 1
            self.request_of[row] = request
            self.uploading[row] = self.gens[row]
            self.sink.submit(
                row=row,
                gen=self.gens[row],
                arrival=request.arrival,
                priority=request.priority,
                salt=request.salt,
                prompt=list(request.prompt),
                max_len=request.max_len,
                grammar=request.grammar,
                score_from=request.score_from,
            )

    def _push_aborts(self, oracle: PythonScheduler) -> None:
        if not self.request_of or self.random.random() >= self.traffic.abort_rate:
            return
        row = self.random.choice(sorted(self.request_of))
        self.aborted.add(self.request_of[row].arrival)
        if row in self.uploading:
            self.cut.add(self.request_of[row].arrival)
        self.sink.abort(row, self.gens[row])

    def _push_masks(self, step: int, oracle: PythonScheduler) -> None:
        for index, request in self.request_of.items():
            row = oracle.rows[index]
            if not request.grammar or index in self.uploading or row.gen != self.gens[index]:
                continue
            if row.mask_missing:
                due = step + self.random.randint(0, self.traffic.max_mask_delay)
                due = max(due, self.traffic.first_mask_step)
                self.masks.setdefault((index, row.gen, row.num_tokens), due)
        for (row_index, gen, position), due in list(self.masks.items()):
            if due == step:
                self._push_mask(row_index, gen, position)
            if self.gens[row_index] != gen:
                del self.masks[row_index, gen, position]

    def _push_mask(self, row: int, gen: int, position: int) -> None:
        forced: tuple[int, ...] = ()
        request = self.request_of.get(row)
        if self.traffic.max_forced and self.gens[row] == gen and request is not None:
            count = self.forced_random.randint(0, self.traffic.max_forced)
            forced = request.forced(position, count)
        self.sink.mask(row, gen, position + len(forced), forced)

    def _push_noise(self, oracle: PythonScheduler) -> None:
        """Sends what races produce: entries of old generations and masks of old positions."""
        index = self.random.randrange(len(self.gens))
        row = oracle.rows[index]
        kind = self.random.randrange(3)
        if kind == 0:
            self.sink.abort(index, self.gens[index] - 1)
        elif kind == 1:
            forced = (1,) * min(2, self.traffic.max_forced)
            self.sink.mask(index, self.gens[index] - 1, row.num_tokens + len(forced), forced)
        elif row.grammar and row.gen == self.gens[index] and row.num_tokens > 1:
            self.sink.mask(index, row.gen, self.random.randrange(row.num_tokens))


def with_scores(rng: random.Random, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The requests, of which in one case of three about half want their prompts scored."""
    if rng.random() > 0.33:
        return requests
    return tuple(
        replace(request, score_from=rng.randrange(len(request.prompt)))
        if rng.random() < 0.5
        else request
        for request in requests
    )


def some_spoilt(
    rng: random.Random, requests: tuple[Request, ...], rate: float
) -> tuple[Request, ...]:
    """The requests, a share `rate` of them with NaN from a drawn position on."""
    return tuple(
        replace(each, nan_at=rng.randrange(each.max_len)) if rng.random() < rate else each
        for each in requests
    )


def random_requests(
    rng: random.Random,
    count: int,
    max_len: int,
    *,
    page_size: int,
    vocab: int,
    priorities: int = 1,
    salts: int = 1,
    grammar_rate: float = 0.0,
    gap: float = 1.0,
) -> tuple[Request, ...]:
    """Draws requests whose prompts often share a prefix; lengths go up to `max_len` exactly."""
    bases = [[rng.randrange(vocab) for _ in range(max_len)] for _ in range(3)]
    requests: list[Request] = []
    step = 0.0
    for arrival in range(count):
        length = max_len if rng.random() < 0.15 else rng.randint(2, max_len)
        num_prompt = rng.randint(1, length - 1)
        if rng.random() < 0.5:
            num_prompt = max(num_prompt, min(length - 1, 2 * page_size + 1))
        shared = rng.randint(0, num_prompt) if rng.random() < 0.8 else 0
        prompt = rng.choice(bases)[:shared]
        prompt = prompt + [rng.randrange(vocab) for _ in range(num_prompt - len(prompt))]
        step += rng.choice((0.0, gap, 3 * gap))
        requests.append(
            Request(
                arrival=arrival,
                step=int(step),
                prompt=tuple(prompt),
                max_len=length,
                priority=rng.randrange(priorities),
                salt=rng.randrange(salts),
                grammar=rng.random() < grammar_rate,
                vocab=vocab,
                stop_every=rng.choice((0, 0, 8)),
            )
        )
    return tuple(requests)
