"""Which value of a setting is taken, and the reason in numbers.

A value other than the default is taken only if it is better by more than the measurement's noise:
the larger of `LEAST_MARGIN` and the spread of either value's repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_engine.bench.stats import percentile
from compiled_engine.tune.measure import MIN_REPEATS, JobResult, Trial

LEAST_MARGIN = 0.02
# Noise beyond this says that something else ran on the machine.
BUSY_MARGIN = 0.25


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What values are compared by.

    Attributes:
        unit: as printed.
        of: reads it from a result.
        is_lower_better: whether less is more.
    """

    unit: str
    of: Callable[[JobResult], float]
    is_lower_better: bool = False


TOKENS_PER_S = Metric(unit="tok/s", of=lambda result: result.num_tokens / result.seconds)
REQUEST_MS = Metric(
    unit="ms a request",
    of=lambda result: statistics.fmean(result.requests_ms),
    is_lower_better=True,
)
STEP_P99_MS = Metric(
    unit="ms p99 between tokens",
    of=lambda result: percentile(result.itls_ms, 99),
    is_lower_better=True,
)


@dataclass(frozen=True)
class Score:
    """A metric over a trial's repeats: its median, smallest and largest."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Distance of the extremes over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of a setting.

    Attributes:
        name: of the setting in `EngineConfig`.
        default: what an engine takes by itself, as it was settled.
        value: what to write; None keeps the default.
        reason: in numbers; or why nothing was measured.
        is_measured: it was compared.
        trials: what was measured, the default first; empty if nothing was.
    """

    name: str
    default: Any
    value: Any = None
    reason: str
    is_measured: bool = True
    trials: tuple[Trial[Any], ...] = field(default=(), repr=False)

    @property
    def chosen(self) -> Any:
        """The value that an engine runs with."""
        return self.default if self.value is None else self.value


def score(trial: Trial[Any], metric: Metric) -> Score:
    """A trial by a metric."""
    values = [metric.of(result) for result in trial.results]
    return Score(statistics.median(values), min(values), max(values))


def not_measured(name: str, default: Any, reason: str) -> Decision:
    """A setting that keeps its default unseen."""
    return Decision(
        name=name,
        default=default,
        reason=f"not measured ({reason}): the default is kept",
        is_measured=False,
    )


def choose_best(name: str, trials: Sequence[Trial[Any]], metric: Metric) -> Decision:
    """The best value; the default is the first trial's, and kept unless another is clearly better.

    Of values that differ less than the noise from the best one the earlier is taken.
    """
    default = trials[0].value
    if _num_rounds(trials) < MIN_REPEATS:
        return not_measured(name, default, "the time was up before it")
    scores = {index: score(trial, metric) for index, trial in enumerate(trials)}
    clear = [i for i in scores if i and _gain(scores[0], scores[i], metric) > 0]
    best = max(clear, key=lambda i: _goodness(scores[i], metric), default=0)
    best = next((i for i in clear if _gain(scores[i], scores[best], metric) <= 0), best)
    margin = _margin(scores[0], scores[best if best else _runner_up(scores, metric)])
    texts = [_described(trials[i].value, scores[i], metric, is_default=i == 0) for i in scores]
    verdict = f"{trials[best].value} is better" if best else "the default is kept"
    if margin > BUSY_MARGIN and not best:
        verdict = "the machine was too busy to tell, the default is kept"
    return Decision(
        name=name,
        default=default,
        value=trials[best].value if best else None,
        reason=f"{'; '.join(texts)}; {_rounds(trials)}, what differs by less than "
        f"{margin:.1%} is noise: {verdict}",
        trials=tuple(trials),
    )


def choose_limit(
    name: str, trials: Sequence[Trial[Any]], metric: Metric, gives_up: float
) -> Decision:
    """The limit with the shortest slow steps among those that cost little; no limit is the default.

    Args:
        name: of the setting.
        trials: the first without a limit.
        metric: what a limit may cost.
        gives_up: the share of it.
    """
    if _num_rounds(trials) < MIN_REPEATS:
        return not_measured(name, None, "the time was up before it")
    costs = [score(trial, metric) for trial in trials]
    slow = [score(trial, STEP_P99_MS) for trial in trials]
    fitting = [
        index
        for index in range(1, len(trials))
        if _loss(costs[0], costs[index], metric) <= gives_up
        and _gain(slow[0], slow[index], STEP_P99_MS) > 0
    ]
    best = min(fitting, key=lambda index: slow[index].median, default=0)
    texts = [
        f"{'no limit' if trial.value is None else f'{trial.value:g} ms'}: "
        f"{slow[index]} {STEP_P99_MS.unit} at {costs[index]} {metric.unit}"
        for index, trial in enumerate(trials)
    ]
    verdict = f"{trials[best].value:g} ms it is" if best else "no limit, which is the default"
    return Decision(
        name=name,
        default=None,
        value=trials[best].value if best else None,
        reason=f"{'; '.join(texts)}; {_rounds(trials)}; the shortest p99 that costs at most "
        f"{gives_up:.0%} of {metric.unit}: {verdict}",
        trials=tuple(trials),
    )


def _num_rounds(trials: Sequence[Trial[Any]]) -> int:
    return min(len(trial.results) for trial in trials)


def _rounds(trials: Sequence[Trial[Any]]) -> str:
    return f"{_num_rounds(trials)} repeats in turns"


def _loss(default: Score, other: Score, metric: Metric) -> float:
    """Share of the default's median that the other is worse; negative if it is better."""
    change = (other.median - default.median) / default.median if default.median else 0.0
    return change if metric.is_lower_better else -change


def _margin(one: Score, other: Score) -> float:
    return max(LEAST_MARGIN, one.spread, other.spread)


def _gain(default: Score, other: Score, metric: Metric) -> float:
    """By how much the other is better beyond the noise; not positive if it is not."""
    return -_loss(default, other, metric) - _margin(default, other)


def _goodness(found: Score, metric: Metric) -> float:
    return -found.median if metric.is_lower_better else found.median


def _runner_up(scores: dict[int, Score], metric: Metric) -> int:
    """The best of those that are not the default; the default if it is alone."""
    return max((i for i in scores if i), key=lambda i: _goodness(scores[i], metric), default=0)


def _described(value: Any, found: Score, metric: Metric, *, is_default: bool) -> str:
    return f"{value}{' (default)' * is_default}: {found} {metric.unit}"


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:.1f} k"
    return f"{value:.4g}"
