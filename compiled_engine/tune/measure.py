"""Runs jobs on an engine in this process, under limits that stand for settings, in turns."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from compiled_engine.engine import Engine
from compiled_engine.request import Request, SamplingParams
from compiled_engine.tune.workloads import Job

V = TypeVar("V")
# A difference needs a spread, and a spread needs repeats.
MIN_REPEATS = 2


class TimeUp(Exception):
    """The time that a user gave is over."""


class Deadline:
    """The end of the time that a user gave.

    Args:
        seconds: from now on.
        clock: seconds by any clock that only goes forward.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - self._clock()

    def check(self) -> None:
        """Raises `TimeUp` when it is over."""
        if self.left_s <= 0:
            raise TimeUp


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Settings that an engine can be held to without being built anew.

    Attributes:
        chunk: most tokens of a step.
        limit_ms: as `max_step_ms`; None for none.
        rows: requests that run at once at most.
    """

    chunk: int
    limit_ms: float | None
    rows: int


@dataclass(frozen=True)
class JobResult:
    """What a job took.

    Attributes:
        seconds: first submit to last token.
        num_tokens: prompts, cached or not, and answers.
        itls_ms: between two tokens of an answer, of all of them.
        requests_ms: submit to last token, of every turn.
    """

    seconds: float
    num_tokens: int
    itls_ms: list[float]
    requests_ms: list[float]

    def __add__(self, other: JobResult) -> JobResult:
        return JobResult(
            self.seconds + other.seconds,
            self.num_tokens + other.num_tokens,
            self.itls_ms + other.itls_ms,
            self.requests_ms + other.requests_ms,
        )


@dataclass
class Trial(Generic[V]):
    """A value of a setting, and what jobs took with it."""

    value: V
    results: list[JobResult] = field(default_factory=list)


class EngineBench:
    """Runs jobs on one engine.

    Args:
        engine: built for the largest of all candidates; with a step limit, if there are candidates
            of that.
        deadline: asked before each step.
    """

    def __init__(self, engine: Engine, deadline: Deadline) -> None:
        self.engine = engine
        self._deadline = deadline
        self._step_times = engine.loop.choice.step_times
        self._ids = itertools.count(1)

    def run(self, job: Job, limits: Limits, seed: int) -> JobResult:
        """One run of the job from an empty prefix cache; equal seeds give equal prompts.

        Raises:
            TimeUp: the time was up before its end; the engine can be used again.
        """
        loop, longest = self.engine.loop, self.engine.limits
        job = job.within(min(longest.max_model_len, longest.max_total_tokens) - 1)
        loop.choice.max_tokens = limits.chunk
        loop.choice.step_times = None
        if limits.limit_ms is not None:
            assert self._step_times is not None, "the engine was built without max_step_ms"
            loop.choice.step_times = self._step_times.with_limit(limits.limit_ms / 1e3)
        loop.reset_prefix_cache()
        run = _JobRun(self.engine, job, min(job.at_once, limits.rows), seed, self._ids)
        try:
            return run.finish(self._deadline)
        except TimeUp:
            run.abandon()
            raise
        finally:
            loop.choice.max_tokens = loop.executor.buckets[-1]
            loop.choice.step_times = self._step_times


@dataclass
class _Turn:
    """A request that runs."""

    conversation: int
    index: int
    prompt: list[int]
    submitted_s: float
    answer: list[int] = field(default_factory=list)
    token_s: float = 0.0


class _JobRun:
    def __init__(
        self, engine: Engine, job: Job, at_once: int, seed: int, ids: Iterable[int]
    ) -> None:
        self._loop, self._job, self._ids = engine.loop, job, iter(ids)
        self._vocab_size = engine.limits.vocab_size
        self._params = SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True)
        self._seed, self._at_once = seed, at_once
        self._shared = self._tokens("shared", job.shared)
        # Made before the clock runs.
        self._own = [
            [
                self._tokens(f"{number} {turn}", job.later if turn else job.first)
                for turn in range(job.turns)
            ]
            for number in range(job.num_conversations)
        ]
        self._turns: dict[int, _Turn] = {}
        self._itls_ms: list[float] = []
        self._requests_ms: list[float] = []

    def abandon(self) -> None:
        """Ends what runs."""
        for request_id in self._turns:
            self._loop.abort(request_id)
        while self._loop.has_work:
            self._loop.step()
        self._loop.drain()

    def finish(self, deadline: Deadline) -> JobResult:
        """Runs all conversations to their end; raises `TimeUp` between two steps."""
        start = time.perf_counter()
        begun = min(self._at_once, self._job.num_conversations)
        for number in range(begun):
            self._submit(number, 0, self._shared)
        self._waiting = iter(range(begun, self._job.num_conversations))
        while self._loop.has_work:
            deadline.check()
            self._take(self._loop.step())
        self._take(self._loop.drain())
        assert not self._turns, f"{len(self._turns)} requests did not end"
        seconds = time.perf_counter() - start
        return JobResult(seconds, self._job.num_tokens, self._itls_ms, self._requests_ms)

    def _take(self, events: Iterable[Any]) -> None:
        now = time.perf_counter()
        for event in events:
            turn = self._turns[event.request_id]
            if event.token_ids and turn.token_s:
                self._itls_ms.append((now - turn.token_s) * 1e3)
            if event.token_ids:
                turn.token_s = now
                turn.answer += event.token_ids
            if event.finish_reason is not None:
                self._end(event.request_id, now)

    def _end(self, request_id: int, now: float) -> None:
        turn = self._turns.pop(request_id)
        assert len(turn.answer) == self._job.output, f"an answer of {len(turn.answer)} tokens"
        self._requests_ms.append((now - turn.submitted_s) * 1e3)
        if turn.index + 1 < self._job.turns:
            self._submit(turn.conversation, turn.index + 1, turn.prompt + turn.answer)
            return
        following = next(self._waiting, None)
        if following is not None:
            self._submit(following, 0, self._shared)

    def _submit(self, conversation: int, index: int, before: list[int]) -> None:
        prompt = before + self._own[conversation][index]
        request_id = next(self._ids)
        self._turns[request_id] = _Turn(conversation, index, prompt, time.perf_counter())
        self._loop.submit(
            Request(request_id=request_id, prompt_token_ids=prompt, params=self._params)
        )

    def _tokens(self, name: str, count: int) -> list[int]:
        drawn = random.Random(f"{self._seed} {name}")
        return drawn.choices(range(self._vocab_size), k=count)


def measure_in_turns(
    values: Sequence[V],
    run: Callable[[V, int], JobResult],
    *,
    num_repeats: int,
    deadline: Deadline,
    on_done: Callable[[], None],
) -> list[Trial[V]]:
    """Runs every value once in each round, in another order each time; stops when time is up.

    Only whole rounds count, so that all values have the same repeats; before them the first value
    is run once and not counted.

    Args:
        values: candidates; the default first.
        run: a job with a value and a seed.
        num_repeats: rounds.
        deadline: asked before each run.
        on_done: called after each run that counts.
    """
    trials = [Trial(value) for value in values]
    try:
        deadline.check()
        run(values[0], 0)
        for number in range(1, num_repeats + 1):
            found = {}
            for place in range(len(trials)):
                index = (place + number) % len(trials)
                deadline.check()
                found[index] = run(trials[index].value, number)
                on_done()
            for index, result in found.items():
                trials[index].results.append(result)
    except TimeUp:
        pass
    return trials
