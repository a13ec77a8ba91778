"""The stages of a tuning: prompt chunks, a limit on steps, rows, kernels; each over those before.

All but kernels are compared on one engine, which is held to the candidates by turns; kernels on a
second one over the same weights, in turns with the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from compiled_engine.config import EngineConfig
from compiled_engine.settings import Settings
from compiled_engine.tune.candidates import CHUNK, KERNELS, LIMIT, ROWS, Candidates
from compiled_engine.tune.choose import (
    REQUEST_MS,
    TOKENS_PER_S,
    Decision,
    choose_best,
    choose_limit,
    not_measured,
)
from compiled_engine.tune.measure import (
    Deadline,
    JobResult,
    Limits,
    TimeUp,
    Trial,
    measure_in_turns,
)
from compiled_engine.tune.workloads import Job, Workload

V = TypeVar("V")
NUM_REPEATS = 3


class Bench(Protocol):
    """What a stage needs of an engine; see `measure.EngineBench`."""

    def run(self, job: Job, limits: Limits, seed: int) -> JobResult:
        """One run of a job."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is tuned.

    Attributes:
        config: as given.
        settings: `config` resolved.
        workload: that counts.
        candidates: what is compared.
        num_repeats: rounds.
    """

    config: EngineConfig
    settings: Settings
    workload: Workload
    candidates: Candidates
    num_repeats: int = NUM_REPEATS

    @property
    def num_runs(self) -> int:
        """Runs of jobs, as far as anybody knows before them."""
        found = self.candidates
        stages = (found.chunks, found.limits_ms, found.rows, found.objectives)
        return self.num_repeats * sum(len(values) for values in stages)


class Stages:
    """Runs the stages.

    Args:
        plan: of what.
        bench: the engine.
        second: makes the engine with measured kernels, when it is wanted; gives None, and why, if
            it cannot be had.
        deadline: of everything.
        on_done: called after each run.
    """

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        second: Callable[[], tuple[Bench | None, str]],
        deadline: Deadline,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._bench, self._second = plan, bench, second
        self._deadline, self._on_done = deadline, on_done
        self._limits = Limits(
            chunk=plan.settings.chunked_prefill_size,
            limit_ms=plan.config.max_step_ms,
            rows=plan.settings.max_num_seqs,
        )
        self._metric = REQUEST_MS if plan.workload.counts_latency else TOKENS_PER_S

    def run(self) -> list[Decision]:
        """A decision for each setting; those for which there was no time keep their defaults."""
        return [self._chunk(), self._limit(), self._rows(), self._kernels()]

    def _chunk(self) -> Decision:
        values = self._plan.candidates.chunks
        if not values:
            return self._left_out(CHUNK, self._limits.chunk)
        trials = self._measure(
            values, lambda chunk, seed: self._run(replace(self._limits, chunk=chunk), seed)
        )
        decision = choose_best(CHUNK, trials, self._metric)
        self._limits = replace(self._limits, chunk=decision.chosen)
        return decision

    def _limit(self) -> Decision:
        values = self._plan.candidates.limits_ms
        if not values:
            return self._left_out(LIMIT, self._limits.limit_ms)
        trials = self._measure(
            values, lambda limit, seed: self._run(replace(self._limits, limit_ms=limit), seed)
        )
        decision = choose_limit(LIMIT, trials, self._metric, self._plan.workload.gives_up)
        self._limits = replace(self._limits, limit_ms=decision.value)
        return decision

    def _rows(self) -> Decision:
        values, crowd = self._plan.candidates.rows, self._plan.workload.crowd
        if not values or crowd is None:
            return self._left_out(ROWS, self._limits.rows)

        def run(rows: int, seed: int) -> JobResult:
            return self._bench.run(crowd, replace(self._limits, rows=rows), seed)

        decision = choose_best(ROWS, self._measure(values, run), TOKENS_PER_S)
        self._limits = replace(self._limits, rows=decision.chosen)
        return decision

    def _kernels(self) -> Decision:
        values = self._plan.candidates.objectives
        if not values:
            return self._left_out(KERNELS, self._plan.config.kernel_objective or "latency")
        default = values[0]
        try:
            self._deadline.check()
            other, why = self._second()
        except TimeUp:
            other, why = None, "the time was up before it"
        if other is None:
            return not_measured(KERNELS, default, why)
        benches = dict(zip(values, (self._bench, other), strict=True))
        jobs = [self._plan.workload.main]
        if self._plan.workload.crowd is not None:
            jobs.append(self._plan.workload.crowd)

        def run(objective: str, seed: int) -> JobResult:
            first, *rest = (benches[objective].run(job, self._limits, seed) for job in jobs)
            return sum(rest, start=first)

        with suppress(TimeUp):  # the second engine has run nothing yet
            self._deadline.check()
            run(values[-1], 0)
        return choose_best(KERNELS, self._measure(values, run), self._metric)

    def _run(self, limits: Limits, seed: int) -> JobResult:
        return self._bench.run(self._plan.workload.main, limits, seed)

    def _measure(self, values: tuple[V, ...], run: Callable[[V, int], JobResult]) -> list[Trial[V]]:
        return measure_in_turns(
            values,
            run,
            num_repeats=self._plan.num_repeats,
            deadline=self._deadline,
            on_done=self._on_done,
        )

    def _left_out(self, name: str, default: object) -> Decision:
        return not_measured(name, default, self._plan.candidates.reasons[name])
