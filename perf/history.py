"""Guards of a device that has a name, out of the runs that are committed of it.

Such a device is lent for minutes: nobody runs the same commit ten times there. But its times can be
compared between runs, so the runs of changing code say how far a row moves when nothing of its own
has changed. What was reached is the newest run of a row; its noise is read from the runs before it
that are like it, so that what the newest changed is no noise. A void run says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from perf.judge import COUNTS, LEAST_MARGIN, Recorded, judge
from perf.rows import DEVICE_METRICS, HOST_METRICS, Row, newest_runs

# Runs of a row that are looked at, the newest among them.
NUM_RUNS = 4
# A run that lies further from the newest, and whose repeats do not meet, is one of other code; and
# the most that a distance between runs adds to a margin: nearer ones may be of other code too.
CODE_CHANGE = 0.05
# A row that is noisier is not guarded: what stays within such a margin says nothing.
MOST_MARGIN = 0.5


def guards(
    rows: Sequence[Row], scenario: str, least: Callable[[str], float] = lambda _: 0.0
) -> tuple[dict[str, Recorded], dict[str, str]]:
    """Row key -> what the newest run of each row reached, and its noise; and what has no guard.

    The margin is the largest of: twice the largest distance of a run from the median of the runs
    before the newest that are like it, at most `CODE_CHANGE`; half of the spread within one of
    them; the device's own noise, which a ratio within one run does not have (`LEAST_MARGIN`); and
    `least`. A row that has one run takes its whole spread, and no less than the median of the
    margins that rows of its metric have.

    Args:
        rows: of one machine, oldest first in each scenario.
        scenario: whose rows are guarded.
        least: row key -> the least margin of a row that is no count.

    Returns:
        The guards, and row key -> why there is none.
    """
    kept = [row for row in rows if not row.void]
    current = _newest(kept, scenario)
    last = {key: _last_runs(kept, row) for key, row in current.items()}
    exact = {key for key, runs in last.items() if _are_counts(runs)}
    own = {key: runs[-1:] if key in exact else _like_newest(runs) for key, runs in last.items()}
    floor = device_noise(kept)
    margins = {key: _margin(runs, floor) for key, runs in own.items() if key not in exact}
    found: dict[str, Recorded] = {}
    missing: dict[str, str] = {}
    for key, row in current.items():
        if row.metric in (*DEVICE_METRICS, *HOST_METRICS):
            missing[key] = "what the machine gives"
        elif key in exact:
            found[key] = Recorded(value=row.value, runs=(row.run_id,))
        elif not row.value:
            missing[key] = "zero, of which no share is a margin"
        else:
            of_metric = [m for k, m in margins.items() if current[k].metric == row.metric]
            margin = _widened(margins[key], of_metric if len(own[key]) == 1 else ())
            if margin is None:
                missing[key] = "one run with one repeat"
            elif margin > MOST_MARGIN:
                missing[key] = f"noise of {margin:.0%}"
            else:
                found[key] = _recorded(own[key], max(margin, least(key)))
    return found, missing


def losses(
    rows: Sequence[Row],
    scenario: str,
    known: Mapping[str, Recorded],
    found: Mapping[str, Recorded],
) -> list[str]:
    """A line for each newest row that is worse than `known`, and each guard that `found` lacks."""
    current = _newest([row for row in rows if not row.void], scenario)
    lines = []
    for key, entry in known.items():
        if key not in found:
            lines.append(f"{key}: GUARD LOST: recorded {entry.value:.4g}")
        elif (verdict := judge(current[key], None, entry)).is_worse:
            row = current[key]
            lines.append(f"{key}: {row.value:.4g} {row.unit}: {verdict.text}; run {row.run_id}")
    return lines


def _newest(rows: Sequence[Row], scenario: str) -> dict[str, Row]:
    return {row.key: row for run in newest_runs(rows, scenario) for row in run}


def device_noise(rows: Iterable[Row]) -> float:
    """Twice the largest share by which what it gave in a run lies off the median of all runs."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.metric in DEVICE_METRICS and row.value:
            values.setdefault(row.metric, []).append(row.value)
    shares = (_distance(found) / abs(statistics.median(found)) for found in values.values())
    return max((2 * share for share in shares), default=LEAST_MARGIN)


def _last_runs(rows: Iterable[Row], newest: Row) -> list[Row]:
    """The row in the runs that are looked at, oldest first."""
    place = (newest.scenario, newest.key)
    return [row for row in rows if (row.scenario, row.key) == place][-NUM_RUNS:]


def _are_counts(runs: Sequence[Row]) -> bool:
    """Whether the row is exact; a mean of counts is not, though one run's may be whole."""
    values = [value for row in runs for value in (row.value, *row.spread)]
    return runs[-1].unit in COUNTS and all(float(value).is_integer() for value in values)


def _like_newest(runs: Sequence[Row]) -> list[Row]:
    """A row's last runs up to one of other code, oldest first."""
    newest = runs[-1]
    like: list[Row] = []
    for row in reversed(runs):
        is_far = abs(row.value - newest.value) > CODE_CHANGE * abs(newest.value)
        is_apart = row.spread[1] < newest.spread[0] or row.spread[0] > newest.spread[1]
        if is_far and is_apart:
            break
        like.insert(0, row)
    return like


def _margin(runs: Sequence[Row], floor: float) -> float | None:
    """Share of the newest value that is noise; None if that is zero, or all there is."""
    *before, newest = runs
    if not newest.value or (not before and newest.n == 1):
        return None
    size = abs(newest.value)
    share = 0.5 if before else 1.0
    within = max(share * (row.spread[1] - row.spread[0]) for row in runs) / size
    between = 2 * _distance([row.value for row in before]) / size if before else 0.0
    least = LEAST_MARGIN if newest.unit == "ratio" else floor
    return max(min(between, CODE_CHANGE), within, least)


def _widened(own: float | None, of_metric: Iterable[float | None]) -> float | None:
    """A margin, and no less than the median of others."""
    others = [margin for margin in of_metric if margin is not None]
    known = [] if own is None else [own]
    known += [statistics.median(others)] if others else []
    return max(known, default=None)


def _distance(values: Sequence[float]) -> float:
    """The largest of one from the median."""
    middle = statistics.median(values)
    return max(abs(value - middle) for value in values)


def _recorded(runs: Sequence[Row], margin: float) -> Recorded:
    return Recorded(
        value=float(f"{runs[-1].value:.4g}"),
        margin=round(margin, 4),
        runs=tuple(row.run_id for row in runs),
        values=tuple(float(f"{row.value:.4g}") for row in runs),
    )


def show(found: Mapping[str, Recorded], missing: Mapping[str, str]) -> None:
    """Says how wide the guards are, and what has none."""
    margins = sorted(entry.margin for entry in found.values() if entry.margin)
    if margins:
        wide = f"{margins[0]:.1%} to {margins[-1]:.1%}, half of them within"
        print(f"margins: {wide} {statistics.median(margins):.1%}")
    for key, reason in missing.items():
        print(f"no guard: {key}: {reason}")
