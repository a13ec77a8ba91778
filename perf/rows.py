"""Rows of results: what one says, where they lie.

A row is one metric of one run, as a line of JSON in `perf/results/<machine>/<scenario>.jsonl`.
Times of different runs are never compared: a metric of speed is a ratio within its run, or stands
beside the ceilings that the same run measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
# Scenarios that are run of several models, which alone tell their rows apart.
MANY_MODELS = ("agentic", "gpu_models", "start")
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
# All that other rows of the same run stand beside.
CEILINGS = (*DEVICE_METRICS, *HOST_METRICS, "read_gb_s", "matmul_gflop_s")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one run.

    Attributes:
        value: median of the repeats.
        unit: of the value.
        n: repeats.
        spread: smallest and largest repeat.
        run_id: the same for all rows of a run.
        command: what was run.
        environment: device, versions, and how idle the machine was.
        model, dtype: what was measured with; empty where it does not matter.
        batch: rows of the batch, where the metric has one.
        case: what tells rows of one metric and batch apart; empty where nothing must.
        void: the machine gave too little for any row of the run to count.
        seed: of prompts and arrivals; None where nothing is drawn.
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
    model: str = ""
    dtype: str = ""
    batch: int | None = None
    case: str = ""
    void: bool = False
    seed: int | None = None

    @property
    def key(self) -> str:
        """What the row is called in `expected.json`: `metric[batch=8,case=cold]`."""
        return key_of(self.metric, self.batch, self.case, self.model_name)

    @property
    def model_name(self) -> str:
        """Model and dtype, where a scenario has several; else empty."""
        if self.scenario not in MANY_MODELS:
            return ""
        return ",".join(part for part in (self.model, self.dtype) if part)


def key_of(metric: str, batch: int | None = None, case: str = "", model: str = "") -> str:
    """The metric's name, with model, batch and case in brackets where there are any."""
    parts = [model] if model else []
    parts += [f"batch={batch}"] if batch is not None else []
    parts += [f"case={case}"] if case else []
    return f"{metric}[{','.join(parts)}]" if parts else metric


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Repeats of one metric, before they become a row; fields as in `Row`."""

    metric: str
    unit: str
    values: Sequence[float]
    model: str = ""
    dtype: str = ""
    batch: int | None = None
    case: str = ""

    def row(self, **origin: Any) -> Row:
        """The row; `origin` holds the fields that say where it comes from."""
        return Row(
            metric=self.metric,
            unit=self.unit,
            value=statistics.median(self.values),
            n=len(self.values),
            spread=(min(self.values), max(self.values)),
            model=self.model,
            dtype=self.dtype,
            batch=self.batch,
            case=self.case,
            **origin,
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a scenario hands back.

    Attributes:
        measured: in the order of the report.
        environment: what it knows of the machine beyond `machine.environment`.
        void: see `Row`.
        failures: what could not be measured, and why; the rest still counts.
        documents: file name -> text, to lie beside the rows.
        seed: see `Row`.
    """

    measured: Sequence[Measured]
    environment: Mapping[str, Any] = field(default_factory=dict)
    void: bool = False
    failures: Sequence[str] = ()
    documents: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = 0


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
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_file(path)]


def read_file(path: Path) -> list[Row]:
    """The rows of one file. Fields with a default may be missing."""
    names = {f.name for f in fields(Row)}
    required = {f.name for f in fields(Row) if f.default is MISSING}
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        values = json.loads(line)
        wrong = (required - values.keys()) | (values.keys() - names)
        if wrong:
            raise SystemExit(f"{path}:{number}: no row: {sorted(wrong)}")
        rows.append(Row(**values | {"spread": tuple(values["spread"])}))
    return rows


def newest_runs(rows: Sequence[Row], scenario: str) -> list[list[Row]]:
    """The newest row of each key, by the run that made it: a run of a part hides nothing else.

    Args:
        rows: of one machine, oldest first.
        scenario: whose rows are looked at.

    Returns:
        Of each run the rows that no later run has measured; runs that have none are left out.
    """
    own = [row for row in rows if row.scenario == scenario]
    newest = {row.key: row.run_id for row in own}
    runs: dict[str, list[Row]] = {row.run_id: [] for row in own}
    for row in own:
        if newest[row.key] == row.run_id:
            runs[row.run_id].append(row)
    return [run for run in runs.values() if run]
