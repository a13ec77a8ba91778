"""Guards of a device that has a name, out of the runs that are committed of it.

Such a device is lent for minutes: nobody runs the same commit ten times there. But its times can be
compared between runs, so the runs of changing code say how far a row moves when nothing of its own
has changed. What was reached is the newest run of a row; its noise is read from the runs before it
that are like it. A void run says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from perf.judge import COUNTS, LEAST_MARGIN, Recorded
from perf.rows import Row, newest_runs

# What the device and its host give: no code of ours changes it, and a run that has too little is
# void.
DEVICE_METRICS = (
    "read_tb_s",
    "copy_tb_s",
    "matmul_tflops",
    "matmul_sustained_tflops",
    "fp8_matmul_tflops",
)
HOST_METRICS = ("file_gb_s", "link_gb_s")
# Runs of a row that are looked at, the newest among them.
NUM_RUNS = 4
# A run that lies further from the newest, and whose repeats do not meet, is one of other code.
CODE_CHANGE = 0.05
# A row that is noisier is not guarded: what stays within such a margin says nothing.
MOST_MARGIN = 0.5


def guards(rows: Sequence[Row], scenario: str) -> tuple[dict[str, Recorded], dict[str, str]]:
    """Row key -> what the newest runs of a scenario reached, and its noise; and what has no guard.

    The margin is the largest of: twice the largest distance of a run from the median of the runs
    like the newest; half of the spread within one of them; and the device's own noise, which a
    ratio within one run does not have (`LEAST_MARGIN`). A row that has one run takes its whole
    spread, and no less than the widest margin that a row of its metric has.

    Args:
        rows: of one machine, oldest first in each scenario.
        scenario: whose rows are guarded; of each model those in its newest run.

    Returns:
        The guards, and row key -> why there is none.
    """
    kept = [row for row in rows if not row.void]
    current = {row.key: row for run in newest_runs(kept, scenario) for row in run}
    own = {key: _like_newest(kept, row) for key, row in current.items()}
    floor = device_noise(kept)
    margins = {key: _margin(found, floor) for key, found in own.items()}
    found: dict[str, Recorded] = {}
    missing: dict[str, str] = {}
    for key, row in current.items():
        margin = margins[key]
        if len(own[key]) == 1 and not _is_count(row):
            of_metric = [margins[k] for k, r in current.items() if r.metric == row.metric]
            margin = max((m for m in of_metric if m is not None), default=None)
        if row.metric in (*DEVICE_METRICS, *HOST_METRICS):
            missing[key] = "what the machine gives"
        elif margin is None:
            missing[key] = "one run with one repeat"
        elif margin > MOST_MARGIN:
            missing[key] = f"noise of {margin:.0%}"
        else:
            found[key] = Recorded(
                value=float(f"{row.value:.4g}"),
                margin=round(margin, 4),
                runs=tuple(r.run_id for r in own[key]),
                values=() if _is_count(row) else tuple(float(f"{r.value:.4g}") for r in own[key]),
            )
    return found, missing


def device_noise(rows: Iterable[Row]) -> float:
    """Twice the largest share by which what it gave in a run lies off the median of all runs."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.metric in DEVICE_METRICS:
            values.setdefault(row.metric, []).append(row.value)
    return max((2 * _distance(found) for found in values.values()), default=LEAST_MARGIN)


def _like_newest(rows: Iterable[Row], newest: Row) -> list[Row]:
    """The row's last runs up to one of other code, oldest first."""
    same = [r for r in rows if (r.scenario, r.key) == (newest.scenario, newest.key)]
    like: list[Row] = []
    for row in reversed(same[-NUM_RUNS:]):
        is_far = abs(row.value - newest.value) > CODE_CHANGE * abs(newest.value)
        is_apart = row.spread[1] < newest.spread[0] or row.spread[0] > newest.spread[1]
        if (is_far and is_apart) or (_is_count(newest) and like):
            break
        like.insert(0, row)
    return like


def _margin(runs: Sequence[Row], floor: float) -> float | None:
    """Share of the newest value that is noise; None if one value is all there is."""
    newest = runs[-1]
    if _is_count(newest):
        return 0.0
    if len(runs) == 1 and newest.n == 1:
        return None
    share = 1.0 if len(runs) == 1 else 0.5
    within = max(share * (r.spread[1] - r.spread[0]) / abs(r.value) for r in runs)
    least = LEAST_MARGIN if newest.unit == "ratio" else floor
    return max(2 * _distance([r.value for r in runs]), within, least)


def _distance(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return max(abs(value - middle) for value in values) / abs(middle)


def _is_count(row: Row) -> bool:
    """Whether it is exact; a mean of counts is not."""
    return not row.value or (row.unit in COUNTS and float(row.value).is_integer())


def show(found: Mapping[str, Recorded], missing: Mapping[str, str]) -> None:
    """Says how wide the guards are, and what has none."""
    margins = sorted(entry.margin for entry in found.values() if entry.margin)
    if margins:
        wide = f"{margins[0]:.1%} to {margins[-1]:.1%}, half of them within"
        print(f"margins: {wide} {statistics.median(margins):.1%}")
    for key, reason in missing.items():
        print(f"no guard: {key}: {reason}")
