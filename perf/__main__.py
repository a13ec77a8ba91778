"""`python -m perf run | check | compare | report`: measure, judge and show.

run      measures a scenario and appends its rows to perf/results/<machine>/
check    exit code 1 if the newest run breaks perf/expected.json; lists metrics without a guard
compare  two runs side by side
report   the newest run of each scenario
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perf import cpu_vs_peers, device_parity
from perf.machine import BUSY_BELOW_IDLE_PERCENT, commit, environment, idle_percent, machine_name
from perf.rows import ROOT, Row, newest_run, read_expectations, read_rows, write_rows

SCENARIOS: dict[str, Any] = {
    cpu_vs_peers.NAME: cpu_vs_peers,
    device_parity.NAME: device_parity,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all four."""
    parser = argparse.ArgumentParser(
        prog="python -m perf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="DIR")
    parser.add_argument("--machine", help="folder below DIR (default: this machine's)")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False)
    run.add_argument("scenario", choices=SCENARIOS)
    run.add_argument("--model", help="folder, GGUF file or id (default: the default model)")
    run.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    run.add_argument("--num-repeats", type=int, metavar="N", help="turns that count")
    run.add_argument("--output-len", type=int, metavar="N", help="tokens an answer")
    run.add_argument(
        "--no-start", dest="with_start", action="store_false", help="leave the two starts out"
    )
    commands.add_parser("check").add_argument("scenario", choices=SCENARIOS)
    compare = commands.add_parser("compare")
    compare.add_argument("run_ids", nargs=2, metavar="RUN_ID")
    commands.add_parser("report")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    args = build_parser().parse_args(argv)
    folder = args.results / (args.machine or machine_name())
    if args.command == "run":
        return run_scenario(args, folder)
    rows = read_rows(folder)
    if args.command == "check":
        return check(newest_run(rows, args.scenario))
    if args.command == "compare":
        return compare_runs(rows, *args.run_ids)
    report(rows)
    return 0


def run_scenario(args: argparse.Namespace, folder: Path) -> int:
    """Measures, appends and shows the rows of one run."""
    if args.num_repeats is not None and args.num_repeats < 1:
        raise SystemExit(f"--num-repeats is {args.num_repeats}; allowed is at least 1")
    if args.output_len is not None and args.output_len < 2:
        raise SystemExit(f"--output-len is {args.output_len}; allowed is at least 2")
    scenario = SCENARIOS[args.scenario]
    names = [f.name for f in fields(scenario.Options)]
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    idle_before = idle_percent()
    measured = scenario.run(
        scenario.Options(**given), lambda text: print(text, file=sys.stderr, flush=True)
    )
    idle = {"idle_percent_before": idle_before, "idle_percent_after": idle_percent()}
    made_at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    rows = [
        entry.row(
            scenario=args.scenario,
            run_id=f"{made_at}-{commit()}",
            commit=commit(),
            command=shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
            environment=environment() | idle,
        )
        for entry in measured
    ]
    print(f"appended to {write_rows(rows, folder)}", file=sys.stderr)
    show(rows)
    return 0


def check(rows: Sequence[Row]) -> int:
    """Judges one run against the expectations."""
    if not rows:
        print("no run to check", file=sys.stderr)
        return 1
    expectations = read_expectations()
    has_failed = False
    for row in rows:
        expected = expectations.get(row.metric)
        failure = expected.failure(row.value) if expected else None
        has_failed = has_failed or failure is not None
        verdict = "no guard" if expected is None else failure or "ok"
        print(f"{row.metric}: {row.value:.4g} {row.unit}: {verdict}")
    for missing in sorted(expectations.keys() - {row.metric for row in rows}):
        print(f"{missing}: not measured")
    return int(has_failed)


def compare_runs(rows: Sequence[Row], first: str, second: str) -> int:
    """Shows the metrics of two runs side by side."""
    runs = [{r.metric: r for r in rows if r.run_id == run_id} for run_id in (first, second)]
    for run_id, run in zip((first, second), runs, strict=True):
        if not run:
            known = ", ".join(dict.fromkeys(r.run_id for r in rows)) or "none"
            print(f"no run {run_id}; there are: {known}", file=sys.stderr)
            return 1
    table = Table("metric", first, second, "change")
    for metric in dict.fromkeys([*runs[0], *runs[1]]):
        pair = [run.get(metric) for run in runs]
        shown = [f"{row.value:.4g}" if row else "-" for row in pair]
        before, after = pair
        change = f"x {after.value / before.value:.3f}" if before and after and before.value else ""
        table.add_row(metric, *shown, change)
    Console(highlight=False).print(table)
    return 0


def report(rows: Sequence[Row]) -> None:
    """Shows the newest run of each scenario."""
    if not rows:
        print("no results for this machine")
    for scenario in dict.fromkeys(row.scenario for row in rows):
        show(newest_run(rows, scenario))


def show(rows: Sequence[Row]) -> None:
    """One run as a table; says so if the machine was busy."""
    origin = rows[0]
    seen = [origin.environment.get(f"idle_percent_{when}") for when in ("before", "after")]
    table = Table("metric", "value", "unit", "n", "smallest", "largest")
    for row in rows:
        low, high = row.spread
        value, smallest, largest = (f"{number:.4g}" for number in (row.value, low, high))
        table.add_row(row.metric, value, row.unit, str(row.n), smallest, largest)
    console = Console(highlight=False)
    console.print(f"{origin.scenario}  run {origin.run_id}  {origin.environment['device']}")
    console.print(f"{origin.command}\nidle before and after: {seen[0]} % and {seen[1]} %")
    if any(idle is not None and idle < BUSY_BELOW_IDLE_PERCENT for idle in seen):
        console.print("the machine was busy: repeat before quoting a ratio")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
