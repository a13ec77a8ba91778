"""Rows of results: what one says, where they lie, what is expected of them.

A row is one metric of one run, as a line of JSON in `perf/results/<machine>/<scenario>.jsonl`.
Times of different runs are never compared: a metric of speed is a ratio within its run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
EXPECTED = ROOT / "expected.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one run.

    Attributes:
        value: median of the repeats.
        unit: "ratio" or "count".
        n: repeats.
        spread: smallest and largest repeat.
        run_id: the same for all rows of a run.
        command: what was run.
        environment: device, versions, and how idle the machine was.
    """

    scenario: str
    metric: str
    value: float
    unit: str
    n: int
    spread: tuple[float, float]
    run_id: str
    commit: str
    command: str
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Repeats of one metric, before they become a row."""

    metric: str
    unit: str
    values: Sequence[float]

    def row(self, **origin: Any) -> Row:
        """The row; `origin` holds the fields that say where it comes from."""
        return Row(
            metric=self.metric,
            unit=self.unit,
            value=statistics.median(self.values),
            n=len(self.values),
            spread=(min(self.values), max(self.values)),
            **origin,
        )


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


def write_rows(rows: Sequence[Row], folder: Path) -> Path:
    """Appends the rows of one run; returns the file."""
    path = folder / f"{rows[0].scenario}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")
    return path


def read_rows(folder: Path) -> list[Row]:
    """All rows of a machine, oldest first in each file."""
    names = {f.name for f in fields(Row)}
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            values = json.loads(line)
            if values.keys() != names:
                raise SystemExit(f"{path}:{number}: no row: {sorted(names ^ values.keys())}")
            rows.append(Row(**values | {"spread": tuple(values["spread"])}))
    return rows


def read_expectations() -> dict[str, Expectation]:
    """Metric -> what is expected of it."""
    return {name: Expectation(**entry) for name, entry in json.loads(EXPECTED.read_text()).items()}


def newest_run(rows: Sequence[Row], scenario: str) -> list[Row]:
    """Rows of the scenario's last run; empty if there is none."""
    own = [row for row in rows if row.scenario == scenario]
    return [row for row in own if row.run_id == own[-1].run_id]
