"""What is expected of rows, and whether they hold it: targets, recorded values, and their margins.

A target (`expected.json`) is what should be reached one day; it may be missed for long. A recorded
value (`recorded.json`) is what was reached, with a margin derived from repeated runs, which are
named beside it: outside of it a row is a regression, or a win that nobody recorded. Counts have no
margin. A missed target fails a check only where nothing is recorded.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from perf.rows import ROOT, Row

EXPECTED = ROOT / "expected.json"
RECORDED = ROOT / "recorded.json"
COUNTS = ("count", "names")

_RATES = ("tokens/s", "TB/s", "GB/s", "TFLOP/s", "1/s")
_BETTER_IF_HIGHER = ("_vs_", "share", "speedup", "over_peak", "matches", "prefill_over_bf16")
# Repeats within one run spread less than runs do: the least that counts as a change without a
# recorded margin.
LEAST_MARGIN = 0.02


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What `expected.json` says of one metric; exactly one of the three is given."""

    at_least: float | None = None
    at_most: float | None = None
    equals: float | None = None

    def failure(self, value: float) -> str | None:
        """What is wrong with `value`, None if nothing."""
        if self.at_least is not None and value < self.at_least:
            return f"below {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"above {self.at_most:g}"
        if self.equals is not None and value != self.equals:
            return f"not {self.equals:g}"
        return None

    def __str__(self) -> str:
        signs = (("≥", self.at_least), ("≤", self.at_most), ("=", self.equals))
        return " ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What was reached.

    Attributes:
        value: median over the runs, or the newest of them.
        margin: share of the value that a row may differ by; 0 for counts.
        runs: that gave both; of a count the newest.
        values: of these runs; of a count none.
    """

    value: float
    margin: float = 0.0
    runs: Sequence[str] = ()
    values: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one row.

    Attributes:
        text: for people.
        has_failed: whether a check fails on it.
        is_worse: whether it is a regression.
        is_guarded: whether anything was expected of it.
    """

    text: str
    has_failed: bool = False
    is_worse: bool = False
    is_guarded: bool = True


def is_better_if_higher(row: Row) -> bool:
    """Whether more of the metric is better."""
    return row.unit in _RATES or any(part in row.metric for part in _BETTER_IF_HIGHER)


def judge(row: Row, expected: Expectation | None, recorded: Recorded | None) -> Verdict:
    """One row against its target and what was recorded of it."""
    missed = expected.failure(row.value) if expected else None
    if recorded is None:
        if expected is None:
            return Verdict(text="no guard", is_guarded=False)
        return Verdict(text=missed or "ok", has_failed=missed is not None)
    seen = f"recorded {recorded.value:.4g} ± {recorded.margin:.1%}"
    gap = row.value - recorded.value
    if abs(gap) > recorded.margin * abs(recorded.value) + 1e-12:
        is_win = (gap > 0) == is_better_if_higher(row)
        kind = "a win that is not recorded" if is_win else "REGRESSION"
        return Verdict(text=f"{kind}: {seen}", has_failed=True, is_worse=not is_win)
    target = f"; target missed: {missed}" if missed else ""
    return Verdict(text=f"ok, {seen}{target}")


def record(
    runs: Sequence[Sequence[Row]], least: Callable[[str], float] = lambda _: 0.0
) -> dict[str, Recorded]:
    """Row key -> what repeated runs of one scenario reached, with the margin they give.

    The margin is twice the largest distance of a run from their median, and no less than half of
    the spread within one run, nor than what `least` gives for a row's key.
    """
    rows: dict[str, list[Row]] = {}
    for run in runs:
        for row in run:
            rows.setdefault(row.key, []).append(row)
    return {key: _recorded(found, least(key)) for key, found in rows.items()}


def _recorded(rows: Sequence[Row], least: float) -> Recorded:
    middle = statistics.median(row.value for row in rows)
    if rows[0].unit in COUNTS or not middle:
        if any(row.value != middle for row in rows):
            found = ", ".join(f"{row.value:g}" for row in rows)
            raise SystemExit(f"{rows[0].key} is no count that a gate can hold: {found}")
        return Recorded(value=middle, runs=(rows[-1].run_id,))
    between = 2 * max(abs(row.value - middle) for row in rows)
    within = max((row.spread[1] - row.spread[0]) / 2 for row in rows)
    return Recorded(
        value=float(f"{middle:.4g}"),
        margin=max(least, round(max(between, within) / abs(middle), 4)),
        runs=tuple(row.run_id for row in rows),
        values=tuple(float(f"{row.value:.4g}") for row in rows),
    )


def noise(row: Row, recorded: Recorded | None) -> float:
    """Share of the value that is noise, as far as is known; 0 for counts."""
    if row.unit in COUNTS or not row.value:
        return 0.0
    within = (row.spread[1] - row.spread[0]) / 2 / abs(row.value)
    return max(within, recorded.margin if recorded else 0.0, LEAST_MARGIN)


def change(before: Row, after: Row, recorded: Recorded | None) -> str:
    """What became of a metric between two runs: "same", "better" or "worse"."""
    gap = after.value - before.value
    margin = max(noise(before, recorded), noise(after, recorded))
    if abs(gap) <= margin * abs(before.value):
        return "same"
    return "better" if (gap > 0) == is_better_if_higher(after) else "worse"


def any_machine() -> str:
    """The name under which stands what is the same on every machine with this torch."""
    return "torch-" + ".".join(metadata.version("torch").split(".")[:2])


def read_expectations() -> dict[str, dict[str, Expectation]]:
    """Scenario -> row key -> its target."""
    return {
        scenario: {key: Expectation(**entry) for key, entry in entries.items()}
        for scenario, entries in json.loads(EXPECTED.read_text()).items()
    }


def read_recorded(machine: str, path: Path = RECORDED) -> dict[str, dict[str, Recorded]]:
    """Scenario -> row key -> what was reached there, and what is the same on every machine."""
    stored = json.loads(path.read_text()) if path.is_file() else {}
    found: dict[str, dict[str, Recorded]] = {}
    for name in (any_machine(), machine):
        for scenario, entries in stored.get(name, {}).items():
            known = {key: Recorded(**entry) for key, entry in entries.items()}
            found[scenario] = found.get(scenario, {}) | known
    return found


def write_recorded(
    machine: str,
    scenario: str,
    entries: Mapping[str, Recorded],
    path: Path = RECORDED,
    *,
    is_whole: bool = False,
) -> None:
    """Puts entries in the place of those of the same keys; the rest stays unless this is whole."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    kept = {} if is_whole else stored.get(machine, {}).get(scenario, {})
    kept |= {key: asdict(entry) for key, entry in entries.items()}
    stored.setdefault(machine, {})[scenario] = dict(sorted(kept.items()))
    path.write_text(_lines(stored))


def _lines(stored: Mapping[str, Any]) -> str:
    """As JSON, a line each entry, so that a diff shows what changed."""

    def block(parts: Sequence[str], indent: str) -> str:
        inner = ",\n".join(f"{indent} {part}" for part in parts)
        return f"{{\n{inner}\n{indent}}}"

    def line(key: str, entry: Mapping[str, Any]) -> str:
        kept = {name: value for name, value in entry.items() if value or name == "value"}
        return f"{json.dumps(key)}: {json.dumps(kept)}"

    machines = []
    for machine, scenarios in sorted(stored.items()):
        parts = [
            f"{json.dumps(name)}: {block([line(*pair) for pair in entries.items()], '  ')}"
            for name, entries in sorted(scenarios.items())
        ]
        machines.append(f"{json.dumps(machine)}: {block(parts, ' ')}")
    return block(machines, "") + "\n"
